"""The grouped product against one product per expert, with idle experts and dirty memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import Watch, random
from torch import Tensor

from openk3.ops.grouped_linear import grouped_linear
from openk3.ops.routing import combine_rows, gather_rows, route, sort_by_expert
from openk3.ops.situ import situ_glu

PRECISION = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-7}


def dense_loop(x_MC: Tensor, weight_EOC: Tensor, counts: list[int]) -> Tensor:
    """Every expert's rows times its weight, one after the other."""
    parts = [rows @ weight.T for rows, weight in zip(x_MC.split(counts), weight_EOC)]
    return torch.cat(parts)


def dirty_memory() -> None:
    """Fill and free blocks of many sizes, so that an uninitialised result shows."""
    blocks = [torch.full((size,), float("nan")) for size in (64, 512, 4096, 32768) for _ in range(20)]
    del blocks


@settings(max_examples=60)
@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=7) | st.integers(0, 9).map(lambda rows: [rows] * 4),
    widths=st.tuples(st.integers(1, 17), st.integers(1, 17)),
    aligned=st.booleans(),
    dtype=st.sampled_from(list(PRECISION)),
)
def test_equals_dense_loop(counts: list[int], widths: tuple[int, int], aligned: bool, dtype: torch.dtype) -> None:
    """Values and both gradients, for any rows per expert and any widths (aligned or not to 16 bytes)."""
    out_dim, in_dim = (width * 8 if aligned else width for width in widths)
    x_MC = random(sum(counts), in_dim, seed=1, dtype=dtype, grad=True)
    weight_EOC = random(len(counts), out_dim, in_dim, seed=2, dtype=dtype, grad=True)
    upstream_MO = random(sum(counts), out_dim, seed=3, dtype=dtype)
    dirty_memory()
    y_MO = grouped_linear(x_MC, weight_EOC, torch.tensor(counts))
    ours = (y_MO, *torch.autograd.grad(y_MO, (x_MC, weight_EOC), upstream_MO))
    x_wide, weight_wide = (x.detach().double().requires_grad_() for x in (x_MC, weight_EOC))
    want_MO = dense_loop(x_wide, weight_wide, counts)
    theirs = (want_MO, *torch.autograd.grad(want_MO, (x_wide, weight_wide), upstream_MO.double()))
    for got, want in zip(ours, theirs):
        assert got.dtype == dtype and got.shape == want.shape
        scale = want.abs().max().item() if want.numel() else 1
        torch.testing.assert_close(got.double(), want, rtol=0, atol=PRECISION[dtype] * max(scale, 1))
    assert (ours[2][torch.tensor(counts) == 0] == 0).all()


@pytest.mark.parametrize("counts", [[2, 0, 3], [2, 2, 2]], ids=str)
@pytest.mark.parametrize("width", [8, 5])
def test_gradcheck(width: int, counts: list[int]) -> None:
    """The hand-written gradient is the derivative."""
    counts_E = torch.tensor(counts)
    inputs = (random(sum(counts), width, seed=1, grad=True), random(3, 4, width, seed=2, grad=True))
    assert torch.autograd.gradcheck(lambda x, w: grouped_linear(x, w, counts_E), inputs)


def test_only_experts_with_rows_are_computed() -> None:
    """One of 200 experts has rows: one product forward and two backward, whatever the number of experts."""
    counts_E = torch.zeros(200, dtype=torch.int64)
    counts_E[77] = 6
    x_MC, weight_EOC = random(6, 3, seed=1, grad=True), random(200, 5, 3, seed=2, grad=True)
    with Watch() as watch:
        grouped_linear(x_MC, weight_EOC, counts_E).sum().backward()
    assert watch.calls["mm"] == 3


def test_idle_experts_whatever_the_kernel_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """E01: a kernel that leaves garbage where an expert has no rows changes nothing."""
    kernel = torch.nn.functional.grouped_mm

    def careless(left: Tensor, right: Tensor, *, offs: Tensor) -> Tensor:
        out = kernel(left, right, offs=offs)
        if out.dim() == 3:
            out[offs.diff(prepend=offs.new_zeros(1)) == 0] = float("nan")
        return out

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", careless)
    x_MC, weight_EOC = random(5, 8, dtype=torch.float32), random(4, 4, 8, seed=1, dtype=torch.float32, grad=True)
    grouped_linear(x_MC, weight_EOC, torch.tensor([0, 2, 0, 3])).sum().backward()
    assert weight_EOC.grad is not None
    assert (weight_EOC.grad[[0, 2]] == 0).all() and (weight_EOC.grad[[1, 3]] != 0).all()


def test_even_counts_take_one_product() -> None:
    """50 experts with 4 rows each: one batched product forward and two backward."""
    x_MC, weight_EOC = random(200, 3, seed=1, grad=True), random(50, 5, 3, seed=2, grad=True)
    with Watch() as watch:
        grouped_linear(x_MC, weight_EOC, torch.full((50,), 4)).sum().backward()
    assert watch.calls["bmm"] == 3 and "mm" not in watch.calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_rows_at_all(dtype: torch.dtype) -> None:
    """M = 0 gives an empty result that can be differentiated."""
    x_MC, weight_EOC = torch.empty(0, 8, dtype=dtype, requires_grad=True), random(3, 4, 8, dtype=dtype, grad=True)
    y_MO = grouped_linear(x_MC, weight_EOC, torch.zeros(3, dtype=torch.int64))
    assert y_MO.shape == (0, 4)
    y_MO.sum().backward()
    assert weight_EOC.grad is not None and (weight_EOC.grad == 0).all()
    assert x_MC.grad is not None and x_MC.grad.shape == (0, 8)


