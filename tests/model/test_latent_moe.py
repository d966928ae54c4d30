"""LatentMoE: equal to a loop over experts, idle experts, ties, empty input, bias, and the router's precision."""

from __future__ import annotations

import pytest
import torch
from tiny_model import close, tiny_config
from torch import Tensor

from openk3.model.init import initialize
from openk3.model.moe import DenseFFN, LatentMoE
from openk3.model.trace import Recorder
from openk3.ops.situ import situ_glu


def layer(**text: object) -> LatentMoE:
    """A float64 layer of eight experts, two per token, with large weights."""
    config = tiny_config(num_experts=8, **text).text
    moe = LatentMoE(config, 1).double()
    initialize(moe, 0, 0.3)
    return moe


def by_loop(moe: LatentMoE, x_TD: Tensor) -> Tensor:
    """The definition, token by token and expert by expert (report eqs. 11-13)."""
    rows = []
    for x_D in x_TD:
        s_E = torch.sigmoid(moe.router.weight @ x_D)
        chosen = (s_E + moe.router.bias).topk(moe.router.k).indices
        p_k = s_E[chosen] / (s_E[chosen].sum() + 1e-20) * moe.router.scale
        z_C, experts = moe.down_proj(x_D), moe.experts
        u_C = torch.zeros_like(z_C)
        for p, e in zip(p_k, chosen.tolist()):
            gate_I, up_I = experts.w1_EIC[e] @ z_C, experts.w3_EIC[e] @ z_C
            u_C = u_C + p * (experts.w2_ECI[e] @ situ_glu(gate_I, up_I, experts.beta, experts.linear_beta))
        u_C = u_C * torch.rsqrt(u_C.square().mean() + 1e-5) * moe.latent_norm.weight
        rows.append(moe.up_proj(u_C))
    y_TD = torch.stack(rows)
    return y_TD if moe.shared is None else y_TD + moe.shared(x_TD)


@pytest.mark.parametrize("text", [{}, {"num_shared_experts": 0}, {"routed_scaling_factor": 1.7}], ids=str)
def test_equals_a_loop_over_experts(text: dict[str, object]) -> None:
    """Values and every gradient."""
    moe = layer(**text)
    moe.router.bias.normal_(std=0.2)
    x_TD = torch.randn(23, 32, dtype=torch.float64, requires_grad=True)
    leaves = [x_TD, *moe.parameters()]
    got, want = moe(x_TD), by_loop(moe, x_TD)
    close(got, want)
    weights = torch.randn_like(got)
    ours = torch.autograd.grad((weights * got).sum(), leaves)
    theirs = torch.autograd.grad((weights * want).sum(), leaves)
    for one, two in zip(ours, theirs, strict=True):
        close(one, two)


def test_idle_experts_get_gradients_of_exactly_zero() -> None:
    """E01: all tokens to experts 0 and 1, after a step that used all and left its memory dirty; twice."""
    moe = layer()
    x_TD = torch.randn(64, 32, dtype=torch.float64)
    recorder = Recorder()
    moe(x_TD, recorder).square().sum().backward()
    assert recorder.routes[1].expert_ids_Tk.unique().numel() == 8
    assert all(grad.flatten(1).any(1).all() for grad in expert_gradients(moe))
    moe.zero_grad()
    moe.router.bias[:2] = 10.0
    for _ in range(2):
        dirty = [torch.full((4096,), float("nan")) for _ in range(64)]
        del dirty
        moe.zero_grad()
        y_TD = moe(x_TD, recorder)
        y_TD.square().sum().backward()
        assert set(recorder.routes[1].expert_ids_Tk.flatten().tolist()) == {0, 1}
        close(y_TD, by_loop(moe, x_TD))
        for grad in expert_gradients(moe):
            assert torch.isfinite(grad).all() and not grad[2:].any() and grad[:2].flatten(1).any(1).all()


