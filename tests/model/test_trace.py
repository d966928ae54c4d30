"""Trace: what each hook sees, and that nothing is computed or kept without one."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from tiny_model import random_ids, tiny_model

from openk3 import Packed
from openk3.model.trace import NO_TRACE, Recorder, Trace

MODEL = tiny_model()
PACKED = Packed.join(random_ids([9, 5]))


def test_recorder_sees_every_part() -> None:
    """One entry per layer and hook, detached, with the shapes of the legend."""
    recorder = Recorder()
    MODEL(PACKED, trace=recorder)
    assert set(recorder.routes) == set(recorder.scores) == set(recorder.biases) == {1, 2, 3, 4, 5}
    assert set(recorder.decays) == {0, 1, 2, 4} and set(recorder.max_logits) == {3, 5}
    assert set(recorder.mixer_outs) == set(recorder.ffn_outs) == set(recorder.layer_outs) == set(range(6))
    assert recorder.decays[0].shape == (14, 2, 16) and recorder.max_logits[3].shape == (3,)
    assert recorder.scores[1].shape == (14, 6) and recorder.layer_outs[5].shape == (14, 32)
    values = [*recorder.scores.values(), *recorder.decays.values(), *recorder.depths.values()]
    assert not any(value.requires_grad for value in values)


def test_running_block_sums_are_consistent() -> None:
    """A layer's two outputs are what its prefix grew by; block 2 starts anew after four writes."""
    recorder = Recorder()
    MODEL(PACKED, trace=recorder)
    for i in range(6):
        grown = recorder.mixer_outs[i] + recorder.ffn_outs[i]
        before = torch.zeros_like(grown) if i % 2 == 0 else recorder.layer_outs[i - 1]
        torch.testing.assert_close(recorder.layer_outs[i], before + grown, atol=1e-12, rtol=0)


def test_costly_values_are_computed_only_if_wanted() -> None:
    """A trace that wants nothing special still hears of routing, and of nothing that costs extra."""
    heard: list[str] = []

    class Listener(Trace):
        def routing(self, *args: Any) -> None:
            heard.append("routing")

        def max_logit(self, *args: Any) -> None:
            heard.append("max_logit")

        def decay(self, *args: Any) -> None:
            heard.append("decay")

    MODEL(PACKED, trace=Listener())
    assert heard == ["routing"] * 5


def test_a_trace_changes_no_value() -> None:
    """The same logits, bit for bit, with gradients enabled."""
    assert torch.equal(MODEL(PACKED), MODEL(PACKED, trace=Recorder()))
    assert torch.equal(MODEL(PACKED), MODEL(PACKED, trace=NO_TRACE))


def test_recorder_overrides_every_hook() -> None:
    """A hook added to Trace must be recorded."""
    hooks = {name for name, _ in inspect.getmembers(Trace, inspect.isfunction)}
    assert hooks - {"__init__"} <= set(vars(Recorder))
