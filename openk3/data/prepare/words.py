"""Words of a text as numbers: what repetition, MinHash and the quality model count."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence

import numpy as np

SHINGLE = 5  # words
# Scripts without spaces between words: each of their letters is a word.
UNSPACED = "\u0e00-\u0eff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_TOKEN = re.compile(rf"[{UNSPACED}]|[^\W{UNSPACED}]+|[^\w\s]")
_ASCII_TOKEN = re.compile(r"[a-z0-9_]+|[^\w\s]", re.ASCII)
_ODD = np.uint64(0x9E3779B97F4A7C15)


def tokens(text: str) -> list[str]:
    """Words of a text in small letters, single letters of scripts without spaces, and marks."""
    return (_ASCII_TOKEN if text.isascii() else _TOKEN).findall(text)


def hashed(words: Sequence[str]) -> np.ndarray:
    """One number per word, uint64 [n], the same on every machine."""
    values = np.fromiter(map(zlib.crc32, [word.encode("utf-8", "surrogatepass") for word in words]), np.uint64)
    return mixed(values)


def mixed(values: np.ndarray) -> np.ndarray:
    """Spread over all 64 bits (the finisher of splitmix64)."""
    values = (values + _ODD) * np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(29)
    values *= np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(32))


def runs(word_hashes: np.ndarray, length: int) -> np.ndarray:
    """One number for every run of `length` words, uint64 [n - length + 1]; of all words where there are fewer."""
    length = max(min(length, len(word_hashes)), 1)
    size = len(word_hashes) - length + 1
    total = np.zeros(max(size, 0), np.uint64)
    for place in range(length):
        total = total * _ODD + word_hashes[place : place + size]
    return mixed(total)


def features(token_hashes: np.ndarray, num_features: int) -> np.ndarray:
    """Indices of tokens and pairs of neighbours in a table of `num_features` (a power of two), int64 [2 n - 1]."""
    pairs = runs(token_hashes, 2) if len(token_hashes) > 1 else token_hashes[:0]
    return (np.concatenate([token_hashes, pairs]) & np.uint64(num_features - 1)).astype(np.int64)
