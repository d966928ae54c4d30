"""Shards of text: documents as UTF-8 end to end in one mapped file, read as a source of records for any tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from openk3.config.json_file import JsonError, read_json
from openk3.data.documents import DataError, Record
from openk3.runtime.staging import staged_folder

META, KIND = "shard.json", "text"


class TextDocument(NamedTuple):
    """One document of a shard: UTF-8 text, where it came from, its quality (NaN: not judged), 16 bytes that name it."""

    text: bytes
    where: str
    quality: float
    digest: bytes


class TextShard:
    """The documents of one shard as {"text"} records."""

    vocabulary = ""  # of none

    def __init__(self, path: str | Path) -> None:
        """Open a shard; its text is mapped, not read. Raises DataError naming the file that is missing or damaged."""
        self.path, self.name = Path(path), str(path)
        try:
            meta = read_json(self.path / META)
            self._fingerprint = str(meta["fingerprint"])
            self._starts, self._digests, self.quality = (
                np.load(self.path / f"{name}.npy") for name in ("starts", "digests", "quality")
            )
            self._text = np.memmap(self.path / "text.bin", np.uint8, "r")
            if not len(self._starts) - 1 == len(self._digests) == len(self.quality) == meta["documents"]:
                raise ValueError("its arrays differ in length")
            if len(self._text) != self._starts[-1]:
                raise ValueError(f"text.bin has {len(self._text):,} bytes, not {int(self._starts[-1]):,}")
        except (OSError, JsonError, ValueError, KeyError, TypeError, IndexError) as error:
            raise DataError(f"{path}: not a shard, or damaged ({error}); write it again") from None

    def __len__(self) -> int:
        return len(self._digests)

    def record(self, index: int) -> Record:
        """Document `index`. Raises DataError if it is not what was written."""
        where = f"{self.path.name}:{index}"
        try:
            return Record({"text": self._bytes(index).decode("utf-8")}, where)
        except UnicodeDecodeError:
            raise DataError(f"{where}: the shard is damaged; write it again") from None

    def _bytes(self, index: int) -> bytes:
        return self._text[int(self._starts[index]) : int(self._starts[index + 1])].tobytes()

    def key(self, index: int) -> str:
        """A digest of the text, so that a document stays on its side of the held-out split however shards are cut."""
        return self._digests[index].tobytes().hex()

    def where(self) -> list[str]:
        """The file and line that each document came from."""
        return (self.path / "where.txt").read_text(encoding="utf-8").split("\n")

    def fingerprint(self) -> str:
        """Digest of all documents, taken when the shard was written."""
        return self._fingerprint


def write_text_shard(path: str | Path, documents: Iterable[TextDocument]) -> dict[str, int | str]:
    """Write a folder with the documents, whole or not at all; returns what its shard.json says.

    The text is written as it comes; only sizes and names are held. Raises DataError if there is no document.
    """
    digest = hashlib.blake2b(digest_size=16)
    starts, digests, quality = [0], [], []
    with staged_folder(path, lambda folder: (folder / META).is_file()) as folder:
        with (folder / "text.bin").open("wb") as text, (folder / "where.txt").open("w", encoding="utf-8") as where:
            for document in documents:
                text.write(document.text)
                where.write(("\n" if digests else "") + " ".join(document.where.splitlines()))
                digest.update(document.digest + len(document.text).to_bytes(8, "little") + document.text)
                starts.append(starts[-1] + len(document.text))
                digests.append(document.digest)
                quality.append(document.quality)
        if not digests:
            raise DataError(f"{path}: a shard needs at least one document")
        np.save(folder / "starts.npy", np.array(starts, np.int64))
        np.save(folder / "digests.npy", np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 16))
        np.save(folder / "quality.npy", np.array(quality, np.float32))
        meta: dict[str, int | str] = {
            "kind": KIND,
            "documents": len(digests),
            "bytes": starts[-1],
            "fingerprint": digest.hexdigest(),
        }
        (folder / META).write_text(json.dumps(meta) + "\n", encoding="utf-8")
    return meta
