"""Shards: documents encoded once, token ids and patches in flat arrays on disk, read as a source of records."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from openk3.config.json_file import JsonError, read_json
from openk3.data.documents import DataError, Document, Record
from openk3.data.sources import Files, Joined, Source
from openk3.data.text_shard import KIND as TEXT
from openk3.data.text_shard import TextShard
from openk3.inputs.images import MediaConfig
from openk3.inputs.tokenizer import Tokenizer
from openk3.runtime.staging import staged_folder

META, SUFFIX = "shard.json", ".shard"
INDEX = "index.json"  # of a folder with one folder of shards for each domain
_ARRAYS = ("ids", "targets", "starts", "pixels", "grids", "first_image")


def vocabulary_digest(tokenizer: Tokenizer) -> str:
    """Names a vocabulary: ids mean the same wherever it is equal."""
    tokens = (tokenizer.decode_bytes([i]) for i in range(tokenizer.vocab_size))
    return hashlib.blake2b(b"\0".join(tokens), digest_size=16).hexdigest()


def write_shard(path: str | Path, documents: Iterable[Document], tokenizer: Tokenizer) -> int:
    """Write a folder with the documents, whole or not at all; returns their number of tokens, images as placeholders.

    Pixels are kept as bytes, from which the image mean and deviation of `MediaConfig` give the patches back. Raises
    DataError if there is no document.
    """
    arrays = _flat(list(documents))
    digest = hashlib.blake2b(digest_size=16)
    for name in _ARRAYS:
        digest.update(np.ascontiguousarray(arrays[name]).tobytes())
    meta = {"vocabulary": vocabulary_digest(tokenizer), "fingerprint": digest.hexdigest()}
    with staged_folder(path, lambda folder: (folder / META).is_file()) as folder:
        for name in _ARRAYS:
            np.save(folder / f"{name}.npy", arrays[name])
        (folder / META).write_text(json.dumps(meta) + "\n", encoding="utf-8")
    return len(arrays["ids"])


def _flat(documents: list[Document]) -> dict[str, np.ndarray]:
    if not documents:
        raise DataError("a shard needs at least one document")
    images = [image for document in documents for image in document.images]
    patches = [_to_bytes(pixels) for pixels, _ in images]
    return {
        "ids": np.concatenate([document.ids for document in documents]).astype(np.int32),
        "targets": np.concatenate([document.targets for document in documents]),
        "starts": np.cumsum([0, *(len(document) for document in documents)], dtype=np.int64),
        "pixels": np.concatenate(patches) if patches else np.zeros((0, 3, 14, 14), np.uint8),
        "grids": np.array([grid for _, grid in images], dtype=np.int32).reshape(-1, 3),
        "first_image": np.cumsum([0, *(len(document.images) for document in documents)], dtype=np.int64),
    }


def _scale(media: MediaConfig) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation of the channels, [1, 3, 1, 1] each."""
    mean, std = (np.array(values, np.float32).reshape(1, 3, 1, 1) for values in (media.image_mean, media.image_std))
    return mean, std


def _to_bytes(pixels: np.ndarray) -> np.ndarray:
    mean, std = _scale(MediaConfig())
    return np.rint((pixels * std + mean) * 255).astype(np.uint8)


def _to_pixels(patches: np.ndarray) -> np.ndarray:
    """As `preprocess_image` does it, bit by bit."""
    mean, std = _scale(MediaConfig())
    levels = (np.arange(256) / 255.0).astype(np.float32)
    return (levels[patches] - mean) / std


class Shard:
    """The documents of one shard as records with "ids", "targets" and "patches", for `Encoder.encode`."""

    def __init__(self, path: str | Path) -> None:
        """Open a shard; arrays are mapped, not read. Raises DataError naming the file that is missing or damaged."""
        self.path, self.name = Path(path), str(path)
        try:
            meta = read_json(self.path / META)
            loaded = {name: np.load(self.path / f"{name}.npy", mmap_mode=_mode(name)) for name in _ARRAYS}
            self.vocabulary, self._fingerprint = str(meta["vocabulary"]), str(meta["fingerprint"])
        except (OSError, JsonError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}: not a shard, or damaged ({error}); write it again") from None
        self._ids, self._targets, self._starts, self._pixels, self._grids, self._first_image = loaded.values()
        counts = self._grids.prod(1) if len(self._grids) else np.zeros(0, np.int64)
        self._first_patch = np.concatenate([[0], counts.cumsum()])

    def __len__(self) -> int:
        return len(self._starts) - 1

    def record(self, index: int) -> Record:
        """Document `index`: ids int32 [n], targets bool [n], patches [(pixels [N, 3, P, P], (t, h, w))]."""
        span = slice(int(self._starts[index]), int(self._starts[index + 1]))
        images = [self._image(n) for n in range(int(self._first_image[index]), int(self._first_image[index + 1]))]
        fields: Mapping[str, Any] = {"ids": self._ids[span], "targets": self._targets[span], "patches": images}
        return Record(fields, self.key(index))

    def _image(self, number: int) -> tuple[np.ndarray, tuple[int, int, int]]:
        t, h, w = (int(side) for side in self._grids[number])
        patches = self._pixels[int(self._first_patch[number]) : int(self._first_patch[number + 1])]
        return _to_pixels(patches), (t, h, w)

    def key(self, index: int) -> str:
        """The shard's name and the document's number."""
        return f"{self.path.name}:{index}"

    def fingerprint(self) -> str:
        """Digest of all arrays, taken when the shard was written."""
        return self._fingerprint


def _mode(name: str) -> Any:
    return "r" if name in ("ids", "targets", "pixels") else None  # the small ones are asked for all the time


def open_source(path: str | Path, tokenizer: Tokenizer | None = None) -> Source:
    """The records at `path`: a shard, a folder of shards or of such folders (with an index), or text and JSONL files.

    Raises DataError for a path without any, and for shards of another vocabulary than `tokenizer`'s.
    """
    found = _shards(Path(path).expanduser())
    if not found:
        return Files(path)
    shards = [_open(shard) for shard in found]
    named = [shard.vocabulary for shard in shards if shard.vocabulary]
    wanted = vocabulary_digest(tokenizer) if tokenizer is not None else next(iter(named), "")
    for shard in shards:
        if shard.vocabulary not in ("", wanted):
            raise DataError(f"{shard.name}: encoded with another tokenizer; name its own with --data.tokenizer")
    return shards[0] if len(shards) == 1 else Joined(shards)


def _shards(root: Path) -> list[Path]:
    if (root / META).is_file():
        return [root]
    if not root.is_dir():
        return []
    pattern = f"*/*{SUFFIX}" if (root / INDEX).is_file() else f"*{SUFFIX}"
    return sorted(root.glob(pattern))


def _open(path: Path) -> Shard | TextShard:
    """A shard of token ids, or of text. Raises DataError."""
    try:
        is_text = read_json(path / META).get("kind") == TEXT
    except (OSError, JsonError, AttributeError) as error:
        raise DataError(f"{path}: not a shard, or damaged ({error}); write it again") from None
    return TextShard(path) if is_text else Shard(path)
