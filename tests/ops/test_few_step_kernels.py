"""Kernels of a step of one token or two, which read depth themselves, in Triton's interpreter against float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from op_checks import random
from test_few_tokens import TOLERANCE, defined, definition, layer_of, off
from torch import Tensor

from openk3.ops import attn_res
from openk3.ops.few import mixture
from openk3.ops.few.latent import attend_alone, attends_alone
from openk3.ops.few.mixture import Reading, read_dense, read_linear, read_mixture, reads_itself
from openk3.ops.few.states import StatePlaces, StateWeights, step_states, steps_states
from openk3.ops.kda.decode import DecodePool, DecodeWeights, Projected, decode_kda
from openk3.ops.kda.reference import KdaGate
from openk3.ops.latent_moe.layer import RoutedForm
from openk3.ops.mla.reference import absorbed_attention
from openk3.ops.norm import rms_norm
from openk3.ops.situ import situ_glu


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter runs kernels, for two tokens, too; nothing is recorded."""
    monkeypatch.setenv("OPENK3_BACKEND", "triton")
    monkeypatch.setattr(mixture, "MOST_READERS", 2)
    with torch.no_grad():
        yield


def reading_of(T: int, D: int, L: int, sources: int, dtype: torch.dtype) -> Reading:
    """Random depth; rows that do not count hold no numbers."""
    stream = random(L, T, D).to(dtype)
    stream[sources:] = float("nan")
    query, norm, out = ((random(D, seed=40 + i).abs() + 0.2).to(dtype) for i in range(3))
    return Reading(stream, sources, (query / D**0.5, norm, out), 1e-5)


@defined()
def read_wide(reading: Reading) -> Tensor:
    """What is read, in float64."""
    query, norm, out = (each.double() for each in reading.weights)
    rows = list(reading.stream_LTD[: reading.sources].double())
    return rms_norm(attn_res.mix_depth(rows, query, norm, reading.eps)[0], out, reading.eps)


READS = [(1, 40, 3, 3, torch.bfloat16), (2, 300, 8, 5, torch.float32), (2, 24, 2, 1, torch.bfloat16)]


@pytest.mark.parametrize(("T", "D", "L", "sources", "dtype"), READS)
def test_read_and_product(T: int, D: int, L: int, sources: int, dtype: torch.dtype) -> None:
    """Any number of sources up to what there is room for; the same bits again."""
    reading, weight = reading_of(T, D, L, sources, dtype), (random(77, D, seed=1) / D**0.5).to(dtype)
    assert reads_itself(reading.stream_LTD[0], L)
    got = read_linear(reading, weight)
    assert off(got, read_wide(reading) @ weight.double().T) < 2 * TOLERANCE[dtype]
    assert torch.equal(got, read_linear(reading, weight))


@pytest.mark.parametrize(("S", "k", "dtype", "add"), [(36, 2, torch.bfloat16, True), (0, 3, torch.float32, False)])
def test_read_and_mixture(S: int, k: int, dtype: torch.dtype, add: bool) -> None:
    """Experts behind a read of depth, added to what was there or in its place, where nothing may be."""
    T, D = 2, 40
    reading = reading_of(T, D, 4, 3, dtype)
    weights, rest = layer_of(D, 24, 20, S, 5, dtype)
    form = RoutedForm(k, True, 1.5, 4.0, 25.0 if k == 2 else None, 1e-5)
    before = random(T, D, seed=8).to(dtype) if add else torch.full((T, D), float("nan"), dtype=dtype)
    got = before.clone()
    read_mixture(reading, weights, form, rest, got, add=add)
    want = definition(read_wide(reading).to(dtype), weights, form, rest) + (before.double() if add else 0)
    assert off(got, want) < 3 * TOLERANCE[dtype]


