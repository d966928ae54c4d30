"""Decoding with KDA: the definitions against recurrence and layer, the Triton kernels against the definitions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import pytest
import torch
from kda_checks import cu_seqlens
from torch import Tensor

from openk3.config.model import TextConfig
from openk3.model.cache import KdaCache, Sequences
from openk3.model.kda import KimiDeltaAttention
from openk3.ops import KdaGate, recurrent_kda
from openk3.ops.kda.decode import (
    DecodePool,
    DecodeWeights,
    Projected,
    decode_kda,
    replay_kda,
    step_kda,
    step_kda_in_place,
    verify_kda,
)
from openk3.recipes import tiny

BACKENDS = ["reference", *(["triton"] if find_spec("triton") else [])]


class Draw:
    """Random layers, pools and tokens of H heads."""

    def __init__(self, dtype: torch.dtype, H: int = 2, K: int = 16, V: int = 32, *, W: int = 4, seed: int = 0) -> None:
        self.dtype, self.H, self.K, self.V, self.W = dtype, H, K, V, W
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Standard normal values."""
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(dtype or self.dtype)

    def weights(self, bound: float | None = -5.0) -> DecodeWeights:
        """A layer's parameters, at least in float32."""
        wide, (H, K, V, W) = torch.promote_types(self.dtype, torch.float32), (self.H, self.K, self.V, self.W)
        convolutions = (self.normal(C, W, dtype=wide) for C in (H * K, H * K, H * V))
        gate = KdaGate(self.normal(H, dtype=wide), self.normal(H, K, dtype=wide), bound)
        return DecodeWeights(*convolutions, gate, self.normal(V, dtype=wide), 1e-5)

    def pool(self, slots: int, state: torch.dtype | None = None) -> DecodePool:
        """States and windows."""
        H, K, V, W = self.H, self.K, self.V, self.W
        wide = torch.promote_types(self.dtype, torch.float32)
        windows = (self.normal(slots, C, W) for C in (H * K, H * K, H * V))
        return DecodePool(self.normal(slots, H, K, V, dtype=state or wide), *windows)

    def tokens(self, *rows: int) -> Projected:
        """Projections."""
        H, K, V = self.H, self.K, self.V
        return Projected(*(self.normal(*rows, C) for C in (H * K, H * K, H * V, H * K, H)))

    def gate(self, rows: int) -> Tensor:
        """Output gates."""
        return self.normal(rows, self.H * self.V)


def copy(pool: DecodePool, dtype: torch.dtype | None = None) -> DecodePool:
    """The same values elsewhere."""
    return DecodePool(*(x.to(dtype or x.dtype, copy=True) for x in pool.tensors()))


def wide_tokens(x: Projected) -> Projected:
    """The same values in float64."""
    return Projected(*(y.double() for y in x.tensors()))


def wide_weights(x: DecodeWeights) -> DecodeWeights:
    """The same values in float64."""
    gate = KdaGate(x.gate.A_log_H.double(), x.gate.dt_bias_HK.double(), x.gate.lower_bound)
    return DecodeWeights(*(w.double() for w in x.convolutions()), gate, x.norm_weight_V.double(), x.norm_eps)


def assert_pools(got: DecodePool, want: DecodePool, atol: float = 0.0) -> None:
    """Equal states up to `atol`, and equal windows."""
    torch.testing.assert_close(got.state_SHKV, want.state_SHKV.to(got.state_SHKV.dtype), rtol=0, atol=atol)
    for mine, right in zip(got.tensors()[1:], want.tensors()[1:]):
        assert torch.equal(mine, right.to(mine.dtype))


@contextmanager
def definitions() -> Iterator[None]:
    """Whatever else is tested, the definitions run here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENK3_BACKEND", "reference")
        yield


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The definition, and the kernels in Triton's interpreter."""
    monkeypatch.setenv("OPENK3_BACKEND", request.param)
    return request.param


