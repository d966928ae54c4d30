"""Measures of one text that rules ask for: words, lines, paragraphs, each made once and only when it is asked for."""

from __future__ import annotations

import re
from functools import cached_property

import numpy as np

from openk3.data.prepare.words import SHINGLE, UNSPACED, hashed, runs, tokens

LOOKED_AT = 1_000_000  # characters; rules judge a longer text by these first ones
_UNSPACED = re.compile(f"[{UNSPACED}]")
_ODD = re.compile("[\x01-\x08\x0b\x0e-\x1f\x7f-\x9f\ufffd\ufffe\uffff]")


class Measures:
    """One text, as rules see it."""

    def __init__(self, text: str, *, english_only: bool = False) -> None:
        self.text, self.english_only = text[:LOOKED_AT], english_only

    @cached_property
    def lower(self) -> str:
        """In small letters."""
        return self.text.lower()

    @cached_property
    def all_lines(self) -> list[str]:
        """With their indentation, and with empty ones."""
        return self.text.split("\n")

    @cached_property
    def lines(self) -> list[str]:
        """Without blanks around them, and without empty ones."""
        return [line for line in map(str.strip, self.all_lines) if line]

    @cached_property
    def longest(self) -> int:
        """Characters of the longest line."""
        return max(map(len, self.lines), default=0)

    @cached_property
    def paragraphs(self) -> list[str]:
        """Parts between blank lines."""
        return [part for part in map(str.strip, re.split(r"\n\s*\n", self.text)) if part]

    @cached_property
    def is_unspaced(self) -> bool:
        """Whether the script has no spaces between words: a third of the first characters say so."""
        head = self.text[:2000]
        return len(_UNSPACED.findall(head)) > len(head) / 3

    @cached_property
    def words(self) -> list[str]:
        """What stands between blanks; single letters of a script without spaces."""
        return _UNSPACED.findall(self.text) if self.is_unspaced else self.text.split()

    @cached_property
    def word_lengths(self) -> np.ndarray:
        """int64 [words]."""
        return np.fromiter(map(len, self.words), np.int64, len(self.words))

    @cached_property
    def word_hashes(self) -> np.ndarray:
        """uint64 [words]: equal for equal words, in this process alone."""
        return np.fromiter(map(hash, self.words), np.int64, len(self.words)).view(np.uint64)

    @cached_property
    def tokens(self) -> list[str]:
        """Words in small letters, and marks between them."""
        return tokens(self.lower)

    @cached_property
    def token_hashes(self) -> np.ndarray:
        """uint64 [tokens], the same on every machine."""
        return hashed(self.tokens)

    @cached_property
    def shingles(self) -> np.ndarray:
        """Hashes of the runs of five words, letter case and marks aside: the set that near-duplicates share."""
        is_word = np.fromiter((token[0].isalnum() or token[0] == "_" for token in self.tokens), bool, len(self.tokens))
        return runs(self.token_hashes[is_word], SHINGLE)

    @cached_property
    def num_odd(self) -> int:
        """Control and replacement characters."""
        return len(_ODD.findall(self.text)) if _ODD.search(self.text) else 0
