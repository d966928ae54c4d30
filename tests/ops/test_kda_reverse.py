"""The reverse scan of KDA by kernels, in Triton's interpreter, against its formulas in float64."""

from __future__ import annotations

import pytest
import torch
from kda_checks import kda_inputs
from kda_tile_formulas import Cut, Workspace, prepare, reverse_scan, tile_rows
from torch import Tensor

from openk3.ops.kda import prepare_kernel, reverse_kernel
from openk3.ops.kda.tiles import tile_table

LENGTHS = [33, 0, 7, 70, 0]


def bounds_of(lengths: list[int]) -> tuple[int, ...]:
    """Of packed sequences."""
    return tuple(torch.tensor([0, *lengths]).cumsum(0).tolist())


def narrowed(space: Workspace, dtype: torch.dtype) -> prepare_kernel.Workspace:
    """A workspace as the kernels have it."""
    named = {name: getattr(space, name).to(dtype).contiguous() for name in ("nkd", "qd", "kr", "inv", "mqk")}
    vectors = {name: getattr(space, name).float().contiguous() for name in ("decay", "beta")}
    return prepare_kernel.Workspace(**named, **vectors)


def scanned(
    space: Workspace, d_o: Tensor, d_final: Tensor, lengths: list[int], dtype: torch.dtype, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """dv, transposed gradients of the states and those of the first states, by the kernel, in poisoned memory."""
    span = tile_table(bounds_of(lengths), torch.device("cpu"), chunk=chunk).sequences()
    (T, H, V), K = d_o.shape, space.nkd.shape[3]
    d_v = torch.full((T, H, V), torch.nan, dtype=dtype)
    d_states = torch.full((span.num_tiles, H, V, K), torch.nan, dtype=dtype)
    d_state = d_final.float().clone()
    outputs = reverse_kernel.ReverseOutputs(d_v=d_v, d_states=d_states, d_entering=d_state)
    reverse_kernel.reverse_scan(narrowed(space, dtype), d_o.to(dtype), span, d_state, outputs)
    return d_v, d_states, d_state


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
    want = reverse_scan(space, d_o, d_final, cut)
    for got, expected in zip(scanned(space, d_o, d_final, LENGTHS, dtype, chunk), want, strict=True):
        assert (got - expected).norm() < tolerance * expected.norm()
    assert torch.equal(scanned(space, d_o, d_final, LENGTHS, dtype, chunk)[2][1], d_final[1].float())


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
        part = prepare_kernel.Workspace(**{name: x[rows] for name, x in vars(narrow).items()})
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
