"""KimiDeltaAttention: the layer by definition, the bounded gate on every path, state and window hand-over."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from tiny_model import close, tiny_config
from torch import Tensor
from torch.nn import functional as F

from openk3.config.model import ConfigError, ModelConfig
from openk3.model.cache import DenseCache, KdaCache, Sequences
from openk3.model.init import initialize
from openk3.model.kda import KimiDeltaAttention
from openk3.model.trace import Recorder

# log decay at A_log 0, bias 0, bound -5 for z = -4, -1, 0, 1, 4, and what a clamped softplus would give
Z = (-4.0, -1.0, 0.0, 1.0, 4.0)
RIGHT = (-0.0899, -1.3447, -2.5000, -3.6553, -4.9101)
CLAMPED = (-0.0181, -0.3133, -0.6931, -1.3133, -4.0181)


def layer(lower_bound: float | None = -5.0) -> KimiDeltaAttention:
    """A float64 layer: width 32, 2 heads of 16."""
    text = tiny_config().text
    linear = dataclasses.replace(text.linear_attn_config, gate_lower_bound=lower_bound)
    kda = KimiDeltaAttention(dataclasses.replace(text, linear_attn_config=linear), 0).double()
    initialize(kda, 0, 0.3)
    torch.nn.init.normal_(kda.A_log, std=0.3)
    torch.nn.init.normal_(kda.o_norm.weight, mean=1.0, std=0.1)
    return kda


def sequences(*lengths: int) -> Sequences:
    """The layout of a pass."""
    return Sequences(torch.tensor([0, *lengths]).cumsum(0).to(torch.int32))


def by_definition(kda: KimiDeltaAttention, x_TD: Tensor) -> Tensor:
    """One sequence, token by token (report eqs. 1, 2, 5, 6)."""
    x_TD = x_TD.detach()

    def conv(proj: Tensor, taps_CW: Tensor) -> Tensor:
        raw = F.pad((x_TD @ proj.T).T, (3, 0))
        return F.silu(sum(taps_CW[:, i, None] * raw[:, i : i + len(x_TD)] for i in range(4))).T.unflatten(1, (2, 16))

    q = conv(kda.q_proj.weight, kda.q_conv1d.weight)
    k = conv(kda.k_proj.weight, kda.k_conv1d.weight)
    v = conv(kda.v_proj.weight, kda.v_conv1d.weight)
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    z = (x_TD @ kda.f_a_proj.weight.T @ kda.f_b_proj.weight.T + kda.dt_bias).unflatten(1, (2, 16))
    alpha = torch.exp(-5 * torch.sigmoid(kda.A_log.exp()[:, None] * z))
    beta = torch.sigmoid(x_TD @ kda.b_proj.weight.T)
    state, rows = torch.zeros(2, 16, 16, dtype=torch.float64), []
    for t in range(len(x_TD)):
        state = alpha[t][:, :, None] * state
        error = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
        state = state + beta[t][:, None, None] * k[t][:, :, None] * error[:, None, :]
        rows.append(torch.einsum("hkv,hk->hv", state, q[t] / 4))
    o = torch.stack(rows)
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + 1e-5) * kda.o_norm.weight
    gate = torch.sigmoid(x_TD @ kda.g_proj.weight.T)
    return (o.flatten(1) * gate) @ kda.o_proj.weight.T


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 130])
def test_layer_by_definition(length: int) -> None:
    """Chunkwise training form, and prefill plus single steps through the cache."""
    kda = layer()
    x_TD = torch.randn(length, 32, dtype=torch.float64)
    want = by_definition(kda, x_TD)
    close(kda(x_TD, sequences(length)), want, 1e-12)
    cache, parts, first = new_cache(1), [], length // 2
    with torch.no_grad():
        for rows in [x_TD[:first], *x_TD[first:].split(1)]:
            parts.append(kda(rows, sequences(len(rows)), cache))
            cache.commit()
    close(torch.cat(parts), want, 1e-12)


def new_cache(num_sequences: int) -> KdaCache:
    """The first layer's cache of the tiny model."""
    cache = DenseCache(tiny_config(), num_sequences, torch.float64).layers[0]
    assert isinstance(cache, KdaCache)
    return cache


