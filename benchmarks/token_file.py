"""Real text of this machine as one small file of token ids, to be carried to machines that have other text.

    python benchmarks/token_file.py tokens.xz --max-bytes 44000000

Reads Python sources and documentation below the interpreter's library and its installed packages: a sample of whole
files in the order of the md5 of their names, repeated contents left out. Files whose md5 falls in the lowest 5 % are
held out. A byte-level BPE tokenizer is trained on the first training files; documents end with its end-of-sequence id.
The file is LZMA: a line of JSON (sizes, sources, SHA-256 of the ids), then the ids as 16-bit integers, training first.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402

from openk3.data.sources import is_held_out  # noqa: E402

SUFFIXES = (".py", ".md", ".rst", ".txt")
LARGEST_FILE = 300_000  # bytes; larger ones are tables
TOKENIZER_BYTES = 4_000_000  # of training text that the tokenizer is learnt from
HELD_OUT_BYTES = 2_500_000
SKIPPED = {"__pycache__", "site-packages", "dist-packages", "node_modules"}
# Ids are 16-bit integers: their low and high bytes have statistics of their own.
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 3, "lp": 1, "pb": 1}]


@dataclass(frozen=True)
class Tokens:
    """Ids of training and held-out text, and what they were made of."""

    train_T: torch.Tensor  # int32
    held_out_T: torch.Tensor
    head: dict[str, Any]

    @property
    def vocab(self) -> int:
        """Size of the vocabulary, control tokens included."""
        return self.head["vocab_size"]

    @property
    def held_out_bytes_per_token(self) -> float:
        """UTF-8 bytes that a held-out id stands for on average, ends of documents included."""
        return self.head["held_out_bytes"] / len(self.held_out_T)


def roots() -> dict[str, Path]:
    """Folders that are read, by the name their files begin with."""
    paths = sysconfig.get_paths()
    return {"library": Path(paths["stdlib"]), "packages": Path(paths["purelib"])}


def files(folders: dict[str, Path]) -> list[tuple[str, Path]]:
    """(name, path) of every text file, in sampling order."""
    found = []
    for label, root in folders.items():
        for folder, below, names in os.walk(root):
            below[:] = sorted(name for name in below if name not in SKIPPED and not name.startswith("."))
            paths = [Path(folder) / name for name in names if name.endswith(SUFFIXES)]
            found += [(f"{label}/{path.relative_to(root).as_posix()}", path) for path in paths]
    return sorted(found, key=lambda file: hashlib.md5(file[0].encode(), usedforsecurity=False).digest())


def documents(folders: dict[str, Path]) -> Iterator[tuple[str, str]]:
    """(name, text) of files that are UTF-8, not empty, not too large and not seen before."""
    seen = set()
    for name, path in files(folders):
        try:
            data = path.read_bytes()
            text = data.decode("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        content = hashlib.md5(data, usedforsecurity=False).digest()
        if text.strip() and len(data) <= LARGEST_FILE and content not in seen and "\0" not in text:
            seen.add(content)
            yield name, text


def gather(folders: dict[str, Path], max_bytes: int, vocab: int) -> Tokens:
    """Sample, split, learn a tokenizer and encode. Raises ValueError where there is too little text."""
    from openk3.inputs.tokenizer import Tokenizer

    train: list[str] = []
    held_out: list[str] = []
    sizes, share = [0, 0], min(HELD_OUT_BYTES, max_bytes // 10)
    for name, text in documents(folders):
        side = int(is_held_out(name))
        if sizes[side] < (max_bytes, share)[side]:
            (train, held_out)[side].append(text)
            sizes[side] += len(text.encode())
        if sizes[0] >= max_bytes and sizes[1] >= share:
            break
    if not train or not held_out:
        raise ValueError(f"{', '.join(map(str, folders.values()))}: too little text")
    learnt, room = [], TOKENIZER_BYTES
    for text in train:
        learnt.append(text)
        room -= len(text)
        if room < 0:
            break
    tokenizer = Tokenizer.train(learnt, vocab)
    end = tokenizer.special["[EOS]"]
    train_T, held_out_T = (
        torch.tensor([i for text in texts for i in (*tokenizer.encode(text), end)], dtype=torch.int32)
        for texts in (train, held_out)
    )
    head: dict[str, Any] = {
        "vocab_size": tokenizer.vocab_size,
        "train_documents": len(train),
        "held_out_documents": len(held_out),
    }
    head |= {"train_bytes": sizes[0], "held_out_bytes": sizes[1], "sources": list(folders)}
    head["python"] = sys.version.split()[0]
    return Tokens(train_T, held_out_T, head)


def write(path: Path, tokens: Tokens) -> None:
    """Write the file whole or not at all."""
    ids = np.concatenate([part.numpy().astype("<u2") for part in (tokens.train_T, tokens.held_out_T)]).tobytes()
    counts = {"train_tokens": len(tokens.train_T), "held_out_tokens": len(tokens.held_out_T)}
    head = tokens.head | counts | {"sha256": hashlib.sha256(ids).hexdigest()}
    partial = path.with_name(f".{path.name}.partial")
    with lzma.open(partial, "wb", format=lzma.FORMAT_XZ, filters=FILTERS) as file:
        file.write(json.dumps(head).encode() + b"\n" + ids)
    os.replace(partial, path)


def read(path: Path) -> Tokens:
    """What `write` wrote. Raises ValueError naming the file if its ids are not those that it names."""
    with lzma.open(path, "rb") as file:
        line, _, ids = file.read().partition(b"\n")
    head = json.loads(line)
    if hashlib.sha256(ids).hexdigest() != head["sha256"]:
        raise ValueError(f"{path}: damaged: its ids have another SHA-256 than it says")
    all_T = torch.from_numpy(np.frombuffer(ids, dtype="<u2").astype(np.int32))
    train_T, held_out_T = all_T.split([head["train_tokens"], head["held_out_tokens"]])
    return Tokens(train_T, held_out_T, head)


def main(arguments: list[str] | None = None) -> int:
    """Gather and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="file to write")
    parser.add_argument("--max-bytes", type=int, default=44_000_000, help="training text at most (default 44 MB)")
    parser.add_argument("--vocab", type=int, default=4096, help="size of the vocabulary, 256 control tokens included")
    options = parser.parse_args(arguments)
    tokens = gather(roots(), options.max_bytes, options.vocab)
    write(options.out, tokens)
    print(f"{options.out}: {options.out.stat().st_size:,} bytes; {len(tokens.train_T):,} + {len(tokens.held_out_T):,}")
    print(json.dumps(tokens.head))
    return 0


if __name__ == "__main__":
    sys.exit(main())
