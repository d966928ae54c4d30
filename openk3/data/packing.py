"""Documents into windows, and windows into Packed micro-batches near a token budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from openk3.data.documents import DataError, Document
from openk3.inputs.packed import IGNORE, Packed

LOOKAHEAD = 16  # pending windows searched for one that still fits


class Span(NamedTuple):
    """Where a window lies in its document, and how many tokens it takes once images are expanded."""

    start: int
    stop: int
    num_tokens: int


class Origin(NamedTuple):
    """Which reading of which document a window comes from."""

    source: int = 0
    epoch: int = 0
    index: int = 0


@dataclass(frozen=True)
class Window:
    """A piece of one document: the unit that becomes one sequence of a batch."""

    document: Document
    span: Span
    origin: Origin = Origin()


def next_span(document: Document, done: int, seq_len: int) -> Span | None:
    """The window after the first `done` tokens of the document; None when nothing is left to predict.

    It holds at most `seq_len` tokens and, unless it is the first, begins with the last token of the one before, as
    context only, so that no target is lost at a cut. An image's prompt is never cut: where it fits only without that
    context token, it goes without. Windows without a target are left out. Raises DataError if an image fits no window.
    """
    ends, upto = document.ends, document.expanded
    while done < len(document):
        for start in dict.fromkeys((max(done - 1, 0), done)):
            reach = int(np.searchsorted(upto, upto[start] + seq_len, side="right")) - 1
            stop = int(ends[max(np.searchsorted(ends, reach, side="right") - 1, 0)])
            if done < stop <= reach:
                break
        else:
            size = int(upto[ends[np.searchsorted(ends, done, side="right")]] - upto[done])
            raise DataError(f"{document.key}: an image of {size} tokens does not fit a window of {seq_len} tokens")
        if document.targets[start + 1 : stop].any():
            return Span(start, stop, int(upto[stop] - upto[start]))
        done = stop
    return None


def cut(document: Document, seq_len: int) -> Iterator[Span]:
    """Every window of the document, in order."""
    span = next_span(document, 0, seq_len)
    while span is not None:
        yield span
        span = next_span(document, span.stop, seq_len)


def take(pending: list[Window], budget: int) -> list[Window]:
    """Remove from `pending` the windows of one micro-batch of at most `budget` tokens, in order.

    A window that does not fit the room left is passed over and stays for the next batch, but never for one of a later
    epoch of its source. The first window is always taken, whatever its size, so that none waits for ever.
    """
    taken = [pending.pop(0)]
    room = budget - taken[0].span.num_tokens
    waiting: dict[int, int] = {}
    place = 0
    while place < min(LOOKAHEAD, len(pending)):
        source, epoch, _ = pending[place].origin
        if pending[place].span.num_tokens <= room and waiting.get(source, epoch) == epoch:
            taken.append(pending.pop(place))
            room -= taken[-1].span.num_tokens
        else:
            waiting.setdefault(source, epoch)
            place += 1
    return taken


def pack(windows: Sequence[Window], media_token_id: int) -> Packed:
    """One sequence per window, images expanded, labels set: -100 where a token is not a target."""
    sequences, labels, images = [], [], []
    for window in windows:
        document, (start, stop, _) = window.document, window.span
        ids = document.ids[start:stop].astype(np.int64)
        sequences.append(ids)
        labels.append(np.where(document.targets[start:stop], ids, IGNORE))
        images += [
            item for block, item in zip(document.blocks, document.images, strict=True) if start <= block.start < stop
        ]
    return Packed.join(sequences, images, labels).expand(media_token_id)
