"""The reverse scan of KDA by kernels, in Triton's interpreter, against its formulas in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kda_checks import kda_inputs
from kda_tile_formulas import Cut, Workspace, prepare, reverse_scan, tile_rows
from torch import Tensor
from torch.nn.functional import pad

from openk3.ops.kda import prepare_kernel, reverse_kernel
from openk3.ops.kda.tiles import tile_table
from openk3.ops.kda.workspace import kept

LENGTHS = [33, 0, 7, 70, 0]


def bounds_of(lengths: list[int]) -> tuple[int, ...]:
    """Of packed sequences."""
    return tuple(torch.tensor([0, *lengths]).cumsum(0).tolist())


def narrowed(space: Workspace, dtype: torch.dtype, rests: tuple[str, ...] = ("kr_rest",)) -> prepare_kernel.Workspace:
    """A workspace as the kernels have it."""
    named = {name: getattr(space, name).to(dtype).contiguous() for name in ("nkd", "qd", "kr", "inv", "mqk")}
    vectors = {name: getattr(space, name).float().contiguous() for name in ("decay", "beta")}
    lost = {f"{name}_rest": (getattr(space, name) - x.double()).to(dtype).contiguous() for name, x in named.items()}
    return prepare_kernel.Workspace(
        **named, **vectors, **({x: lost[x] for x in rests} if dtype != torch.float32 else {})
    )


def scanned(
    space: prepare_kernel.Workspace, v: Tensor, d_o: Tensor, d_final: Tensor, lengths: list[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dv, transposed gradients of the states, those of the first states and sums of dv v, in poisoned memory."""
    dtype, chunk = space.nkd.dtype, space.nkd.shape[2]
    span = tile_table(bounds_of(lengths), torch.device("cpu"), chunk=chunk).sequences()
    (T, H, V), K = d_o.shape, space.nkd.shape[3]
    d_v = torch.full((T, H, V), torch.nan, dtype=dtype)
    d_states, rest = (torch.full((span.num_tiles, H, V, K), torch.nan, dtype=dtype) for _ in range(2))
    d_state = d_final.float().clone()
    along = torch.full((span.num_tiles, H, V // 16, chunk), torch.nan)
    outputs = reverse_kernel.ReverseOutputs(d_v=d_v, d_states=d_states, d_entering=d_state, along=along)
    if dtype != torch.float32:
        outputs = replace(outputs, d_states_rest=rest)
    reverse_kernel.reverse_scan(space, d_o.to(dtype), span, d_state, outputs, v_THV=v.to(dtype))
    if dtype != torch.float32:
        d_states = d_states.double() + rest.double()
    return d_v, d_states, d_state, along


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("chunk", [16, 32])
def test_equals_formulas(chunk: int, dtype: torch.dtype, tolerance: float) -> None:
    """Tiles full, ragged and absent; K != V; the gradient of the last state is given and passes through empty ones."""
    inputs = kda_inputs(LENGTHS, H=2, K=16, V=32)
    cut = Cut.of(LENGTHS, chunk)
    space = prepare(tile_rows(inputs, cut))
    generator = torch.Generator().manual_seed(1)
    d_o, d_final = (
        torch.randn(inputs[name].shape, generator=generator, dtype=torch.float64) for name in ("v", "state")
    )
    d_v, d_states, d_state = reverse_scan(space, d_o, d_final, cut)
    along = cut.spread(d_v * inputs["v"]).unflatten(3, (-1, 16)).sum(4).mT
    found = scanned(narrowed(space, dtype), inputs["v"], d_o, d_final, LENGTHS)
    for got, expected in zip(found, (d_v, d_states, d_state, along), strict=True):
        assert (got - expected).norm() < tolerance * expected.norm()
    assert torch.equal(found[2][1], d_final[1].float())


@pytest.mark.parametrize("heads", [1, 96])
def test_gradients_of_states_add_up_in_two_parts(heads: int) -> None:
    """What is left of rounding lies beside them; and what they gather on the way is the values' gradients unrounded.
    With few heads, keys, queries and the inverse count unrounded, too."""
    inputs = kda_inputs([160], H=2, K=16, V=32)
    inputs["decay_logit"] = inputs["decay_logit"] - 14
    space = prepare(tile_rows(inputs, Cut.of([160], 32)))
    whole = {"decay", "beta", *(name[:-5] for name in kept(heads))}
    space = Workspace(*(x if n in whole else x.bfloat16().double() for n, x in vars(space).items()))
    generator = torch.Generator().manual_seed(1)
    d_o = torch.randn(inputs["v"].shape, generator=generator).bfloat16().double()
    d_final = torch.randn(inputs["state"].shape, generator=generator, dtype=torch.float64)
    _, d_states, d_state = reverse_scan(space, d_o, d_final, Cut.of([160], 32))
    found = scanned(narrowed(space, torch.bfloat16, kept(heads)), inputs["v"], d_o, d_final, [160])
    assert (found[1] - d_states).norm() < 2e-5 * d_states.norm()
    assert (found[2] - d_state).norm() < 2e-5 * d_state.norm()


def test_small_differences_of_large_gradients() -> None:
    """Keys that are nearly one: gradients of values are what is left of what the states' gradients send to each."""
    inputs = kda_inputs([32], H=2, K=16, V=32)
    inputs["k"] = inputs["k"][:1] + 0.01 * inputs["k"]
    inputs["beta_logit"], inputs["decay_logit"] = inputs["beta_logit"] + 6, inputs["decay_logit"] - 14
    cut = Cut.of([32], 32)
    space = prepare(tile_rows(inputs, cut))
    generator = torch.Generator().manual_seed(1)
    d_final = torch.randn(inputs["state"].shape, generator=generator, dtype=torch.float64)
    want = reverse_scan(space, torch.zeros_like(inputs["v"]), d_final, cut)[0]
    left = space.inv - space.inv.bfloat16()  # rounded as `prepare` does
    narrow = narrowed(replace(space, inv=space.inv + pad(left[:, :, :-1], (0, 0, 1, 0))), torch.bfloat16)
    errors = []
    for given in (replace(narrow, kr_rest=torch.zeros_like(narrow.kr)), narrow):
        got = scanned(given, inputs["v"], torch.zeros_like(inputs["v"]), d_final, [32])[0]
        errors.append(float((got - want).norm() / want.norm()))
    assert errors[1] < 0.3 * errors[0]


def test_parts_folded_by_maps() -> None:
    """Parts scanned from nothing, joined by their maps and scanned again: the gradients of the whole sequences."""
    lengths, chunk = [0, 75, 40, 100, 0], 16
    inputs = kda_inputs(lengths, H=2, K=16, V=32)
    cut = Cut.of(lengths, chunk)
    space = prepare(tile_rows(inputs, cut))
    generator = torch.Generator().manual_seed(1)
    d_o, d_final = (
        torch.randn(inputs[name].shape, generator=generator, dtype=torch.float64) for name in ("v", "state")
    )
    want = reverse_scan(space, d_o, d_final, cut)[2]
    tiles = tile_table(bounds_of(lengths), torch.device("cpu"), chunk=chunk, part_tiles=2)
    P, (_, H, K, V) = tiles.num_parts, d_final.shape
    maps = torch.full((P, H, V + K, K), torch.nan)
    first = tiles.part_first
    for part in range(P):
        transition = torch.eye(K, dtype=torch.float64).expand(H, K, K)  # transposed
        for x in range(first[part], first[part + 1]):
            error = transition @ space.nkd[x].mT
            written = (error * space.beta[x][:, None]) @ space.inv[x].mT
            transition = transition * space.decay[x][:, None] + written @ space.kr[x]
        maps[part, :, V:] = transition
    d_state, narrow = d_final.float(), narrowed(space, torch.float32)
    for low, high in ((4, P), (2, 4), (0, 2)):  # as slabs: sequences 2..4, then part of sequence 1, then the rest
        span = tiles.slab(low, high)
        rows = slice(span.tile_low, span.tile_low + span.num_tiles)
        part = prepare_kernel.Workspace(**{name: x[rows] for name, x in vars(narrow).items() if x is not None})
        written = torch.full((high - low, H, K, V), torch.nan)
        reverse_kernel.reverse_scan(part, d_o.float(), span, None, reverse_kernel.ReverseOutputs(d_entering=written))
        inside = [n for n in range(5) if tiles.sequence_parts[n] < high and tiles.sequence_parts[n + 1] > low]
        states, parts = d_state[inside[0] : inside[-1] + 1], tiles.parts_N[inside[0] : inside[-1] + 2]
        reverse_kernel.reverse_fold(maps, states, written, parts, low)
        entering = torch.full_like(written, torch.nan)
        d_entering = reverse_kernel.ReverseOutputs(d_entering=entering)
        reverse_kernel.reverse_scan(part, d_o.float(), span, written, d_entering)
        assert torch.allclose(entering[0], d_state[inside[0]], rtol=1e-4, atol=1e-5)
    assert (d_state - want).norm() < 1e-6 * want.norm()