@pytest.mark.parametrize(("most", "add"), [(48, False), (48, True), (60, True)])
def test_read_and_dense(most: int, add: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dense part, by kernels and with a second map that is the library's, where it is deep."""
    monkeypatch.setattr(mixture, "MOST_DEPTH", most)
    inner = 50
    reading = reading_of(1, 16, 2, 2, torch.float32)
    gate, up, down = (random(*s, seed=i) / 4 for i, s in enumerate(((inner, 16), (inner, 16), (16, inner))))
    gate, up, down = gate.float(), up.float(), down.float()
    before = random(1, 16, seed=8).float() if add else torch.full((1, 16), float("nan"))
    got, x = before.clone(), read_wide(reading)
    read_dense(reading, (gate, up, down), (4.0, None), got, add=add)
    with defined():
        want = situ_glu(x @ gate.double().T, x @ up.double().T, 4.0, None) @ down.double().T
    assert off(got, want + (before.double() if add else 0)) < 5e-6


def states_of(S: int, H: int, K: int, V: int, taps: int, dtype: torch.dtype) -> tuple[StatePlaces, StateWeights, int]:
    """Places with room between slots, and weights of a layer of width 24."""
    D, W = 24, 4
    states = random(S, H * K * V + 16, seed=1).float()[:, : H * K * V].unflatten(1, (H, K, V))
    inputs = random(S, H * (2 * K + V), taps, seed=2).to(dtype)
    q, k, v = inputs.split([H * K, H * K, H * V], 1)
    places = StatePlaces(states, (q, k, v), torch.arange(0))
    filters = tuple(random(H * c, W, seed=3 + i).float() for i, c in enumerate((K, K, V)))
    gate = KdaGate(random(H, seed=7).float(), random(H, K, seed=8).float(), -5.0)
    wide = (random(H * K, 12, seed=9) / 4).to(dtype), (random(D, H * V, seed=10) / 8).to(dtype)
    norm = (random(V, seed=11).abs() + 0.5).float(), 1e-5
    q, k, v = filters
    return places, StateWeights(wide[0], (q, k, v), gate, norm, wide[1]), D


@pytest.mark.parametrize(("taps", "dtype"), [(4, torch.bfloat16), (3, torch.float32)])
@pytest.mark.parametrize("add", [False, True])
def test_states(taps: int, dtype: torch.dtype, add: bool) -> None:
    """A KDA layer's step against its definition; a place stands empty, and no other slot's memory changes."""
    S, H, K, V = 3, 3, 16, 64
    places, weights, D = states_of(S, H, K, V, taps, dtype)
    places = replace(places, slot_N=torch.tensor([2, -1], dtype=torch.int32))
    sizes = [H * K, H * K, H * V, H * V, 12, H]
    parts = random(2, sum(sizes), seed=20).to(dtype).split(sizes, 1)
    assert steps_states(random(2, D).to(dtype), weights, places)
    pool = DecodePool(
        places.state_SHKV.double().contiguous(),
        *(torch.nn.functional.pad(x.double(), (4 - taps, 0)) for x in places.windows),
    )
    q, k, v, z, narrow, beta = (x.double() for x in parts)
    logit = (narrow @ weights.widen_CN.double().T).to(dtype).double()
    filters = (x.double() for x in weights.filters)
    gate = KdaGate(weights.gate.A_log_H.double(), weights.gate.dt_bias_HK.double(), -5.0)
    wide = DecodeWeights(*filters, gate, weights.norm[0].double(), weights.norm[1])
    before = random(2, D, seed=8).to(dtype) if add else torch.full((2, D), float("nan"), dtype=dtype)
    got = before.clone()
    around = [x.clone() for x in (places.state_SHKV, *places.windows)]
    step_states(parts, weights, places, got, add=add)
    with defined():
        y = decode_kda(Projected(q, k, v, logit, beta), z, wide, pool, places.slot_N)
    want = y @ weights.out_DC.double().T + (before.double() if add else 0)
    assert off(got, want) < 2 * TOLERANCE[dtype]
    for x, old in zip((places.state_SHKV, *places.windows), around):
        assert torch.equal(x[:2], old[:2])
    assert off(places.state_SHKV, pool.state_SHKV) < 1e-5
    for ours, theirs in zip(places.windows, pool.tensors()[1:]):
        assert torch.equal(ours.double(), theirs[..., 4 - taps :])


@pytest.mark.parametrize(
    ("H", "C", "R", "length", "pages", "dtype"),
    [(3, 24, 8, 37, 1, torch.float32), (6, 16, 16, 1, 1, torch.bfloat16), (2, 40, 8, 150, 5, torch.bfloat16)],
)
def test_attention_of_one(H: int, C: int, R: int, length: int, pages: int, dtype: torch.dtype) -> None:
    """Few keys and many, in one piece and in pages; what lies behind the last latent does not matter."""
    memory = random(pages + 2, 32 if pages > 1 else 64, C + R, seed=1).to(dtype)
    table = torch.tensor([[3, 0, 6, 1, 4][:pages] if pages > 1 else [1]], dtype=torch.int32)
    rows = memory[table[0].long()].flatten(0, 1)
    for i in range(length, len(rows)):
        memory[table[0, i // memory.shape[1]], i % memory.shape[1]] = float("nan")
    latents = memory, table, torch.tensor([length], dtype=torch.int32)
    q_latent, q = random(1, H, C, seed=2).to(dtype), random(1, H, 5 + R, seed=3).to(dtype)
    assert attends_alone(q_latent, latents) and not attends_alone(q_latent.expand(2, -1, -1), latents)
    got = attend_alone(q_latent, q[..., 5:], latents, 0.3)
    with defined():
        bounds = torch.tensor([0, 1], dtype=torch.int32)
        want = absorbed_attention(q_latent.double(), q[..., 5:].double(), [rows[:length].double()], bounds, scale=0.3)
    assert off(got, want) < 2 * TOLERANCE[dtype]