def expert_gradients(moe: LatentMoE) -> list[Tensor]:
    """Of the three stacked expert weights."""
    return [
        value.grad for value in (moe.experts.w1_EIC, moe.experts.w3_EIC, moe.experts.w2_ECI) if value.grad is not None
    ]


def test_ties_give_distinct_experts_every_time() -> None:
    """E01: with all scores equal, the lowest expert numbers, the same each run."""
    moe, recorder = layer(), Recorder()
    with torch.no_grad():
        moe.router.weight.zero_()
        for _ in range(3):
            y_TD = moe(torch.randn(5, 32, dtype=torch.float64), recorder)
            assert torch.equal(recorder.routes[1].expert_ids_Tk, torch.tensor([[0, 1]] * 5))
            assert torch.isfinite(y_TD).all()


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(tokens: int) -> None:
    """E01: no token gives an empty result that still has gradients; one token equals the loop."""
    moe, x_TD = layer(), torch.randn(tokens, 32, dtype=torch.float64)
    y_TD = moe(x_TD)
    assert y_TD.shape == (tokens, 32)
    y_TD.sum().backward()
    for grad in expert_gradients(moe):
        assert torch.isfinite(grad).all() and int(grad.flatten(1).any(1).sum()) == 2 * tokens
    if tokens:
        close(y_TD, by_loop(moe, x_TD))


@pytest.mark.parametrize("busiest", [8, 9, 40])
def test_padding_of_experts_is_bounded(busiest: int) -> None:
    """Rows that experts compute: at most a quarter more than the tokens need, none more when they are uneven."""
    moe, ids = layer(), [expert for expert in range(8) for _ in range(busiest if expert == 3 else 8)]
    expert_ids_Tk = torch.tensor(ids + ids[: len(ids) % 2]).view(-1, 2)
    z_MC, counts_E, _ = moe.exchange.dispatch(torch.zeros(len(expert_ids_Tk), 24), expert_ids_Tk, 8)
    needed = expert_ids_Tk.numel()
    assert len(z_MC) == int(counts_E.sum()) and needed <= len(z_MC) <= 1.25 * needed
    assert (len(z_MC) == needed) == (busiest != 9)


def test_bias_moves_the_choice_and_not_the_weights() -> None:
    """The balancing bias has no path into values or gradients."""
    moe, recorder = layer(), Recorder()
    x_TD = torch.randn(9, 32, dtype=torch.float64)
    moe.router.bias[5] = 10.0
    moe(x_TD, recorder)
    ids_Tk, weights_Tk, *_ = recorder.routes[1]
    assert (ids_Tk == 5).any(1).all()
    chosen = recorder.scores[1].gather(1, ids_Tk)
    close(weights_Tk, chosen / chosen.sum(1, keepdim=True))
    assert not moe.router.bias.requires_grad


def test_router_works_in_float32_on_a_bfloat16_model() -> None:
    """Scores come from float32 products of what the model holds in bfloat16."""
    moe, recorder = layer().to(torch.bfloat16), Recorder()
    x_TD = torch.randn(7, 32).to(torch.bfloat16)
    assert moe(x_TD, recorder).dtype == torch.bfloat16
    assert recorder.scores[1].dtype == recorder.routes[1].weights_Tk.dtype == torch.float32
    assert torch.equal(recorder.scores[1], torch.sigmoid(x_TD.float() @ moe.router.weight.float().T))


def test_dense_ffn_by_definition() -> None:
    """(4 tanh(g/4) sigmoid(g)) * 25 tanh(u/25) between the projections (report eq. 12)."""
    ffn = DenseFFN(tiny_config().text, 40).double()
    initialize(ffn, 0, 1.0)
    x_TD = torch.randn(6, 32, dtype=torch.float64)
    g, u = x_TD @ ffn.gate_proj.weight.T, x_TD @ ffn.up_proj.weight.T
    inner = 4 * torch.tanh(g / 4) * torch.sigmoid(g) * 25 * torch.tanh(u / 25)
    close(ffn(x_TD), inner @ ffn.down_proj.weight.T)
