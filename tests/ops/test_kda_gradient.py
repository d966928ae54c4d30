"""Gradients inside tiles by kernels, in Triton's interpreter, against their formulas in float64."""

from __future__ import annotations

import pytest
import torch
from kda_checks import kda_inputs
from kda_tile_formulas import Cut, Scanned, forward_scan, prepare, reverse_scan, tile_gradients, tile_rows
from torch import Tensor

from openk3.ops import KdaGate
from openk3.ops.kda import gradient_kernel
from openk3.ops.kda.tiles import tile_table

TOKENS = ("q", "k", "v", "decay_logit", "beta_logit")


def both(
    inputs: dict[str, Tensor],
    lengths: list[int],
    dtype: torch.dtype,
    chunk: int = 32,
    *,
    size: float = 1.0,
    parts: int = 2,
    fine: bool = False,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients by the kernel, in poisoned memory, and by the formulas; those of outputs are random of this size.

    What scans leave is in float32, or in so many parts.
    """
    cut = Cut.of(lengths, chunk)
    space = prepare(tile_rows(inputs, cut))
    o, writes, states, final = forward_scan(space, inputs["v"], inputs["state"], cut)
    generator = torch.Generator().manual_seed(1)
    d_o, d_final = (torch.randn(x.shape, generator=generator, dtype=torch.float64) * size for x in (o, final))
    d_o = d_o.to(dtype).double()
    d_v, d_states, _ = reverse_scan(space, d_o, d_final, cut)
    want = tile_gradients(inputs, Scanned(states, d_states, writes, d_v, d_o), cut)
    bounds = tuple(torch.tensor([0, *lengths]).cumsum(0).tolist())
    span = tile_table(bounds, torch.device("cpu"), chunk=chunk).sequences()
    narrow = [x.to(dtype).contiguous() for x in (writes, states, d_states, d_o, d_v)]
    along = cut.spread(d_v * inputs["v"]).unflatten(3, (-1, 16)).sum(4).mT
    rest = [None if dtype == torch.float32 else (x - x.to(dtype)).to(dtype).contiguous() for x in (writes, d_states)]
    if parts == 1:
        rest = [None if x is None else torch.zeros_like(x) for x in rest]
    if fine and dtype != torch.float32:
        rest.append((states - states.to(dtype)).to(dtype).contiguous())
    scanned = gradient_kernel.Scanned(*narrow, along.float().contiguous(), *rest)
    tokens = tuple(inputs[name].to(dtype) for name in TOKENS)
    out = gradient_kernel.TokenGradients(*(torch.full_like(x, torch.nan) for x in tokens))
    gate = KdaGate(inputs["A_log"].float(), inputs["dt_bias"].float())
    d_A_log, d_dt_bias = gradient_kernel.tile_gradients(tokens, gate, scanned, out, span=span).sum(0).unbind(1)
    named = {"d_q": out.d_q, "d_k": out.d_k, "d_decay_logit": out.d_logit, "d_beta_logit": out.d_beta}
    want["d_dt_bias"] = want["d_decay_logit"].sum(0)
    want["d_A_log"] = (want["d_decay_logit"] * (inputs["decay_logit"] + inputs["dt_bias"])).sum(0)  # of each channel
    return named | {"d_A_log": d_A_log, "d_dt_bias": d_dt_bias}, want


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("chunk", [16, 32])
@pytest.mark.parametrize("fine", [False, True])
def test_equals_formulas(fine: bool, chunk: int, dtype: torch.dtype, tolerance: float) -> None:
    """Tiles full, ragged and absent; K != V."""
    lengths = [33, 0, 7, 40]
    got, want = both(kda_inputs(lengths, H=2, K=16, V=32), lengths, dtype, chunk, fine=fine)
    for name, expected in want.items():
        assert (got[name] - expected).norm() < tolerance * expected.norm(), name


def test_gate_gradients_from_two_parts() -> None:
    """Gradients of the gate's parameters, in which much cancels, are nearer for writes and state gradients in parts."""
    inputs = kda_inputs([96], H=2, K=32, V=64)
    inputs = {name: x.bfloat16().double() if name in TOKENS else x for name, x in inputs.items()}
    errors = []
    for parts in (1, 2):
        got, want = both(inputs, [96], torch.bfloat16, parts=parts)
        errors.append([float((got[n] - want[n]).norm() / want[n].norm()) for n in ("d_A_log", "d_dt_bias")])
    assert all(two < min(0.5 * one, 1.2e-3) for one, two in zip(*errors))


def test_gate_gradients_from_everything_in_two_parts() -> None:
    """They are nearer yet if the states that are summed and all rows inside tiles are, too."""
    inputs = kda_inputs([96], H=2, K=32, V=64)
    inputs = {name: x.bfloat16().double() if name in TOKENS else x for name, x in inputs.items()}
    errors = []
    for fine in (False, True):
        got, want = both(inputs, [96], torch.bfloat16, fine=fine)
        errors.append([float((got[n] - want[n]).norm() / want[n].norm()) for n in ("d_A_log", "d_dt_bias")])
    assert all(two < 0.5 * one for one, two in zip(*errors)), errors


def test_rows_that_are_nearly_zero() -> None:
    """Rows of q and k of norm 1e-3 weigh as much as what is added inside the root."""
    inputs = kda_inputs([40], H=2, K=16, V=16)
    for name in ("q", "k"):
        inputs[name] = inputs[name] / inputs[name].norm(dim=2, keepdim=True) * 1e-3
    got, want = both(inputs, [40], torch.float32)
    for name, expected in want.items():
        assert (got[name] - expected).norm() < 5e-6 * expected.norm(), name


@pytest.mark.parametrize("size", [1e-25, 1e-8, 1e8])
@pytest.mark.parametrize("logit", [-1e4, 7.0])
def test_gradients_of_any_size(logit: float, size: float) -> None:
    """With no decay at all or 2^-231 in a tile, no product of tiny or huge gradients leaves float32."""
    inputs = kda_inputs([32, 20], H=1, K=16, V=16)
    inputs["decay_logit"] = torch.full_like(inputs["decay_logit"], logit)
    got, want = both(inputs, [32, 20], torch.float32, size=size)
    for name, expected in want.items():
        tolerance = 3e-4 if name in ("d_A_log", "d_dt_bias") else 1e-4  # sums over tokens, in which some cancels
        assert (got[name] - expected).norm() <= tolerance * expected.norm(), name


@pytest.mark.parametrize("written", [True, False])
@pytest.mark.parametrize("size", [1.0, 1e4])
def test_tokens_alone_with_large_states(size: float, written: bool) -> None:
    """Where no token reads another one, or nothing is written, gradients by way of the states set no scale."""
    lengths = [1, 1, 2, 0, 1]
    inputs = kda_inputs(lengths, H=1, K=16, V=16)
    inputs["state"] = inputs["state"] * size
    if not written:
        inputs["beta_logit"] = torch.full_like(inputs["beta_logit"], -200.0)
    got, want = both(inputs, lengths, torch.float32, size=size)
    for name, expected in want.items():
        assert (got[name] - expected).norm() <= 1e-5 * expected.norm() + 1e-30, name


def test_steep_gates() -> None:
    """A gate whose slope no float32 holds is at a bound everywhere, and gets no gradient there."""
    inputs = kda_inputs([40], H=2, K=16, V=16)
    got, want = both(inputs | {"A_log": torch.tensor([89.0, 700.0], dtype=torch.float64)}, [40], torch.float32)
    for name, expected in want.items():
        assert (got[name] - expected).norm() <= 1e-5 * expected.norm(), name
    assert not got["d_decay_logit"].any()


def test_logits_out_of_range() -> None:
    """Logits whose products with the slope no float32 holds give A_log no gradient either, and not NaN."""
    inputs = kda_inputs([40], H=2, K=16, V=16)
    inputs["A_log"] = torch.tensor([0.5, 2.0], dtype=torch.float64)
    inputs["decay_logit"][::3], inputs["decay_logit"][1::3] = 3e38, -3e38
    got, want = both(inputs, [40], torch.float32)
    assert want["d_A_log"].isfinite().all()
    for name, expected in want.items():
        assert (got[name] - expected).norm() <= 1e-5 * expected.norm(), name
