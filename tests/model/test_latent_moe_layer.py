"""The whole LatentMoE layer by kernels, in Triton's interpreter: equal to its PyTorch form, seen by the same traces."""

from __future__ import annotations

import pytest
import torch
from tiny_model import tiny_config
from torch import Tensor

from openk3.config.model import ConfigError
from openk3.model.init import initialize
from openk3.model.moe import LatentMoE
from openk3.model.trace import Recorder


def layer(dtype: torch.dtype, **text: object) -> LatentMoE:
    """Eight experts, two per token; the bias in float32."""
    moe = LatentMoE(tiny_config(num_experts=8, **text).text, 1)
    initialize(moe, 0, 0.3)
    moe.router.bias.normal_(std=0.2, generator=torch.Generator().manual_seed(1))
    bias = moe.router.bias
    moe = moe.to(dtype)
    moe.router.bias = bias
    return moe


def run(backend: str, moe: LatentMoE, x_TD: Tensor, patch: pytest.MonkeyPatch) -> tuple[list[Tensor], Recorder]:
    """Output and gradients of every parameter, and what a trace saw."""
    patch.setenv("OPENK3_BACKEND", backend)
    recorder, x_TD = Recorder(), x_TD.clone().requires_grad_()
    y_TD = moe(x_TD, recorder)
    factors = torch.linspace(-1, 1, y_TD.numel(), dtype=y_TD.dtype).view(y_TD.shape)
    return [y_TD.detach(), *torch.autograd.grad(y_TD, [x_TD, *moe.parameters()], factors)], recorder


@pytest.mark.parametrize("text", [{}, {"num_shared_experts": 0, "routed_scaling_factor": 1.7}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_definition(dtype: torch.dtype, text: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Values, every gradient, routes and scores."""
    moe, x_TD = layer(dtype, **text), torch.randn(19, 32, generator=torch.Generator().manual_seed(2)).to(dtype)
    want, theirs = run("reference", moe, x_TD, monkeypatch)
    got, ours = run("triton", moe, x_TD, monkeypatch)
    limit = 2e-6 if dtype == torch.float32 else 1.2e-2
    for a, b in zip(got, want, strict=True):
        assert float((a.double() - b.double()).norm()) <= limit * float(b.double().norm())
    assert torch.equal(ours.routes[1].expert_ids_Tk, theirs.routes[1].expert_ids_Tk)
    assert ours.routes[1].load_E.tolist() == ours.routes[1].expert_ids_Tk.flatten().bincount(minlength=8).tolist()
    torch.testing.assert_close(ours.scores[1], theirs.scores[1], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(ours.routes[1].threshold_T, theirs.routes[1].threshold_T, rtol=1e-5, atol=1e-7)


def test_scores_of_a_trace_carry_their_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss on the scores reaches the router, as it does by the definition."""

    class Penalty(Recorder):
        loss = torch.zeros(())

        def routing(self, layer: int, scores_TE: Tensor, *rest: object) -> None:
            self.loss = scores_TE.square().sum()

    moe, x_TD, gradients = layer(torch.float32), torch.randn(5, 32), []
    for backend in ("reference", "triton"):
        monkeypatch.setenv("OPENK3_BACKEND", backend)
        penalty = Penalty()
        moe(x_TD, penalty)
        gradients += torch.autograd.grad(penalty.loss, moe.router.weight)
    torch.testing.assert_close(*gradients)


def test_what_kernels_cannot_take_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of experts, and weights of another format than the input; unforced, the definition runs."""
    monkeypatch.setenv("OPENK3_BACKEND", "triton")
    grouped = layer(torch.float32, num_expert_group=2, topk_group=1)
    with pytest.raises(ConfigError, match="they choose among all experts, not among groups"):
        grouped(torch.randn(3, 32))
    with pytest.raises(
        ConfigError, match="weights are torch.bfloat16 with a bias of torch.float32, x is torch.float32"
    ):
        layer(torch.bfloat16)(torch.randn(3, 32))
    monkeypatch.delenv("OPENK3_BACKEND")
    assert grouped(torch.randn(3, 32)).shape == (3, 32)
