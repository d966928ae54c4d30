"""The kernels of LatentMoE in Triton's interpreter: routing, sort, experts and projections against definitions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from latent_moe_checks import Case, by_kernels, draw, errors, results
from op_checks import random
from torch import Tensor

from openk3.ops import routing
from openk3.ops.latent_moe import experts_library, route_fused
from openk3.ops.latent_moe.experts_kernel import rows_of_tile
from openk3.ops.latent_moe.project_fused import project_and_route, router_logits
from openk3.ops.latent_moe.route_fused import Choice, Plan, Routed, logits_gradient, route, sort


def check_plan(plan: Plan, routed: Routed, experts: int) -> None:
    """Rows, slots and tiles are those of a stable sort."""
    order_M, counts_E = routing.sort_by_expert(routed.ids_Tk, experts, max_padding=0)
    assert torch.equal(plan.slot_M.long(), order_M)
    assert torch.equal(plan.start_X.long(), torch.cat((counts_E.new_zeros(1), counts_E.cumsum(0))))
    assert torch.equal(plan.row_Tk.flatten().long()[order_M], torch.arange(len(order_M)))
    tiles = [
        (e, int(plan.start_X[e]) + first) for e in range(experts) for first in range(0, int(counts_E[e]), plan.tile)
    ]
    assert list(zip(plan.tile_expert.tolist(), plan.tile_row.tolist()))[: len(tiles)] == tiles
    most = routed.ids_Tk.numel() // plan.tile + min(experts, routed.ids_Tk.numel())
    assert len(tiles) <= most <= len(plan.tile_expert)
    assert (plan.tile_expert[len(tiles) :] == experts).all()


@settings(max_examples=8)
@given(
    T=st.sampled_from([0, 1, 31, 33, 100]),
    E=st.sampled_from([1, 5, 16, 40, 130]),
    k=st.integers(1, 6),
    tied=st.booleans(),
    groups=st.integers(1, 3),
)
def test_routes_are_the_definitions(T: int, E: int, k: int, tied: bool, groups: int) -> None:
    """Choice, ties by the lower index, weights, thresholds, scores, rows, tiles and the logits' gradient; several words
    of tokens for each program of either launch."""
    k = min(k, E)
    logits, bias = random(T, E, seed=T).float(), 0.1 * random(E, seed=1).float()
    if tied:
        logits, bias = (2 * logits).round() / 2, torch.zeros(E)
    choice = Choice(k, True, 1.5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(route_fused, "MOST_GROUPS", groups)
        patch.setattr(route_fused, "MOST_SORTS", 2)
        routed = route(logits, bias, choice, with_scores=True)
        check_plan(sort(routed, 16), routed, E)
    torch.testing.assert_close(routed.scores_TE, logits.sigmoid(), rtol=1e-6, atol=0)
    scores = routed.scores_TE.requires_grad_()
    want = routing.route(scores, bias, k, scale=1.5)
    assert torch.equal(routed.ids_Tk, want.expert_ids_Tk) and torch.equal(routed.threshold_T, want.threshold_T)
    torch.testing.assert_close(routed.weights_Tk, want.weights_Tk, rtol=1e-6, atol=0)
    d_weights = random(T, k, seed=2).float()
    (d_scores,) = torch.autograd.grad(want.weights_Tk, scores, d_weights)
    got = logits_gradient(d_weights, routed, choice, torch.float32)
    torch.testing.assert_close(got, (d_scores * scores * (1 - scores)).detach(), rtol=1e-5, atol=1e-6)
    assert not got[want.weights_Tk.new_ones(T, E).scatter(1, routed.ids_Tk, 0).bool()].any()


@pytest.mark.parametrize("renormalize", [True, False])
def test_weights_without_renormalisation_and_of_one_expert(renormalize: bool) -> None:
    """k = 1 is never renormalised."""
    logits, bias = random(9, 12).float(), torch.zeros(12)
    for k in (1, 3):
        routed = route(logits, bias, Choice(k, renormalize, 2.0))
        want = routing.route(logits.sigmoid(), bias, k, renormalize=renormalize, scale=2.0)
        torch.testing.assert_close(routed.weights_Tk, want.weights_Tk)


def test_no_logits_lead_outside_of_memory() -> None:
    """NaN of either sign, infinities and equal values: distinct experts that exist, and a plan that is a sort."""
    logits = random(40, 20).float()
    logits[3], logits[4, ::2], logits[5], logits[6] = math.nan, math.inf, -math.inf, 0.0
    logits[7, 5] = -torch.tensor(math.nan)
    logits[8] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)
    routed = route(logits, torch.zeros(20), Choice(4, True, 1.0))
    assert ((routed.ids_Tk >= 0) & (routed.ids_Tk < 20)).all()
    assert all(len(set(row)) == 4 for row in routed.ids_Tk.tolist())
    assert 5 in routed.ids_Tk[7]
    assert routed.ids_Tk[6].tolist() == [0, 1, 2, 3]
    check_plan(sort(routed, 16), routed, 20)


FLOAT32 = dict.fromkeys(("out", "d_z", "d_weights", "d_w1", "d_w3", "d_w2", "d_norm"), 2e-6)
BFLOAT16 = dict.fromkeys(FLOAT32, 8e-3)
CASES = [
    Case(70, 6, 3, 32, 48, torch.float32),
    Case(33, 9, 2, 48, 32, linear_beta=None),
    Case(150, 3, 2, 80, 40, idle=(1,)),
    Case(40, 2, 2, 24, 136, torch.float16),
    Case(1, 4, 3, 16, 16, torch.float32),
    Case(40, 2, 2, 96, 64),  # blocks of gradients with whole parts behind the last column
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_experts_against_float64(case: Case) -> None:
    """Output and every gradient; tiles of 16, 64 and 128 rows, widths that no tile divides, one token."""
    limits = FLOAT32 if case.dtype == torch.float32 else BFLOAT16
    found = errors(case)
    assert all(found[name] < limits[name] for name in found), found


def test_experts_by_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with products by torch's grouped matmul; which way is taken depends on shapes and formats alone."""
    case = Case(40, 3, 2, 80, 40, idle=(1,))
    monkeypatch.setattr(experts_library, "LEAST_WIDTH", 40)
    monkeypatch.setattr(experts_library, "ROWS", 64)
    made = []
    weight = experts_library.Library.weight
    monkeypatch.setattr(experts_library.Library, "weight", lambda *xs: made.append(weight(*xs)) or made[-1])
    found = errors(case)
    assert all(found[name] < BFLOAT16[name] for name in found), found
    assert [x.shape for x in made] == [(3, 80, 40), (3, 40, 80), (3, 40, 80)]
    assert all(x[0].any() and not x[1].any() for x in made)
    routed = draw(case)[1]
    plan, widths = sort(routed, 64), (case.C, case.I)
    ways = [("hopper", torch.bfloat16, plan), ("ampere", torch.bfloat16, plan), ("hopper", torch.float16, plan)]
    ways.append(("hopper", torch.bfloat16, sort(routed, 16)))
    assert [experts_library.is_faster(*way, widths) for way in ways] == [True, False, False, False]
    assert not experts_library.is_faster(*ways[0], (80, 44)) and not experts_library.is_faster(*ways[0], (80, 32))


