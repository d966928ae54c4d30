"""Expert choice, its ties, and the way of rows to experts and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import DTYPES, TOLERANCE, golden_input, golden_output, random
from torch import Tensor

from openk3.ops.routing import combine_rows, gather_rows, route, sort_by_expert


@pytest.mark.parametrize("name", ["k3_like", "scaled", "top1", "grouped", "top16_of_896"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_golden(dtype: torch.dtype, name: str) -> None:
    """Experts and weights of the released router, groups and scaling factor included."""
    name = f"router.{name}"
    k, groups, topk_group, scale = golden_input(f"{name}.params").tolist()
    logits_TE = golden_input(f"{name}.x", dtype) @ golden_input(f"{name}.weight", dtype).T
    options = {"groups": int(groups), "topk_group": int(topk_group), "scale": scale}
    routes = route(logits_TE.sigmoid(), golden_input(f"{name}.bias", dtype), int(k), **options)
    ids_Tk, order_Tk = routes.expert_ids_Tk.sort(dim=-1)
    assert torch.equal(ids_Tk, golden_output(f"{name}.idx").long())
    weights_Tk = routes.weights_Tk.gather(1, order_Tk)
    torch.testing.assert_close(weights_Tk, golden_output(f"{name}.w").to(dtype), **TOLERANCE[dtype])


def ranked(row: list[float]) -> list[int]:
    """Expert indices from best to worst, equals by index."""
    return sorted(range(len(row)), key=lambda e: (-row[e], e))


@settings(max_examples=60)
@given(st.data())
def test_ties_go_to_the_lower_index(data: st.DataObject) -> None:
    """Scores from very few levels, so that ties are everywhere: ids, order and threshold by definition."""
    num_experts = data.draw(st.integers(1, 40))
    k = data.draw(st.integers(1, num_experts))
    tokens, levels, seed = data.draw(st.integers(0, 6)), data.draw(st.integers(1, 4)), data.draw(st.integers(0, 999))
    generator = torch.Generator().manual_seed(seed)
    scores_TE = torch.randint(levels, (tokens, num_experts), generator=generator) / 8
    bias_E = torch.randint(2, (num_experts,), generator=generator) / 8
    routes = route(scores_TE, bias_E, k)
    for t, row in enumerate((scores_TE + bias_E).tolist()):
        best = ranked(row)
        assert routes.expert_ids_Tk[t].tolist() == best[:k]
        assert routes.threshold_T[t].item() == (row[best[k]] if k < num_experts else float("-inf"))


def test_equal_scores_give_distinct_experts_every_time() -> None:
    """E01: all scores equal, also with signed zeros: experts 0 .. k-1, the same on every run."""
    scores_TE = torch.zeros(300, 64)
    scores_TE[::2] = -0.0
    for _ in range(3):
        routes = route(scores_TE, torch.zeros(64), 8)
        assert torch.equal(routes.expert_ids_Tk, torch.arange(8).expand(300, 8))
        assert torch.equal(routes.threshold_T, torch.zeros(300))


def test_groups_by_definition() -> None:
    """A group counts by the sum of its two best; equal groups go to the lower index; experts elsewhere are out."""
    groups, kept, k, num_experts = 4, 2, 3, 12
    scores_TE = (random(200, num_experts, seed=1).sigmoid() * 4).round() / 4
    bias_E = (random(num_experts, seed=2) * 4).round() / 4
    routes = route(scores_TE, bias_E, k, groups=groups, topk_group=kept)
    size = num_experts // groups
    for t, row in enumerate((scores_TE + bias_E).tolist()):
        sums = [sum(sorted(row[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
        eligible = set(ranked(sums)[:kept])
        best = ranked([x if e // size in eligible else float("-inf") for e, x in enumerate(row)])
        assert routes.expert_ids_Tk[t].tolist() == best[:k]
        assert routes.threshold_T[t].item() == row[best[k]]


def test_weights_come_from_the_scores_alone() -> None:
    """The bias moves the choice, not the weights; they sum to `scale`; gradients reach the scores only."""
    scores_TE, bias_E = random(30, 12, seed=3).sigmoid().requires_grad_(), random(12, seed=4, grad=True)
    routes = route(scores_TE, bias_E, 4, scale=1.7)
    chosen_Tk = scores_TE.gather(1, routes.expert_ids_Tk)
    torch.testing.assert_close(routes.weights_Tk, 1.7 * chosen_Tk / chosen_Tk.sum(-1, keepdim=True))
    assert not routes.threshold_T.requires_grad
    routes.weights_Tk[:, 0].sum().backward()
    assert bias_E.grad is None and scores_TE.grad is not None
    untouched_TE = torch.ones_like(scores_TE).scatter(1, routes.expert_ids_Tk, 0).bool()
    assert (scores_TE.grad[untouched_TE] == 0).all() and (scores_TE.grad[~untouched_TE] != 0).all()
    raw = route(scores_TE.detach(), bias_E, 4, renormalize=False)
    assert torch.equal(raw.weights_Tk, chosen_Tk.detach())
    single = route(scores_TE.detach(), bias_E, 1)
    assert torch.equal(single.weights_Tk, scores_TE.detach().gather(1, single.expert_ids_Tk))


def test_refuses_impossible_choices() -> None:
    """More experts than are eligible, or groups that do not divide them."""
    scores_TE, bias_E = torch.rand(2, 8), torch.zeros(8)
    for k, options in ((9, {}), (0, {}), (5, {"groups": 4, "topk_group": 2})):
        with pytest.raises(ValueError, match="k="):
            route(scores_TE, bias_E, k, **options)
    for options in ({"groups": 3}, {"groups": 2, "topk_group": 3}, {"groups": 2, "topk_group": 0}):
        with pytest.raises(ValueError, match="groups="):
            route(scores_TE, bias_E, 1, **options)


def routed(tokens: int, num_experts: int, k: int, seed: int) -> tuple[Tensor, Tensor]:
    """(expert ids, weights) of a random choice."""
    scores_TE = random(tokens, num_experts, seed=seed).sigmoid()
    routes = route(scores_TE, torch.zeros(num_experts, dtype=torch.float64), k)
    return routes.expert_ids_Tk, routes.weights_Tk


@settings(max_examples=30)
@given(st.integers(0, 20), st.integers(1, 9), st.data())
def test_rows_to_experts_and_back(tokens: int, num_experts: int, data: st.DataObject) -> None:
    """Rows are grouped by expert in token order, and the weighted sum finds its way back."""
    k = data.draw(st.integers(1, num_experts))
    ids_Tk, weights_Tk = routed(tokens, num_experts, k, data.draw(st.integers(0, 99)))
    order_M, counts_E = sort_by_expert(ids_Tk, num_experts)
    slots = sorted(range(tokens * k), key=lambda slot: (ids_Tk.view(-1)[slot].item(), slot))
    assert order_M.tolist() == slots
    assert counts_E.tolist() == [(ids_Tk == e).sum().item() for e in range(num_experts)]
    x_TC = random(tokens, 3, seed=5)
    x_MC = gather_rows(x_TC, order_M, k)
    assert x_MC.tolist() == [x_TC[slot // k].tolist() for slot in slots]
    factor_M = ids_Tk.view(-1)[order_M].double() + 1
    out_TC = combine_rows(x_MC * factor_M.unsqueeze(1), order_M, weights_Tk)
    torch.testing.assert_close(out_TC, x_TC * (weights_Tk * (ids_Tk + 1)).sum(-1, keepdim=True))


UNEVEN = torch.tensor([[0, 1], [0, 1], [2, 0], [1, 2], [3, 0]])  # 4, 3, 2 and 1 slots


def test_padding_makes_counts_even() -> None:
    """Every expert gets as many rows as the fullest if the limit allows: its own slots, then ones that do not exist."""
    order_M, counts_E = sort_by_expert(UNEVEN, 4, max_padding=1.6)
    assert counts_E.tolist() == [4, 4, 4, 4]
    assert order_M.view(4, 4).tolist() == [[0, 2, 5, 9], [1, 3, 6, 10], [4, 7, 10, 10], [8, 10, 10, 10]]
    for ids_Tk, num_experts, max_padding in ((UNEVEN, 4, 1.59), (UNEVEN, 5, 100.0), (UNEVEN[:0], 4, 100.0)):
        order_M, counts_E = sort_by_expert(ids_Tk, num_experts, max_padding=max_padding)
        assert sorted(order_M.tolist()) == list(range(ids_Tk.numel())) and counts_E.sum() == ids_Tk.numel()


@pytest.mark.parametrize("max_padding", [1.0, 1.6])
def test_row_gradients(max_padding: float) -> None:
    """Both permutations carry exact gradients, the weights' included; padding changes no result and gets none."""
    order_M, _ = sort_by_expert(UNEVEN, 4, max_padding=max_padding)
    x_TC, weights_Tk = random(5, 3, seed=8, grad=True), random(5, 2, seed=9).sigmoid().requires_grad_()

    def there_and_back(x_TC: Tensor) -> Tensor:
        return combine_rows(gather_rows(x_TC, order_M, 2), order_M, weights_Tk)

    assert torch.autograd.gradcheck(there_and_back, x_TC)
    torch.testing.assert_close(there_and_back(x_TC), x_TC * weights_Tk.sum(-1, keepdim=True))
    y_MC = random(len(order_M), 3, seed=9, grad=True)
    assert torch.autograd.gradcheck(lambda y, w: combine_rows(y, order_M, w), (y_MC, weights_Tk))
    (gradient_MC,) = torch.autograd.grad(combine_rows(y_MC, order_M, weights_Tk).sum(), y_MC)
    assert ((gradient_MC == 0).all(-1) == (order_M == 10)).all()
    torch.testing.assert_close(gather_rows(x_TC, order_M, 2), x_TC[(order_M // 2).clamp(max=4)])


def test_combine_sums_in_float32() -> None:
    """bfloat16 rows, float32 weights: one rounding of the float32 sum, and gradients in each one's dtype."""
    ids_Tk, weights_Tk = routed(40, 16, 8, seed=10)
    order_M, _ = sort_by_expert(ids_Tk, 16)
    y_MC = random(320, 8, seed=11, dtype=torch.bfloat16, grad=True)
    weights_Tk = weights_Tk.float().requires_grad_()
    out_TC = combine_rows(y_MC, order_M, weights_Tk)
    y_TkC = torch.empty_like(y_MC).index_copy(0, order_M, y_MC.detach()).view(40, 8, 8).float()
    exact_TC = (y_TkC * weights_Tk.detach().unsqueeze(-1)).sum(1)
    torch.testing.assert_close(out_TC, exact_TC.bfloat16(), rtol=2**-8, atol=1e-6)
    out_TC.sum().backward()
    assert y_MC.grad is not None and weights_Tk.grad is not None
    assert y_MC.grad.dtype == torch.bfloat16 and weights_Tk.grad.dtype == torch.float32
    torch.testing.assert_close(weights_Tk.grad, y_TkC.sum(-1))


def test_gather_gradient_sums_in_float32() -> None:
    """A bfloat16 row sent to 16 experts gets the sum of 16 gradients with one rounding."""
    order_M, _ = sort_by_expert(torch.arange(16).expand(6, 16), 16)
    x_TC = random(6, 4, seed=12, dtype=torch.bfloat16, grad=True)
    upstream_MC = random(96, 4, seed=13, dtype=torch.bfloat16)
    (gradient_TC,) = torch.autograd.grad(gather_rows(x_TC, order_M, 16), x_TC, upstream_MC)
    exact_TC = upstream_MC.double().view(16, 6, 4).sum(0)
    torch.testing.assert_close(gradient_TC, exact_TC.bfloat16(), rtol=2**-8, atol=1e-6)
