"""One pass that holds decoding steps and prompts: each sequence gets what it would get alone, by the form that fits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_model import close, random_ids, tiny_config, tiny_model

from openk3 import Packed
from openk3.model import kda
from openk3.model.cache import DenseCache, KdaCache, Sequences
from openk3.model.mla import GatedMLA

MODEL = tiny_model()


def layout(*lengths: int) -> Sequences:
    """Sequences of these lengths."""
    return Sequences(torch.tensor([0, *lengths]).cumsum(0).to(torch.int32))


@pytest.mark.parametrize(
    "second", [(1, 1, 1, 1), (1, 1, 9, 30), (1, 0, 1, 5), (4, 1, 1, 1), (1, 1, 0, 0), (0, 0, 0, 1)]
)
def test_s04_steps_and_prompts_in_one_pass(second: tuple[int, ...]) -> None:
    """S04: logits of unequal pieces, mixed with steps, are those of each sequence alone; so are the caches."""
    rows = random_ids([40, 33, 50, 45])
    first = (12, 20, 0, 7)
    want = [MODEL(Packed.join([row]))[a : a + b] for row, a, b in zip(rows, first, second)]
    cache = MODEL.new_cache(4)
    MODEL(Packed.join([row[:a] for row, a in zip(rows, first)]), cache)
    got = MODEL(Packed.join([row[a : a + b] for row, a, b in zip(rows, first, second)]), cache)
    for part, whole in zip(got.split(list(second)), want):
        close(part, whole)
    third = (1, 1, 2, 1)
    got = MODEL(Packed.join([row[a + b : a + b + c] for row, a, b, c in zip(rows, first, second, third)]), cache)
    for part, row, a, b, c in zip(got.split(list(third)), rows, first, second, third):
        close(part, MODEL(Packed.join([row]))[a + b : a + b + c])


def test_each_sequence_takes_the_form_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that come first are steps beside a long prompt, and their past is not expanded for its sake."""
    taken: list[tuple[str, int]] = []

    def watch(owner: Any, name: str, count: Any) -> None:
        run = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, **k: taken.append((name, count(*a, **k))) or run(*a, **k))

    watch(kda, "step_kda", lambda q, *a, **k: len(q))
    watch(kda, "chunk_kda", lambda q, *a, **k: len(q))
    watch(GatedMLA, "absorbed", lambda self, q, *a: len(q))
    watch(GatedMLA, "expanded", lambda self, q, *a: len(q))
    cache, rows = MODEL.new_cache(3), random_ids([9, 12, 60])
    MODEL(Packed.join([row[:6] for row in rows]), cache)
    taken.clear()
    MODEL(Packed.join([rows[0][6:7], rows[1][6:7], rows[2][6:]]), cache)
    assert set(taken) == {("step_kda", 2), ("chunk_kda", 54), ("absorbed", 2), ("expanded", 54)}


def test_split_remembers_and_leaves_out_empty_parts() -> None:
    """Each part is a layout of its own that begins at 0."""
    sequences = layout(1, 1, 5, 0)
    assert sequences.num_single == 2 and sequences.split(2) is sequences.split(2)
    first, second = sequences.split(2)
    assert (first.which, first.rows) == (slice(0, 2), slice(0, 2)) and first.sequences.one_each
    assert (second.which, second.rows) == (slice(2, 4), slice(2, 7)) and second.sequences.lengths == [5, 0]
    for whole in (sequences.split(0), sequences.split(4)):
        assert [part.sequences for part in whole] == [sequences]
    assert [part.rows for part in layout().split(0)] == [slice(0, 0)]


def test_what_a_failed_pass_wrote_is_dropped() -> None:
    """A layer that wrote one part of two before the pass failed does not add it to the next pass."""
    layer = DenseCache(tiny_config(), 2, torch.float64).layers[0]
    assert isinstance(layer, KdaCache)
    state_NHKV, windows = layer.read(slice(0, 2))
    one = (state_NHKV[:1] + 1, tuple(window[:1] + 1 for window in windows))
    layer.write(slice(0, 1), one)
    layer.write(slice(0, 2), (state_NHKV + 2, tuple(window + 2 for window in windows)))
    layer.commit()
    assert torch.equal(layer.state_NHKV, torch.full_like(state_NHKV, 2.0))
    assert all(torch.equal(window, torch.full_like(window, 2.0)) for window in layer.windows)
