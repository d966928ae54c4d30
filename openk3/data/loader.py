"""Loader: an endless, deterministic, resumable stream of micro-batches from one or several sources."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from openk3.data.documents import DataError, Document, Encoder
from openk3.data.packing import LOOKAHEAD, Origin, Span, Window, next_span, pack, take
from openk3.data.sources import Documents, Joined, Source
from openk3.inputs.packed import Packed

OPEN_DOCUMENTS = 64  # read at once, so that neighbouring windows come from different documents


@dataclass
class OpenDocument:
    """A document that is being cut: the first `done` tokens have been given out."""

    index: int
    document: Document
    done: int = 0


class Stream:
    """Endless windows of one source: each epoch in its own order, every document once, windows of many mixed.

    An epoch ends before the next begins, so the windows of an epoch are those of every document exactly once.
    """

    def __init__(self, source: Source, encoder: Encoder, number: int, seed: int) -> None:
        self.source, self.documents = source, Documents(source, encoder)
        self.number, self.seed = number, seed
        self.epoch = self.position = self.drawn = self.tokens = 0
        self.open: list[OpenDocument] = []
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.int64))
        if not len(source):
            raise DataError(f"{source.name}: no training documents")

    def next_window(self, seq_len: int) -> Window:
        """The next window of at most `seq_len` tokens. Raises DataError if no document has anything to predict."""
        barren = 0
        while True:
            barren += self._read()
            if barren > len(self.source):
                raise DataError(f"{self.source.name}: no document has anything to predict")
            place = _hash(self.seed, self.number, self.drawn) % len(self.open)
            self.drawn += 1
            opened = self.open[place]
            span = next_span(opened.document, opened.done, seq_len)
            if span is not None:
                opened.done = span.stop
                self.tokens += span.num_tokens
                return Window(opened.document, span, Origin(self.number, self.epoch, opened.index))
            self.open.pop(place)

    def _read(self) -> int:
        """Open documents of this epoch until the pool is full; start the next epoch once all have been used up."""
        if not self.open and self.position == len(self.source):
            self.epoch, self.position = self.epoch + 1, 0
        before = self.position
        while len(self.open) < OPEN_DOCUMENTS and self.position < len(self.source):
            index = self._index(self.position)
            self.open.append(OpenDocument(index, self.documents[index]))
            self.position += 1
        return self.position - before

    def _index(self, position: int) -> int:
        if self._order[0] != self.epoch:
            self._order = (self.epoch, permutation(len(self.source), self.seed, self.number, self.epoch))
        return int(self._order[1][position])

    def place(self) -> tuple[dict[str, int], list[OpenDocument]]:
        """Where the stream is, for `go_back`; nothing has to be read again."""
        return self._cursor(), [dataclasses.replace(opened) for opened in self.open]

    def go_back(self, place: tuple[dict[str, int], list[OpenDocument]]) -> None:
        """Continue where `place` was taken."""
        vars(self).update(place[0])
        self.open = place[1]

    def _cursor(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("epoch", "position", "drawn", "tokens")}

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        cursor = self._cursor()
        return {**cursor, "open": [[opened.index, opened.done] for opened in self.open]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken, reading the open documents again."""
        for name in ("epoch", "position", "drawn", "tokens"):
            setattr(self, name, state[name])
        self.open = [OpenDocument(index, self.documents[index], done) for index, done in state["open"]]


class Loader:
    """Yields the micro-batches of one optimizer step after another.

    The order depends on the documents, the seed and the window lengths asked for, and on nothing else. Without
    `weights` all sources are one pool; with them each has epochs of its own, and the next window comes from the source
    that is furthest below its share of the tokens.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        encoder: Encoder,
        *,
        batch_tokens: int,
        micro_batch_tokens: int,
        weights: Sequence[float] = (),
        seed: int = 0,
    ) -> None:
        if weights and len(weights) != len(sources):
            raise DataError(f"weights: {len(weights)} for {len(sources)} sources; give one per source, or none")
        pools = list(sources) if weights else [Joined(sources)]
        self.streams = [Stream(source, encoder, number, seed) for number, source in enumerate(pools)]
        self.weights = tuple(weights) or (1.0,)
        self.media_token_id = encoder.media_pad
        self.batch_tokens, self.micro_batch_tokens = batch_tokens, micro_batch_tokens
        self.pending: list[Window] = []
        parts = [repr((seed, self.weights)), *(source.fingerprint() for source in pools)]
        self.fingerprint = hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()

    def batch(self, seq_len: int) -> list[Packed]:
        """The micro-batches of the next optimizer step, in windows of at most `seq_len` tokens.

        Each holds at most max(micro_batch_tokens, seq_len) tokens; together they make about batch_tokens. An error
        leaves the loader as it was.
        """
        budget = max(self.micro_batch_tokens, seq_len)
        places, pending = [stream.place() for stream in self.streams], list(self.pending)
        try:
            return [self._micro_batch(seq_len, budget) for _ in range(max(1, round(self.batch_tokens / budget)))]
        except BaseException:  # a document that cannot be read: the next call begins where this one did
            for stream, place in zip(self.streams, places, strict=True):
                stream.go_back(place)
            self.pending = pending
            raise

    def _micro_batch(self, seq_len: int, budget: int) -> Packed:
        """Twice the budget, and enough windows, are kept pending, so that the packer has something to choose from."""
        waiting = sum(window.span.num_tokens for window in self.pending)
        while waiting < 2 * budget or len(self.pending) <= LOOKAHEAD:
            shares = [stream.tokens / weight for stream, weight in zip(self.streams, self.weights, strict=True)]
            window = self.streams[shares.index(min(shares))].next_window(seq_len)
            self.pending.append(window)
            waiting += window.span.num_tokens
        return pack(take(self.pending, budget), self.media_token_id)

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values: the fingerprint, every stream's cursor, and the windows read but not yet given out."""
        return {
            "fingerprint": self.fingerprint,
            "streams": [stream.state_dict() for stream in self.streams],
            "pending": [[*window.origin, *window.span] for window in self.pending],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly where `state` was taken. Raises DataError if the documents are not the same ones."""
        if state["fingerprint"] != self.fingerprint:
            names = ", ".join(stream.source.name for stream in self.streams)
            raise DataError(
                f"{names}: the training documents, weights or seed changed since the checkpoint;"
                " put them back, or start a new run"
            )
        for stream, saved in zip(self.streams, state["streams"], strict=True):
            stream.load_state_dict(saved)
        self.pending = []
        for number, epoch, index, *span in state["pending"]:
            document = self.streams[number].documents[index]
            self.pending.append(Window(document, Span(*span), Origin(number, epoch, index)))


def _hash(*key: int) -> int:
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little")


def permutation(size: int, *key: int) -> np.ndarray:
    """A pseudo-random order of range(size) that depends on `key` alone, on any machine and NumPy version."""
    # One round of splitmix64 per index, then a stable sort by the results.
    z = np.arange(size, dtype=np.uint64) + np.uint64(_hash(*key))
    z *= np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(z ^ (z >> np.uint64(31)), kind="stable")
