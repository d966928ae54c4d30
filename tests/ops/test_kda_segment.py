"""Segments of KDA as affine maps: they reproduce the recurrence, compose, and scan."""

from __future__ import annotations

import pytest
import torch
from kda_checks import assert_same, cu_seqlens, kda_inputs, run, run_with_gradients
from torch import Tensor

from openk3.ops import KdaGate, chunk_kda, recurrent_kda
from openk3.ops.kda.segment import Segment, compose, entering_states, segment_kda

LENGTHS = [40, 1, 0, 33, 64, 17, 5]


def segments(inputs: dict[str, Tensor], bound: float | None = -5.0) -> Segment:
    """The maps of LENGTHS."""
    gate = KdaGate(inputs["A_log"], inputs["dt_bias"], bound)
    rest = (inputs[name] for name in ("k", "v", "decay_logit", "beta_logit"))
    return segment_kda(*rest, gate, cu_seqlens=cu_seqlens(LENGTHS))


@pytest.mark.parametrize("bound", [-5.0, None])
def test_a_segment_is_what_the_recurrence_does(bound: float | None) -> None:
    """Applied to any entering state, each map gives the recurrence's leaving state; an empty one changes nothing."""
    inputs = kda_inputs(LENGTHS)
    maps = segments(inputs, bound)
    _, want = run(recurrent_kda, inputs, LENGTHS, bound)
    torch.testing.assert_close(maps.apply(inputs["state"]), want, rtol=0, atol=1e-12)
    assert torch.equal(maps.transition_NHKK[2], torch.eye(8).double().expand(2, 8, 8))
    assert not maps.written_NHKV[2].any()


def test_composition_is_associative() -> None:
    """(c b) a = c (b a) = the three segments as one sequence."""
    inputs = kda_inputs(LENGTHS)
    maps = segments(inputs)
    a, b, c = (Segment(maps.transition_NHKK[i : i + 1], maps.written_NHKV[i : i + 1]) for i in (0, 3, 4))
    left, right = compose(compose(a, b), c), compose(a, compose(b, c))
    state = inputs["state"][:1]
    torch.testing.assert_close(left.transition_NHKK, right.transition_NHKK, rtol=0, atol=1e-12)
    torch.testing.assert_close(left.apply(state), c.apply(b.apply(a.apply(state))), rtol=0, atol=1e-12)
    torch.testing.assert_close(right.apply(state), left.apply(state), rtol=0, atol=1e-12)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 7])
def test_prefix_scan(count: int) -> None:
    """States entering the first `count` of the segments, as a walk over them one by one finds them."""
    inputs = kda_inputs(LENGTHS)
    maps = segments(inputs)
    maps = Segment(maps.transition_NHKK[:count], maps.written_NHKV[:count])
    state, want = inputs["state"][0], []
    for i in range(count):
        want.append(state)
        state = maps.transition_NHKK[i] @ state + maps.written_NHKV[i]
    got = entering_states(maps, inputs["state"][0])
    torch.testing.assert_close(got, torch.stack(want) if want else got[:0], rtol=0, atol=1e-12)
    assert len(got) == count


def test_one_sequence_in_segments_computed_at_once() -> None:
    """Maps, scan, then all segments side by side from their entering states: outputs, final state and every gradient
    of the whole sequence."""
    inputs = kda_inputs([sum(LENGTHS)])

    def at_once(*rows: Tensor, state_NHKV: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v, z, beta, gate = rows
        bounds = torch.tensor([0, *LENGTHS]).cumsum(0)
        maps = segment_kda(k, v, z, beta, gate, cu_seqlens=bounds)
        o, states = chunk_kda(
            q, k, v, z, beta, gate, state_NHKV=entering_states(maps, state_NHKV[0]), cu_seqlens=bounds
        )
        return o, states[-1:]

    assert_same(run_with_gradients(at_once, inputs), run_with_gradients(recurrent_kda, inputs))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"v": torch.zeros(5, 2)}, "v_THV"),
        ({"k": torch.zeros(5, 2)}, "expected .tokens, heads, key channels."),
        ({"v": torch.zeros(4, 2, 16)}, "v_THV"),
        ({"cu_seqlens": torch.tensor(5)}, "cu_seqlens"),
        ({"cu_seqlens": torch.tensor([], dtype=torch.int32)}, "cu_seqlens"),
        ({"cu_seqlens": [0, 5]}, "cu_seqlens"),
    ],
)
def test_what_is_no_segment_is_refused(change: dict[str, object], words: str) -> None:
    """Shapes and bounds that do not fit: one clear line."""
    inputs = kda_inputs([5], K=16, V=16, dtype=torch.float32) | {"cu_seqlens": None} | change
    gate = KdaGate(inputs["A_log"], inputs["dt_bias"])
    tokens = (inputs[name] for name in ("k", "v", "decay_logit", "beta_logit"))
    with pytest.raises(ValueError, match=words):
        segment_kda(*tokens, gate, cu_seqlens=inputs["cu_seqlens"])
