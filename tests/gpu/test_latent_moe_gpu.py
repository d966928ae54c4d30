"""LatentMoE by kernels on a GPU: against float64, the reference's choices, same bits, no waiting, CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from kda_kernel_checks import poisoned_memory
from latent_moe_checks import Case, by_kernels, draw, errors, results
from torch import Tensor

from openk3.config.train import BalanceConfig
from openk3.model.init import initialize
from openk3.model.moe import LatentMoE
from openk3.ops import routing
from openk3.ops.gradient_sums import GradientSum, keep_sum
from openk3.ops.latent_moe.project_fused import router_logits
from openk3.ops.latent_moe.route_fused import Choice, route, sort
from openk3.ops.margins import count_margins
from openk3.optim.quantile_balance import BalanceTrace
from openk3.recipes import small

pytestmark = pytest.mark.gpu
CASES = [
    Case(4097, 128, 8, 512, 512),
    Case(3000, 80, 4, 384, 384, idle=(0, 5, 79)),
    Case(300, 16, 4, 3584, 3072),
    Case(700, 20, 4, 2560, 2048, idle=(0, 7, 19)),  # products by torch's grouped matmul
    Case(31, 128, 8, 512, 512),
    Case(1, 896, 16, 64, 64),
    Case(700, 5, 3, 200, 136, linear_beta=None),
    Case(500, 12, 2, 384, 256, torch.float16),
    Case(500, 12, 2, 96, 80, torch.float32),
    Case(3000, 80, 4, 768, 768, idle=(0, 5, 79)),  # all products by Gluon's kernels on Hopper, but one
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_experts_against_float64(case: Case, measured: list[tuple[str, str, dict[str, float]]]) -> None:
    """Output and every gradient; gradients of experts without tokens are exactly zero."""
    found = errors(case, "cuda", leave_out=("d_weights",) if case.T == 1 else ())
    measured.append(("moe", str(case)[5:60], found))
    limit = 5e-6 if case.dtype == torch.float32 else 8e-3 if case.T > 1 else 2e-2
    assert all(error < limit for error in found.values()), found
    if case.idle:
        got = results(case, by_kernels, *draw(case, "cuda"))
        assert not any(got[name][list(case.idle)].any() for name in ("d_w1", "d_w3", "d_w2"))


@pytest.mark.parametrize(("E", "k"), [(896, 16), (80, 4), (128, 8), (1000, 32), (7, 7)])
def test_the_same_logits_give_the_references_routes(E: int, k: int) -> None:
    """Scores as PyTorch computes them, bit by bit; experts, thresholds and the sort equal, with many ties too."""
    generator = torch.Generator("cuda").manual_seed(E)
    logits = torch.randn(5000, E, generator=generator, device="cuda")
    logits[::3] = (4 * logits[::3]).round() / 4
    bias = 0.1 * torch.randn(E, generator=generator, device="cuda")
    bias[::2] = 0.0
    routed = route(logits, bias, Choice(k, True, 1.0), with_scores=True)
    assert torch.equal(routed.scores_TE, torch.sigmoid(logits))
    want = routing.route(torch.sigmoid(logits), bias, k)
    assert torch.equal(routed.ids_Tk, want.expert_ids_Tk) and torch.equal(routed.threshold_T, want.threshold_T)
    torch.testing.assert_close(routed.weights_Tk, want.weights_Tk, rtol=1e-6, atol=0)
    plan = sort(routed, 64)
    order_M, counts_E = routing.sort_by_expert(routed.ids_Tk, E, max_padding=0)
    assert torch.equal(plan.slot_M.long(), order_M) and torch.equal(plan.start_X.diff().long(), counts_E)
    assert torch.equal(plan.row_Tk.flatten().long()[order_M], torch.arange(len(order_M), device="cuda"))


@pytest.mark.parametrize(("D", "E"), [(768, 80), (1024, 128), (7168, 896)])
def test_logits_are_as_exact_as_float32_products(D: int, E: int) -> None:
    """No further from float64 than float32 products by much, so that only scores that rounding cannot tell apart may
    lead to another choice than the reference's."""
    generator = torch.Generator("cuda").manual_seed(D)
    x = torch.randn(4000, D, generator=generator, device="cuda").bfloat16()
    router = torch.randn(E, D, generator=generator, device="cuda").bfloat16() * D**-0.5
    exact, plain, logits = x.double() @ router.double().T, x.float() @ router.float().T, router_logits(x, router)
    error = float((plain - exact).abs().max())
    assert float((logits - exact).abs().max()) < 2 * error + 1e-7
    bias, k = torch.zeros(E, device="cuda"), 8
    ours = route(logits, bias, Choice(k, True, 1.0)).ids_Tk
    want = routing.route(torch.sigmoid(plain), bias, k)
    gap = torch.sigmoid(exact).sort(1, descending=True).values[:, : k + 1].diff(dim=1).abs().amin(1)
    different = (ours != want.expert_ids_Tk).any(1)
    assert not (different & (gap > 4 * error)).any() and int(different.sum()) < 10


@pytest.mark.parametrize("case", [CASES[1], CASES[3], CASES[-1]], ids=["kernels", "library", "gluon"])
def test_same_bits_every_time(case: Case) -> None:
    """Two runs amid NaN; experts without tokens are none of that."""
    drawn = draw(case, "cuda")
    want = results(case, by_kernels, *drawn)
    for _ in range(2):
        with poisoned_memory():
            got = results(case, by_kernels, *drawn)
        assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("gluon", ["1", "0"])