def test_no_token() -> None:
    """An empty result that still has gradients, all zero."""
    case = Case(0, 4, 2, 16, 16)
    found = results(case, by_kernels, *draw(case))
    assert found["out"].shape == (0, 16)
    assert all(not found[f"d_{name}"].any() for name in ("w1", "w3", "w2", "norm"))


def test_idle_experts_get_exact_zeros_whatever_memory_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor that a launch allocates is NaN before: results do not change, and idle experts' gradients are 0."""
    case = Case(30, 7, 2, 32, 32, torch.float32, idle=(0, 3, 6))
    values, routed, d_out = draw(case)
    want = results(case, by_kernels, values, routed, d_out)
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    monkeypatch.setattr(Tensor, "new_empty", poisoned(Tensor.new_empty))
    got = results(case, by_kernels, values, routed, d_out)
    assert all(torch.equal(got[name], want[name]) for name in want)
    for name in ("d_w1", "d_w3", "d_w2"):
        assert not got[name][[0, 3, 6]].any() and got[name][[1, 2, 4, 5]].flatten(1).any(1).all()


def poisoned(allocate: object) -> object:
    """An allocation whose floating-point memory is NaN and whose integers are far out."""

    def filled(*args: object, **kwargs: object) -> Tensor:
        made = allocate(*args, **kwargs)  # type: ignore[operator]
        return made.fill_(math.nan if made.is_floating_point() else 2**30 + 7)

    return filled


def test_rows_of_a_tile_follow_the_load() -> None:
    """Few rows an expert take small tiles; float32 has no large ones."""
    assert [rows_of_tile(128 * n, 128, "hopper") for n in (1, 16, 17, 96, 97, 4096)] == [16, 16, 64, 64, 128, 128]
    assert rows_of_tile(128 * 4096, 128, "float32") == 64


@pytest.mark.parametrize(("T", "D", "E"), [(0, 8, 2), (37, 40, 9), (130, 200, 140)])
def test_logits_are_float32_products(T: int, D: int, E: int) -> None:
    """Of what the model holds in bfloat16; few tokens and many, widths that no tile divides."""
    x, router = random(T, D).bfloat16(), random(E, D, seed=1).bfloat16()
    logits = router_logits(x, router)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), x.double() @ router.double().T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_the_projections(dtype: torch.dtype) -> None:
    """Of input and both matrices: by latents and weights, and by scores where a loss reads them."""
    T, D, C, E, k = 21, 32, 16, 10, 3
    x, down, router = (random(*shape, seed=n).to(dtype) for n, shape in enumerate(((T, D), (C, D), (E, D))))
    bias, choice = torch.zeros(E), Choice(k, True, 1.0)
    factors = [random(*shape, seed=n).to(dtype) for n, shape in ((5, (T, C)), (6, (T, k)), (7, (T, E)))]
    for used in ((0, 1), (0, 2), (1,), (0, 1, 2)):
        leaves = [value.clone().requires_grad_() for value in (x, down, router)]
        wide = [value.double().requires_grad_() for value in (x, down, router)]
        got = project_and_route(leaves[0], (leaves[1], leaves[2]), bias, choice, with_scores=True)
        parts = got.z_TC, got.routed.weights_Tk, got.routed.scores_TE
        scores = torch.sigmoid(wide[0] @ wide[2].T)
        chosen = scores.gather(1, got.routed.ids_Tk)
        wanted = wide[0] @ wide[1].T, chosen / chosen.sum(1, keepdim=True), scores
        for values in (parts, wanted):
            sum((values[n].double() * factors[n].double()).sum() for n in used).backward()
        for ours, theirs in zip(leaves, wide):
            if theirs.grad is None:
                assert ours.grad is None
                continue
            error = float((ours.grad.double() - theirs.grad).norm() / theirs.grad.norm())
            assert error < (1e-6 if dtype == torch.float32 else 8e-3), (used, error)
