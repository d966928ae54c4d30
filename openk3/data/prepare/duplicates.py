"""Duplicates: equal texts by their hashes, near ones by banded MinHash signatures, in memory that does not grow fast.

A signature's values are cut into bands; texts that share a band are candidates (locality-sensitive hashing, Leskovec,
Rajaraman and Ullman, Mining of Massive Datasets, section 3.4). Bands are sorted one after another from a file of
signatures, so memory holds a few numbers for each text, and never an index of all bands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors import safe_open
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from openk3.data.prepare.words import runs

BLOCK = 1 << 15  # texts or pairs looked at together
PART = 1 << 24  # texts whose keys are sorted together
NEIGHBOURS = 8  # of those that share a band, each is compared with this many before it, and with the first
CERTAIN = 0.99  # chance that two texts of just the wanted similarity become candidates


class Duplicates(NamedTuple):
    """For each text, int64 [n]: the earlier one that it repeats, or -1; and float32 [n]: how similar the two are."""

    of: np.ndarray
    similarity: np.ndarray


def band_rows(similarity: float, num_hashes: int) -> int:
    """Rows of a band: the most for which texts of this similarity become candidates with 99 % certainty."""
    for rows in range(num_hashes, 0, -1):
        if 1 - (1 - similarity**rows) ** (num_hashes // rows) >= CERTAIN:
            return rows
    return 1


def read_arrays(chunks: Sequence[Path], name: str) -> Iterator[np.ndarray]:
    """One array of each chunk's file."""
    for path in chunks:
        with safe_open(path, "numpy") as file:
            yield file.get_tensor(name)


def find_duplicates(
    chunks: Sequence[Path], similarity: float, scratch: Path, progress: Callable[[float], object] = lambda share: None
) -> Duplicates:
    """Every text that repeats an earlier one of `chunks`, exactly or (from `similarity` on, if it is not 0) nearly.

    The first of equal texts stays. Of near ones, in order, a text goes if its estimated similarity to an earlier one
    that stays reaches `similarity`. `scratch` is written over, and read back in pieces.
    """
    total = sum(len(sizes) for sizes in read_arrays(chunks, "size"))
    found = Duplicates(np.full(total, -1, np.int64), np.zeros(total, np.float32))
    _exact(chunks, found)
    if similarity and total:
        alive = np.flatnonzero(found.of < 0)
        try:
            near = _near(_gathered(chunks, found.of < 0, scratch), similarity, progress)
        finally:
            scratch.unlink(missing_ok=True)
        hit = near.of >= 0
        found.of[alive[hit]] = alive[near.of[hit]]
        found.similarity[alive[hit]] = near.similarity[hit]
    return found


