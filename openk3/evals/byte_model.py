"""Witten-Bell byte n-gram models: what counting alone predicts, the yardstick for bits per byte."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

MAX_ORDER = 7  # a context of 7 bytes and the next byte fill one 64-bit key
CHUNK_BYTES = 1 << 22  # keys of one chunk are sorted at a time: about 100 MB of working memory
_START = 0  # byte that stands before the first one of a document


@dataclass(frozen=True)
class _Counts:
    """One order's table: sorted keys (context, next byte), and per context its total and distinct count."""

    keys: np.ndarray  # uint64, context << 8 | byte
    counts: np.ndarray  # int64
    contexts: np.ndarray  # uint64
    totals: np.ndarray  # int64, N(context)
    types: np.ndarray  # int64, T(context)


@dataclass(frozen=True)
class ByteModel:
    """Interpolated byte model; order n predicts a byte from the n bytes before it.

    P_n(c | h) = (N(h c) + T(h) P_{n-1}(c | h')) / (N(h) + T(h)), h' = h without its oldest byte, T(h) the number
    of distinct bytes seen after h; unseen contexts fall back to P_{n-1}; P_{-1} = 1/256 (Witten and Bell 1991).
    """

    orders: tuple[_Counts, ...]  # index n: order n
    num_bytes: int

    @classmethod
    def fit(cls, texts: Iterable[str | bytes], max_order: int = 5) -> ByteModel:
        """Count every context of up to `max_order` bytes in `texts`; documents do not see each other.

        Raises ValueError for an order outside 0..7 or when `texts` hold no bytes.
        """
        if not 0 <= max_order <= MAX_ORDER:
            raise ValueError(f"max_order: must lie in 0..{MAX_ORDER}, got {max_order}")
        parts: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in range(max_order + 1)]
        num_bytes = 0
        for buffer, is_text in _chunks(texts, max_order):
            num_bytes += int(is_text.sum())
            for order in range(max_order + 1):
                parts[order].append(np.unique(_keys(buffer, order)[is_text], return_counts=True))
        if num_bytes == 0:
            raise ValueError("no bytes to fit a byte model on")
        return cls(tuple(_merge(part) for part in parts), num_bytes)

    def bits_per_byte(self, texts: Iterable[str | bytes]) -> list[float]:
        """Mean code length of `texts` under each order 0..max_order, in bits. Raises ValueError for empty input."""
        bits = np.zeros(len(self.orders))
        num_bytes = 0
        for buffer, is_text in _chunks(texts, len(self.orders) - 1):
            probability = np.full(int(is_text.sum()), 1 / 256)
            num_bytes += probability.size
            for order, table in enumerate(self.orders):
                probability = _interpolate(table, _keys(buffer, order)[is_text], probability)
                bits[order] -= np.log2(probability).sum()
        if num_bytes == 0:
            raise ValueError("no bytes to score")
        return [float(b) for b in bits / num_bytes]


def _chunks(texts: Iterable[str | bytes], max_order: int) -> Iterable[tuple[np.ndarray, np.ndarray]]:
    """(bytes, mask of real bytes) pieces of at least CHUNK_BYTES, each document after `max_order` start bytes.

    A document longer than a chunk is cut, and its pieces keep the bytes before them as context.
    """
    pieces: list[np.ndarray] = []
    masks: list[np.ndarray] = []
    size = 0
    for text in texts:
        data = np.frombuffer(text.encode("utf-8") if isinstance(text, str) else text, np.uint8)
        padded = np.concatenate([np.full(max_order, _START, np.uint8), data])
        for start in range(0, len(data), CHUNK_BYTES):
            piece = padded[start : start + CHUNK_BYTES + max_order]
            pieces.append(piece)
            masks.append(np.arange(len(piece)) >= max_order)
            size += len(piece)
            if size >= CHUNK_BYTES:
                yield np.concatenate(pieces), np.concatenate(masks)
                pieces, masks, size = [], [], 0
    if pieces:
        yield np.concatenate(pieces), np.concatenate(masks)


def _keys(buffer: np.ndarray, order: int) -> np.ndarray:
    """uint64 per position: the `order` bytes before it (zeros before the buffer), then its own byte lowest."""
    keys = buffer.astype(np.uint64)
    for back in range(1, order + 1):
        keys[back:] |= buffer[:-back].astype(np.uint64) << np.uint64(8 * back)
    return keys


def _merge(parts: list[tuple[np.ndarray, np.ndarray]]) -> _Counts:
    keys = np.concatenate([p[0] for p in parts])
    counts = np.concatenate([p[1] for p in parts]).astype(np.int64)
    order = np.argsort(keys, kind="stable")
    keys, counts = keys[order], counts[order]
    starts = _run_starts(keys)
    keys, counts = keys[starts], np.add.reduceat(counts, starts)
    contexts = keys >> np.uint64(8)
    starts = _run_starts(contexts)
    types = np.diff(np.append(starts, len(keys)))
    return _Counts(keys, counts, contexts[starts], np.add.reduceat(counts, starts), types)


def _run_starts(sorted_values: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.concatenate([[True], sorted_values[1:] != sorted_values[:-1]]))


def _interpolate(table: _Counts, keys: np.ndarray, lower: np.ndarray) -> np.ndarray:
    """One order's probability from the probability of the order below."""
    count = _look_up(table.keys, table.counts, keys)
    contexts = keys >> np.uint64(8)
    total = _look_up(table.contexts, table.totals, contexts)
    types = _look_up(table.contexts, table.types, contexts)
    seen = total > 0
    return np.where(seen, (count + types * lower) / np.where(seen, total + types, 1), lower)


def _look_up(table_keys: np.ndarray, table_values: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Value of each key, 0 where the table has none."""
    index = np.minimum(np.searchsorted(table_keys, keys), len(table_keys) - 1)
    return np.where(table_keys[index] == keys, table_values[index], 0)