def test_frozen_operands() -> None:
    """No gradient is computed for an operand that does not want one."""
    x_MC, weight_EOC, counts_E = random(4, 3, seed=1, grad=True), random(2, 5, 3, seed=2), torch.tensor([1, 3])
    with Watch() as watch:
        grouped_linear(x_MC, weight_EOC, counts_E).sum().backward()
    assert watch.calls["mm"] == 4 and weight_EOC.grad is None and x_MC.grad is not None


def test_refuses_operands_that_do_not_fit() -> None:
    """Counts that do not sum to the rows, other widths, other dtypes."""
    x_MC, weight_EOC = torch.ones(4, 8), torch.ones(2, 4, 8)
    for counts in ([1, 2], [1, 2, 1], [5, 0]):
        with pytest.raises(ValueError, match="do not fit"):
            grouped_linear(x_MC, weight_EOC, torch.tensor(counts))
    with pytest.raises(ValueError, match="do not fit"):
        grouped_linear(x_MC[:, :4], weight_EOC, torch.tensor([1, 3]))
    with pytest.raises(ValueError, match="one dtype"):
        grouped_linear(x_MC.double(), weight_EOC, torch.tensor([1, 3]))


NUM_EXPERTS, TOP_K, LATENT, HIDDEN = 8, 2, 16, 12


def expert_layer(scores_TE: Tensor, z_TC: Tensor, weights: list[Tensor]) -> Tensor:
    """The batched expert path: choose, group, three products, weighted sum."""
    routes = route(scores_TE, torch.zeros(NUM_EXPERTS, dtype=scores_TE.dtype), TOP_K)
    order_M, counts_E = sort_by_expert(routes.expert_ids_Tk, NUM_EXPERTS, max_padding=2.0)
    x_MC = gather_rows(z_TC, order_M, TOP_K)
    gate_MI, up_MI = (grouped_linear(x_MC, weight, counts_E) for weight in weights[:2])
    return combine_rows(
        grouped_linear(situ_glu(gate_MI, up_MI, 4.0, 25.0), weights[2], counts_E), order_M, routes.weights_Tk
    )


def dense_experts(scores_TE: Tensor, z_TC: Tensor, weights: list[Tensor]) -> Tensor:
    """Every expert on every token, weighted by zero where it was not chosen."""
    routes = route(scores_TE, torch.zeros(NUM_EXPERTS, dtype=scores_TE.dtype), TOP_K)
    share_TE = torch.zeros_like(scores_TE).scatter(1, routes.expert_ids_Tk, routes.weights_Tk)
    gate_TEI, up_TEI = (torch.einsum("tc,eic->tei", z_TC, weight) for weight in weights[:2])
    act_TEI = 4 * torch.tanh(gate_TEI / 4) * gate_TEI.sigmoid() * 25 * torch.tanh(up_TEI / 25)
    return torch.einsum("tei,eci,te->tc", act_TEI, weights[2], share_TE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", ["two experts", "equal scores", "one token", "no token", "all experts"])
def test_idle_experts(case: str, dtype: torch.dtype) -> None:
    """E01: idle experts after a step that used them all and left its memory dirty; two backward passes."""
    # "all experts" is the contrast: uneven, so that they are padded to equal counts.
    tokens = {"one token": 1, "no token": 0}.get(case, 20)
    scores_TE = random(tokens, NUM_EXPERTS, seed=1, dtype=dtype).sigmoid()
    if case == "two experts":
        scores_TE[:, :TOP_K] += 1
    elif case == "equal scores":
        scores_TE = torch.full_like(scores_TE, 0.5)
    scores_TE.requires_grad_()
    shapes = ((HIDDEN, LATENT), (HIDDEN, LATENT), (LATENT, HIDDEN))
    weights = [random(NUM_EXPERTS, *shape, seed=2 + i, dtype=dtype, grad=True) for i, shape in enumerate(shapes)]
    z_TC = random(tokens, LATENT, seed=6, dtype=dtype, grad=True)
    upstream_TC = random(tokens, LATENT, seed=7, dtype=dtype)
    everyone_TE = random(64, NUM_EXPERTS, seed=8, dtype=dtype).sigmoid()
    warm_up = expert_layer(everyone_TE, random(64, LATENT, seed=9, dtype=dtype), weights)
    torch.autograd.grad(warm_up.sum(), weights)
    del warm_up
    inputs = [scores_TE, z_TC, *weights]
    want_TC = dense_experts(scores_TE, z_TC, weights)
    want_grads = torch.autograd.grad(want_TC, inputs, upstream_TC)
    tolerance = {"rtol": 10 * PRECISION[dtype], "atol": 10 * PRECISION[dtype]}
    idle_E = torch.ones(NUM_EXPERTS, dtype=torch.bool)
    idle_E[route(scores_TE, torch.zeros(NUM_EXPERTS), TOP_K).expert_ids_Tk] = False
    for _ in range(2):
        dirty_memory()
        got_TC = expert_layer(scores_TE, z_TC, weights)
        grads = torch.autograd.grad(got_TC, inputs, upstream_TC)
        torch.testing.assert_close(got_TC, want_TC, **tolerance)
        for got, want in zip(grads, want_grads):
            torch.testing.assert_close(got, want, **tolerance)
        assert idle_E.any() == (case != "all experts")
        assert all((grad[idle_E] == 0).all() for grad in grads[2:])
