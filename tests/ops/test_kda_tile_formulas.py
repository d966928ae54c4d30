"""The formulas the kernels are checked against are those of the recurrence, gradients included."""

from __future__ import annotations

import pytest
import torch
from kda_checks import assert_same, kda_inputs, run_with_gradients
from kda_tile_formulas import Cut, Scanned, forward_scan, prepare, reverse_scan, tile_gradients, tile_rows

from openk3.ops import recurrent_kda


@pytest.mark.parametrize("C", [16, 32])
@pytest.mark.parametrize("lengths", [[1], [40], [0, 33, 0, 7, 64, 0]])
def test_formulas_equal_autograd(lengths: list[int], C: int) -> None:
    """Values, states and all gradients in float64, through tiles that are full, ragged or absent."""
    inputs = kda_inputs(lengths, K=16, V=12)
    want = run_with_gradients(recurrent_kda, inputs, lengths)
    cut = Cut.of(lengths, C)
    space = prepare(tile_rows(inputs, cut))
    o, writes, states, final = forward_scan(space, inputs["v"], inputs["state"], cut)
    generator = torch.Generator().manual_seed(99)
    d_o, d_final = (torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in (o, final))
    d_v, d_states, d_state = reverse_scan(space, d_o, d_final, cut)
    got = tile_gradients(inputs, Scanned(states, d_states, writes, d_v, d_o), cut)
    d_logit = got["d_decay_logit"]
    got["d_dt_bias"] = d_logit.sum(0)
    got["d_A_log"] = (d_logit * (inputs["decay_logit"] + inputs["dt_bias"])).sum((0, 2))
    assert_same({"o": o, "final": final, "d_v": d_v, "d_state": d_state} | got, want, atol=1e-9)