def _exact(chunks: Sequence[Path], found: Duplicates) -> None:
    """Mark all but the first of texts with one hash."""
    parts = max(1, -(-len(found.of) // PART))
    for part in range(parts):
        places, hashes, first = [], [], 0
        for block in read_arrays(chunks, "hash"):
            mine = np.flatnonzero(block[:, 0] % np.uint64(parts) == part)
            places.append(first + mine)
            hashes.append(block[mine])
            first += len(block)
        place, value = np.concatenate([*places, np.zeros(0, np.int64)]), np.concatenate(hashes) if hashes else None
        if value is None or not len(value):
            continue
        order = np.lexsort((place, value[:, 1], value[:, 0]))
        place, value = place[order], value[order]
        starts = np.flatnonzero(np.r_[True, (value[1:] != value[:-1]).any(1)])
        firsts = np.repeat(place[starts], np.diff(np.r_[starts, len(place)]))
        repeats = place != firsts
        found.of[place[repeats]] = firsts[repeats]
        found.similarity[place[repeats]] = 1


def _gathered(chunks: Sequence[Path], alive: np.ndarray, scratch: Path) -> np.ndarray:
    """The signatures of the living texts, uint32 [n, num_hashes], in a file that is mapped."""
    first, width = 0, 1
    with scratch.open("wb") as file:
        for block in read_arrays(chunks, "signature"):
            width = block.shape[1]
            file.write(block[alive[first : first + len(block)]].tobytes())
            first += len(block)
    return np.memmap(scratch, np.uint32, "r").reshape(-1, width)


def _near(signatures: np.ndarray, similarity: float, progress: Callable[[float], object]) -> Duplicates:
    count, width = signatures.shape
    rows = band_rows(similarity, width)
    labels = np.arange(count)
    parts = max(1, -(-count // PART))
    bands = width // rows
    for band in range(bands):
        for part in range(parts):
            pairs = _candidates(signatures[:, band * rows : (band + 1) * rows], part, parts)
            labels = _joined(labels, signatures, pairs, similarity)
            progress((band + (part + 1) / parts) / bands)
    return _greedy(labels, signatures, similarity)


def _candidates(band: np.ndarray, part: int, parts: int) -> np.ndarray:
    """Pairs (later, earlier) of texts with the same values in a band, int64 [pairs, 2]."""
    places, keys = [], []
    for start in range(0, len(band), BLOCK):
        key = runs(band[start : start + BLOCK].astype(np.uint64).T, band.shape[1])[0]
        mine = np.flatnonzero(key % np.uint64(parts) == part)
        places.append(start + mine)
        keys.append(key[mine])
    place, key = np.concatenate(places), np.concatenate(keys)
    order = np.argsort(key, kind="stable")
    place, key = place[order], key[order]
    starts = np.r_[True, key[1:] != key[:-1]] if len(key) else np.zeros(0, bool)
    firsts = np.flatnonzero(starts)[np.cumsum(starts) - 1] if len(key) else np.zeros(0, np.int64)
    later = np.arange(len(key))
    pairs = [np.stack([place, place[firsts]], 1)[later != firsts]]
    for back in range(1, NEIGHBOURS + 1):
        inside = later - back > firsts
        pairs.append(np.stack([place[inside], place[later[inside] - back]], 1))
    return np.concatenate(pairs)


def _joined(labels: np.ndarray, signatures: np.ndarray, pairs: np.ndarray, similarity: float) -> np.ndarray:
    """Labels of the groups once those of similar pairs are one."""
    edges = []
    for start in range(0, len(pairs), BLOCK):
        some = pairs[start : start + BLOCK]
        some = some[labels[some[:, 0]] != labels[some[:, 1]]]
        alike = (signatures[some[:, 0]] == signatures[some[:, 1]]).mean(1) >= similarity
        edges.append(labels[some[alike]])
    edge = np.concatenate([*edges, np.zeros((0, 2), np.int64)])
    if not len(edge):
        return labels
    size = int(labels.max()) + 1
    graph = coo_matrix((np.ones(len(edge), np.int8), (edge[:, 0], edge[:, 1])), shape=(size, size))
    return connected_components(graph, directed=False)[1][labels]


def _greedy(labels: np.ndarray, signatures: np.ndarray, similarity: float) -> Duplicates:
    """Inside each group, in order, a text goes if it is like one that stays."""
    found = Duplicates(np.full(len(labels), -1, np.int64), np.zeros(len(labels), np.float32))
    order = np.argsort(labels, kind="stable")
    starts = np.flatnonzero(np.r_[True, np.diff(labels[order]) != 0])
    sizes = np.diff(np.r_[starts, len(order)])
    for start, size in zip(starts[sizes > 1].tolist(), sizes[sizes > 1].tolist()):
        group, kept = order[start : start + size], 1
        values, names = np.empty((size, signatures.shape[1]), np.uint32), [int(group[0])]
        values[0] = signatures[group[0]]
        for place in group[1:]:
            signature = signatures[place]
            alike = (values[:kept] == signature).mean(1)
            best = int(alike.argmax())
            if alike[best] >= similarity:
                found.of[place], found.similarity[place] = names[best], alike[best]
            else:
                values[kept], kept = signature, kept + 1
                names.append(int(place))
    return found
