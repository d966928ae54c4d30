"""How much of a text repeats itself, by lines, paragraphs and runs of words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from openk3.data.prepare.words import runs


def repeated_parts(parts: Sequence[str]) -> tuple[float, float]:
    """(share of the parts, share of their characters) that have come before."""
    if not parts:
        return 0.0, 0.0
    first = set[str]()
    repeats = characters = 0
    for part in parts:
        if part in first:
            repeats += 1
            characters += len(part)
        first.add(part)
    return repeats / len(parts), characters / max(sum(map(len, parts)), 1)


def top_run(word_hashes: np.ndarray, word_lengths: np.ndarray, length: int) -> float:
    """Share of the characters in the most frequent run of `length` words, if it comes more than once."""
    if len(word_hashes) < length:
        return 0.0
    _, first, counts = np.unique(runs(word_hashes, length), return_index=True, return_counts=True)
    best = int(counts.argmax())
    if counts[best] < 2:
        return 0.0
    size = int(word_lengths[first[best] : first[best] + length].sum())
    return size * int(counts[best]) / max(int(word_lengths.sum()), 1)


def repeated_runs(word_hashes: np.ndarray, word_lengths: np.ndarray, length: int) -> float:
    """Share of the characters in runs of `length` words that have come before; each character counts once."""
    if len(word_hashes) < length:
        return 0.0
    values = runs(word_hashes, length)
    _, first = np.unique(values, return_index=True)
    if len(first) == len(values):
        return 0.0
    is_repeat = np.ones(len(values), bool)
    is_repeat[first] = False
    edges = np.zeros(len(word_hashes) + 1, np.int64)
    starts = np.flatnonzero(is_repeat)
    np.add.at(edges, starts, 1)
    np.add.at(edges, starts + length, -1)
    covered = edges[:-1].cumsum() > 0
    return int(word_lengths[covered].sum()) / max(int(word_lengths.sum()), 1)