@pytest.mark.parametrize("case", [CASES[1], CASES[-1]], ids=str)
def test_gradients_are_added_to_open_sums(case: Case, gluon: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the same micro-batch, in float32: twice the gradient, by either kind of kernels, amid NaN."""
    monkeypatch.setenv("OPENK3_GLUON", gluon)
    values, routed, d_out = draw(case, "cuda")
    want = results(case, by_kernels, values, routed, d_out)
    leaves = {name: x.clone().requires_grad_() for name, x in values.items()}
    totals: dict[str, Tensor] = {}
    for name in ("w1", "w3", "w2"):
        total = GradientSum(totals, name)
        keep_sum(leaves[name], total)
        total.is_open = True
    for count in (1, 2):
        with poisoned_memory():
            by_kernels(case, leaves, routed).backward(d_out)
        for name, total in totals.items():
            apart = (total - count * want[f"d_{name}"].float()).norm() / want[f"d_{name}"].float().norm()
            assert float(apart) < 3e-3 * count and leaves[name].grad is None, name
            assert not total[list(case.idle)].any(), name


def layer() -> LatentMoE:
    """A layer of recipe small in bfloat16."""
    moe = LatentMoE(small.model().text, 1)
    initialize(moe, 0, 0.02)
    moe = moe.to("cuda", torch.bfloat16)
    moe.router.bias = moe.router.bias.float()
    return moe


@contextmanager
def nothing_waits() -> Iterator[None]:
    """An operation that waits for the GPU fails."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def step(moe: LatentMoE, x_TD: Tensor, trace: BalanceTrace) -> list[Tensor]:
    """Output and gradients of one pass that is counted."""
    x_TD = x_TD.detach().requires_grad_()
    y_TD = moe(x_TD, trace)
    return [y_TD.detach(), *torch.autograd.grad(y_TD, [x_TD, *moe.parameters()], torch.ones_like(y_TD) * x_TD.detach())]


def test_a_layer_neither_waits_nor_differs_from_its_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, backward, counting for Quantile Balancing and the next bias without waiting for the GPU."""
    moe, x_TD = layer(), torch.randn(3001, 768, device="cuda").bfloat16()
    trace = BalanceTrace(torch.nn.ModuleList([moe]), BalanceConfig())
    for repeat in range(2):
        trace.open()
        with nothing_waits() if repeat else poisoned_memory():
            got = step(moe, x_TD, trace)
        loads, counts = trace.loads[1].clone(), trace.statistics[1].counts_EB.clone()
        trace.reset()
    monkeypatch.setenv("OPENK3_BACKEND", "reference")
    trace.open()
    want = step(moe, x_TD, trace)
    for a, b in zip(got, want, strict=True):
        assert float((a.double() - b.double()).norm()) < 1.5e-2 * float(b.double().norm())
    assert int((loads - trace.loads[1]).abs().sum()) < 20
    assert int((counts - trace.statistics[1].counts_EB).abs().sum()) < 0.02 * counts.sum()
    with nothing_waits():
        trace.update()
    assert moe.router.bias.any()


def test_a_graph_of_a_layer_gives_the_same_bits() -> None:
    """Forward and backward captured once, then replayed on other inputs."""
    moe, x_TD = layer(), torch.randn(2048, 768, device="cuda").bfloat16().requires_grad_()
    leaves = [x_TD, *moe.parameters()]

    def run() -> tuple[Tensor, ...]:
        y_TD = moe(x_TD)
        return y_TD, *torch.autograd.grad(y_TD, leaves, torch.ones_like(y_TD))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(2):
        with torch.no_grad():
            x_TD.normal_()
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, run(), strict=True))


def test_margins_are_counted_as_by_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a margin lies at the edge of a bin, rounding may choose either."""
    scores, threshold = torch.rand(5001, 80, device="cuda"), torch.rand(5001, device="cuda")
    range_2 = torch.tensor([-1.0, 2e-3], dtype=torch.float64, device="cuda")
    counts = torch.zeros(2, 80, 1000, dtype=torch.int64, device="cuda")
    count_margins(counts[0], scores, threshold, range_2)
    monkeypatch.setenv("OPENK3_BACKEND", "reference")
    count_margins(counts[1], scores, threshold, range_2)
    assert (counts.sum(2) == 5001).all() and int((counts[0] - counts[1]).abs().sum()) < 2000


def test_more_than_2_to_the_31_values() -> None:
    """720,000 rows of 3,072 inner values: the last tokens of many give what they give alone."""
    case = Case(90_000, 16, 8, 64, 3072)
    values, routed, d_out = draw(case, "cuda")
    got = results(case, by_kernels, values, routed, torch.cat((torch.zeros_like(d_out[:-64]), d_out[-64:])))
    few = replace(case, T=64)
    last = {name: x[-64:] if name in ("z", "weights") else x for name, x in values.items()}
    ids = routed.ids_Tk[-64:].contiguous()
    logits = torch.full((64, 16), -20.0, device="cuda").scatter(
        1, ids, torch.linspace(9, 2, 8, device="cuda").expand(64, 8)
    )
    alone = route(logits, torch.zeros(16, device="cuda"), Choice(8, True, 1.0))
    assert torch.equal(alone.ids_Tk, ids)
    want = results(few, by_kernels, last, alone, d_out[-64:])
    for name in ("out", "d_z", "d_weights"):
        error = (got[name][-64:].double() - want[name].double()).norm() / want[name].double().norm()
        assert float(error) < 1e-2 and torch.isfinite(got[name]).all()
    for name in ("d_w1", "d_w3", "d_w2", "d_norm"):
        assert float((got[name].double() - want[name].double()).norm() / want[name].double().norm()) < 1e-2
