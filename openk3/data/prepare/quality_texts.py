"""Texts for the quality model: pieces of files that the user calls good or bad; bad ones are made where none are."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from openk3.config.prepare import PrepareConfig
from openk3.data.prepare.chunk import Outcome, Sieve, mend
from openk3.data.prepare.domains import label
from openk3.data.prepare.inputs import list_inputs
from openk3.data.prepare.items import Item
from openk3.data.prepare.measures import Measures
from openk3.data.prepare.noise import bad_code, bad_prose
from openk3.data.prepare.quality_training import Sample
from openk3.data.prepare.readers import Reader

PIECE, SHORTEST = 4000, 200  # characters
PIECES_PER_TEXT = 12
MOST = 40_000  # pieces of a side


def samples(good: Sequence[str], bad: Sequence[str], text_field: str = "text", seed: int = 0) -> Iterator[Sample]:
    """Pieces of the good texts, then of the bad ones; without `bad`, one made from each good piece.

    Raises DataError for what cannot be read.
    """
    for sample in _pieces(good, True, text_field):
        yield sample
        if not bad:
            rng = random.Random(f"{seed}:{sample.where}")
            is_code = label(Measures(sample.text), sample.suffix) == "code"
            made = (bad_code if is_code else bad_prose)(sample.text, rng)
            # Its suffix would say what it no longer looks like: bad code is judged as code.
            yield Sample(made, False, sample.where, ".py" if is_code else ".txt")
    if bad:
        yield from _pieces(bad, False, text_field)


def _pieces(paths: Sequence[str], is_good: bool, text_field: str) -> Iterator[Sample]:
    config = PrepareConfig(inputs=tuple(paths), out="", text_field=text_field, quality="off")
    entries, _ = list_inputs(config.inputs)
    sieve, outcome, given = Sieve(config), Outcome(), 0
    for item, _ in Reader(entries, config).read():
        if not isinstance(item, Item):
            continue
        text, suffix, _ = sieve.text_of(item, outcome)
        if text is None:
            continue
        text = mend(text)[0]
        for number, start in enumerate(_starts(len(text))):
            piece = text[start : start + PIECE]
            if len(piece) >= SHORTEST and given < MOST:
                given += 1
                yield Sample(piece, is_good, f"{item.where}#{number}", suffix)


def _starts(length: int) -> range:
    """Where the pieces of a text begin: end to end, or spread over a longer one."""
    step = max(PIECE, -(-length // PIECES_PER_TEXT))
    return range(0, length, step)