@pytest.mark.parametrize("A_log", [0.0, math.log(16.0)])
@pytest.mark.parametrize("tokens", [1, 2, 20])
def test_bounded_gate_on_every_path(A_log: float, tokens: int) -> None:
    """K06: bound * sigmoid(exp(A) z), never a clamped softplus; seen in the traced decay and in what a state loses."""
    kda = fixed_gate(layer(), A_log)
    x_TD = torch.zeros(tokens, 32, dtype=torch.float64)
    x_TD[:, 0] = 1.0
    want = torch.tensor([-5 / (1 + math.exp(-math.exp(A_log) * z)) for z in Z], dtype=torch.float64)
    if A_log == 0.0:
        torch.testing.assert_close(want, torch.tensor(RIGHT, dtype=torch.float64), atol=5e-5, rtol=0)
        assert (want - torch.tensor(CLAMPED)).abs().min() > 0.05
    cache, recorder = new_cache(1), Recorder()
    cache.state_NHKV = torch.rand(1, 2, 16, 16, dtype=torch.float64) + 1
    before = cache.state_NHKV.clone()
    with torch.no_grad():
        kda(x_TD, sequences(tokens), cache, recorder)
    cache.commit()
    close(recorder.decays[0][:, :, :5], want.expand(tokens, 2, 5), 1e-12)
    lost = (cache.state_NHKV / before).log()  # beta is 0: the state only decays
    close(lost[0, :, :5], (tokens * want)[None, :, None].expand(2, 5, 16), 1e-11)


def fixed_gate(kda: KimiDeltaAttention, A_log: float) -> KimiDeltaAttention:
    """Decay logits Z in the first five channels of each head when x is the first unit vector, and beta 0."""
    with torch.no_grad():
        kda.A_log.fill_(A_log)
        kda.dt_bias.zero_()
        kda.f_a_proj.weight.zero_()[0, 0] = 1.0
        kda.f_b_proj.weight.zero_().view(2, 16, 16)[:, :5, 0] = torch.tensor(Z, dtype=torch.float64)
        kda.b_proj.weight.zero_()[:, 0] = -1000.0
    return kda


def test_no_bound_is_an_explicit_choice() -> None:
    """K06: null in the config is Kimi Linear's softplus gate; a config that does not say is refused."""
    kda, recorder = fixed_gate(layer(lower_bound=None), 0.0), Recorder()
    x_TD = torch.zeros(1, 32, dtype=torch.float64)
    x_TD[:, 0] = 1.0
    kda(x_TD, sequences(1), trace=recorder)
    close(recorder.decays[0][0, 0, :5], -F.softplus(torch.tensor(Z, dtype=torch.float64)), 1e-12)
    data = tiny_config().to_dict()
    del data["text_config"]["linear_attn_config"]["gate_lower_bound"]
    with pytest.raises(ConfigError, match="gate_lower_bound: missing"):
        ModelConfig.from_dict(data)


def test_a_pass_does_not_touch_the_committed_state() -> None:
    """State in, state out: what the cache holds changes at commit, not before."""
    kda, cache = layer(), new_cache(2)
    cache.state_NHKV.normal_()
    before = cache.snapshot()
    with torch.no_grad():
        for lengths in ((1, 1), (5, 0)):
            kda(torch.randn(sum(lengths), 32, dtype=torch.float64), sequences(*lengths), cache)
            assert torch.equal(cache.state_NHKV, before[0])
            assert all(torch.equal(a, b) for a, b in zip(cache.windows, before[1]))
    cache.commit()
    assert not torch.equal(cache.state_NHKV[0], before[0][0])
    assert torch.equal(cache.state_NHKV[1], before[0][1])  # it got no token
    assert torch.equal(cache.windows[0][1], before[1][0][1])