def test_decoding_is_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its projections a layer does what `decode_kda` does, token after token, and a longer pass the same."""
    monkeypatch.setenv("OPENK3_BACKEND", "reference")
    text: TextConfig = tiny.model().text
    layer = KimiDeltaAttention(text, 0).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    linear, N = text.linear_attn_config, 3
    heads, width, taps = linear.num_heads, linear.head_dim, linear.short_conv_kernel_size
    x_NTD = torch.randn(N, 5, text.hidden_size, generator=generator, dtype=torch.float64)
    whole = layer(x_NTD.flatten(0, 1), Sequences(cu_seqlens([5] * N))).unflatten(0, (N, 5))
    state = torch.zeros(N, heads, width, width, dtype=torch.float64)
    windows = [torch.zeros(N, heads * width, taps, dtype=torch.float64) for _ in range(3)]
    cache, pool = KdaCache(state, windows), DecodePool(state.clone(), *(w.clone() for w in windows))
    convolutions = (layer.q_conv1d.weight, layer.k_conv1d.weight, layer.v_conv1d.weight)
    gate = KdaGate(layer.A_log, layer.dt_bias.view(heads, -1), layer.lower_bound)
    weights = DecodeWeights(*convolutions, gate, layer.o_norm.weight, layer.o_norm.eps)
    with torch.no_grad():
        for t in range(5):
            x = x_NTD[:, t]
            decay_logit = layer.f_b_proj(layer.f_a_proj(x))
            projected = Projected(layer.q_proj(x), layer.k_proj(x), layer.v_proj(x), decay_logit, layer.b_proj(x))
            y = layer.o_proj(decode_kda(projected, layer.g_proj(x), weights, pool, torch.arange(N)))
            stepped = layer(x, Sequences(cu_seqlens([1] * N)), cache)
            cache.commit()
            torch.testing.assert_close(y, stepped, rtol=0, atol=1e-12)
            torch.testing.assert_close(y, whole[:, t], rtol=0, atol=1e-11)
    assert_pools(pool, DecodePool(cache.state_NHKV, *cache.windows), atol=1e-12)


@pytest.mark.parametrize("bound", [-5.0, None])
def test_steps_are_the_recurrence(backend: str, bound: float | None) -> None:
    """`step_kda` and its form on a pool follow the definition; the latter only where a request is."""
    draw, dtype = Draw(torch.float32), torch.float64
    weights, slots = draw.weights(bound), torch.tensor([3, -1, 0])
    pool = draw.pool(4)
    before, wide = pool.state_SHKV.clone(), pool.state_SHKV[[3, 0]].double()
    gate = wide_weights(weights).gate
    for _ in range(3):
        rows = draw.tokens(3)
        q, k, v, logit = (x.unflatten(-1, (2, -1)) for x in rows.tensors()[:4])
        tokens = (q, k, v, logit, rows.beta_logit_TH)
        live = [x[[0, 2]].to(dtype) for x in tokens]
        aside = step_kda(*(x[[0, 2]] for x in tokens), weights.gate, pool.state_SHKV[[3, 0]])
        o = step_kda_in_place(*tokens, gate=weights.gate, state_SHKV=pool.state_SHKV, slot_N=slots)
        want, wide = recurrent_kda(*live, gate, state_NHKV=wide, cu_seqlens=cu_seqlens([1, 1]))
        torch.testing.assert_close(o[[0, 2]].to(dtype), want, rtol=0, atol=2e-5)
        assert torch.equal(aside[0], o[[0, 2]]) and torch.equal(aside[1], pool.state_SHKV[[3, 0]])
        assert not o[1].any()
    torch.testing.assert_close(pool.state_SHKV[[3, 0]].to(dtype), wide, rtol=0, atol=2e-5)
    assert torch.equal(pool.state_SHKV[[1, 2]], before[[1, 2]])


@pytest.mark.parametrize(("K", "V", "W", "bound"), [(16, 32, 4, -5.0), (32, 16, 3, None), (16, 64, 2, -2.0)])
def test_decode_against_float64(backend: str, K: int, V: int, W: int, bound: float | None) -> None:
    """Steps from poisoned surroundings: what no request owns is neither read nor written; outputs of none are zero."""
    draw = Draw(torch.float32, 2, K, V, W=W, seed=K)
    weights, slots = draw.weights(bound), torch.tensor([4, 1, -1], dtype=torch.int32)
    pool = draw.pool(5)
    for x in pool.tensors():
        x[[0, 2, 3]] = torch.nan
    wide = copy(pool, torch.float64)
    for _ in range(3):
        tokens, gate = draw.tokens(3), draw.gate(3)
        for x in (*tokens.tensors(), gate):
            x[2] = torch.nan
        y = decode_kda(tokens, gate, weights, pool, slots)
        with definitions():
            want = decode_kda(wide_tokens(tokens), gate.double(), wide_weights(weights), wide, slots)
        torch.testing.assert_close(y.double(), want, rtol=0, atol=2e-5)
        assert not y[2].any()
    for mine, right in zip(pool.tensors(), wide.tensors()):
        torch.testing.assert_close(mine.double(), right, rtol=0, atol=2e-5, equal_nan=True)


def unit(x: Tensor) -> Tensor:
    """Rows by their length in float64, with what belongs inside the root."""
    return x.double() / (x.double().square().sum(-1, keepdim=True) + 1e-6).sqrt()


def test_rows_that_are_nearly_zero(backend: str) -> None:
    """Rows of q and k of norm 1e-3, given or made by the convolution, weigh as much as what is added inside the root.

    From states of zero a step gives o = (q k) beta v and S = k (beta v)^T.
    """
    draw, slots = Draw(torch.float32), torch.tensor([1, 0])
    weights, pool, tokens, gate = draw.weights(), draw.pool(2), draw.tokens(2), draw.gate(2)
    for x in pool.tensors():
        x.zero_()
    q, k, v, logit = (x.unflatten(-1, (2, -1)) for x in tokens.tensors()[:4])
    q, k = (x / x.norm(dim=2, keepdim=True) * 1e-3 for x in (q, k))
    write = tokens.beta_logit_TH.double().sigmoid()[..., None]
    states = pool.state_SHKV.clone()
    step = (q, k, v, logit, tokens.beta_logit_TH)
    o = step_kda_in_place(*step, gate=weights.gate, state_SHKV=states, slot_N=slots)
    want = (unit(q) * unit(k)).sum(2, keepdim=True) * 16**-0.5 * write * v
    assert (o - want).norm() < 1e-5 * want.norm()
    want = unit(k)[..., None] * (write * v).unsqueeze(2)
    assert (states[[1, 0]] - want).norm() < 1e-5 * want.norm()

    tap = torch.tensor([0.0, 0.0, 0.0, 1.0])
    filters = [tap.expand_as(w).contiguous() for w in weights.convolutions()]
    weights = DecodeWeights(*filters, weights.gate, torch.ones(32), 1.0)
    tokens = Projected(2 * q.flatten(1), 2 * k.flatten(1), *tokens.tensors()[2:])
    q, k, v = (torch.nn.functional.silu(x.double()) for x in (2 * q, 2 * k, v))
    o = (unit(q) * unit(k)).sum(2, keepdim=True) * 16**-0.5 * write * v
    want = (o / (o.square().mean(2, keepdim=True) + 1).sqrt()).flatten(1) * gate.double().sigmoid()
    drafts = verify_kda(tokens, gate, weights, pool, slots, cu_seqlens=torch.tensor([0, 1, 2]))
    assert (drafts - want).norm() < 1e-5 * want.norm()
    assert (decode_kda(tokens, gate, weights, pool, slots) - want).norm() < 1e-5 * want.norm()
    want = unit(k)[..., None] * (write * v).unsqueeze(2)
    assert (pool.state_SHKV[[1, 0]] - want).norm() < 1e-5 * want.norm()


def test_formats(backend: str) -> None:
    """bfloat16 tokens and states are rounded once, when they are stored; rows may be strided."""
    draw = Draw(torch.bfloat16, seed=5)
    weights, slots = draw.weights(), torch.tensor([1, 0])
    for state, tolerance in ((torch.float32, 3e-7), (torch.bfloat16, 2.5e-3)):
        pool = draw.pool(2, state)
        wide = copy(pool, torch.float64)
        joined = draw.normal(2, 2 * (3 * 16 + 2 * 32) + 2)
        *parts, gate = joined.split([32, 32, 64, 32, 2, 64], 1)
        y = decode_kda(Projected(*parts), gate, weights, pool, slots)
        exact = (wide_tokens(Projected(*parts)), gate.double(), wide_weights(weights))
        with definitions():
            want = decode_kda(*exact, wide, slots)
        assert y.dtype == torch.bfloat16 and (y.double() - want).norm() < 2.5e-3 * want.norm()
        wrong = (pool.state_SHKV.double() - wide.state_SHKV).norm()
        assert wrong < tolerance * wide.state_SHKV.norm()
        assert all(torch.equal(x.double(), right) for x, right in zip(pool.tensors()[1:], wide.tensors()[1:]))


def test_decode_beside(backend: str) -> None:
    """With `into` the new states and windows go there, and the old ones stay."""
    draw = Draw(torch.float32)
    weights, pool, slots, gate = draw.weights(), draw.pool(3), torch.tensor([2, 0]), draw.gate(2)
    tokens, old, into = draw.tokens(2), copy(pool), draw.pool(3)
    unused = copy(into)
    y = decode_kda(tokens, gate, weights, pool, slots, into=into)
    assert_pools(pool, old)
    assert torch.equal(decode_kda(tokens, gate, weights, pool, slots), y)
    for new, right, other in zip(into.tensors(), pool.tensors(), unused.tensors()):
        assert torch.equal(new[[0, 2]], right[[0, 2]]) and torch.equal(new[1], other[1])


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
def test_case_D01_drafts(backend: str, state: torch.dtype) -> None:
    """D01: verification gives the bits of steps and writes nothing; replay, from kept or packed rows, gives the state
    of the accepted steps bit for bit; a verification may replay first. Lengths are unequal, one request has no slot."""
    draw = Draw(torch.bfloat16, seed=1)
    lengths, accepted, slots = [3, 0, 5, 1, 2], [2, 0, 5, 0, 1], torch.tensor([5, 1, 0, 3, -1])
    weights, pool = draw.weights(), draw.pool(6, state)
    tokens, gate, kept, bounds = draw.tokens(11), draw.gate(11), draw.tokens(6, 5), cu_seqlens(lengths)
    stored, before = Projected(*(x.clone() for x in kept.tensors())), copy(pool)
    y = verify_kda(tokens, gate, weights, pool, slots, cu_seqlens=bounds, kept=kept)
    assert_pools(pool, before)
    every, chosen = copy(pool), copy(pool)
    for n, (slot, start) in enumerate(zip(slots.tolist(), bounds.tolist())):
        rows = slice(start, start + lengths[n])
        if slot < 0:
            assert not y[rows].any()
            continue
        for store, old, x in zip(kept.tensors(), stored.tensors(), tokens.tensors()):
            assert torch.equal(store[slot, : lengths[n]], x[rows]) and torch.equal(store[slot, 5:], old[slot, 5:])
        for position in range(lengths[n]):
            row = torch.tensor([start + position])
            one = (tokens.rows(row), gate[row], weights)
            assert torch.equal(decode_kda(*one, every, slots[n : n + 1]), y[row])
            if position < accepted[n]:
                decode_kda(*one, chosen, slots[n : n + 1])
    by_rows, by_next, count = copy(pool), copy(pool), torch.tensor(accepted)
    replay_kda(kept, weights, pool, slots, count)
    replay_kda(tokens, weights, by_rows, slots, count, cu_seqlens=bounds)
    assert_pools(pool, chosen)
    assert_pools(by_rows, chosen)
    more, more_gate = draw.tokens(11), draw.gate(11)
    want = verify_kda(more, more_gate, weights, pool, slots, cu_seqlens=bounds)
    options = {"cu_seqlens": bounds, "kept": kept, "accepted_N": count}
    assert torch.equal(verify_kda(more, more_gate, weights, by_next, slots, **options), want)
    assert_pools(by_next, chosen)


def test_no_requests(backend: str) -> None:
    """Nothing to do is done."""
    draw = Draw(torch.float32)
    weights, pool, none, bounds = draw.weights(), draw.pool(2), torch.zeros(0, dtype=torch.int64), torch.zeros(1).int()
    before = copy(pool)
    assert decode_kda(draw.tokens(0), draw.gate(0), weights, pool, none).shape == (0, 64)
    assert verify_kda(draw.tokens(0), draw.gate(0), weights, pool, none, cu_seqlens=bounds).shape == (0, 64)
    replay_kda(draw.tokens(0), weights, pool, none, none, cu_seqlens=bounds)
    assert_pools(pool, before)


def test_wrong_calls(backend: str) -> None:
    """Counts of drafts without the drafts are refused."""
    draw = Draw(torch.float32)
    weights, pool, one = draw.weights(), draw.pool(2), torch.ones(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="kept"):
        bounds = cu_seqlens([1])
        verify_kda(draw.tokens(1), draw.gate(1), weights, pool, one, cu_seqlens=bounds, accepted_N=one)
