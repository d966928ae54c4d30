"""Packed causal attention against its definition: ragged, prefixed, tiled, absorbed."""

from __future__ import annotations

import math
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import Watch, random
from torch import Tensor

from openk3.ops.mla import reference
from openk3.ops.mla.reference import absorbed_attention, mla_attention

H, K, V = 3, 5, 4
SCALE = 0.4


def boundaries(lengths: list[int]) -> Tensor:
    """cu_seqlens of sequences of these lengths."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def inputs(num_q: int, num_k: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    """[q, k, v], requiring gradients."""
    shapes = ((num_q, H, K), (num_k, H, K), (num_k, H, V))
    return [random(*shape, seed=seed + i, dtype=dtype, grad=True) for i, shape in enumerate(shapes)]


def by_definition(q: Tensor, k: Tensor, v: Tensor, lens_q: list[int], lens_k: list[int]) -> tuple[Tensor, Tensor]:
    """(output, largest score per head), sequence by sequence with a full score matrix."""
    nothing = 0 * (q.sum() + k.sum() + v.sum())  # keeps an empty result differentiable
    outputs, peak_H = [v.new_zeros(0, H, V) + nothing], v.new_full((H,), float("-inf"))
    for qs, ks, vs in zip(q.split(lens_q), k.split(lens_k), v.split(lens_k)):
        if len(qs):
            scores_HQK = torch.einsum("qhk,shk->hqs", qs, ks) * SCALE
            visible = torch.arange(len(ks)) <= torch.arange(len(ks) - len(qs), len(ks)).unsqueeze(1)
            scores_HQK = scores_HQK.masked_fill(~visible, float("-inf"))
            peak_H = torch.maximum(peak_H, scores_HQK.detach().amax((1, 2)))
            outputs.append(torch.einsum("hqs,shv->qhv", scores_HQK.softmax(-1), vs))
    return torch.cat(outputs), peak_H


def check(lens_q: list[int], lens_k: list[int]) -> None:
    """Values, largest scores and gradients in float64."""
    tensors = inputs(sum(lens_q), sum(lens_k))
    cu_k = None if lens_q == lens_k else boundaries(lens_k)
    got, peak_H = mla_attention(*tensors, boundaries(lens_q), cu_k, scale=SCALE, return_max=True)
    want, want_peak_H = by_definition(*tensors, lens_q, lens_k)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(peak_H, want_peak_H, rtol=1e-12, atol=1e-12)
    assert not peak_H.requires_grad
    upstream = random(*got.shape, seed=9)
    for ours, theirs in zip(*(torch.autograd.grad(x, tensors, upstream) for x in (got, want))):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


LENGTHS = [
    [],
    [0],
    [1],
    [5],
    [128],
    [129],
    [300],
    [0, 7, 0, 1, 0],
    [3] * 50,
    [60, 60, 60],
    [40, 200, 3, 2, 130, 64, 65],
]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_equals_definition(lengths: list[int]) -> None:
    """Empty, short, tile-sized and long sequences, joined or cut into tiles."""
    check(lengths, lengths)


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 70), st.integers(0, 90)), max_size=6))
def test_queries_are_the_last_positions(pairs: list[tuple[int, int]]) -> None:
    """Any number of earlier keys per sequence, also keys without queries."""
    check([new for new, _ in pairs], [new + old for new, old in pairs])


@pytest.mark.parametrize(
    "limits", [{"_KEPT_VALUES": 0}, {"_TILE_VALUES": 300}, {"_TILE_ROWS": 16, "_LONG": 100}], ids=str
)
def test_limits_change_nothing(limits: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputed probabilities, tiles split over heads and rows, smaller tiles: the same result."""
    for name, value in limits.items():
        monkeypatch.setattr(reference, name, value)
    check([70, 3, 150, 5, 5], [80, 3, 150, 9, 5])


def test_gradcheck() -> None:
    """The hand-written gradient is the derivative."""
    cu_q, cu_k = boundaries([3, 2, 4]), boundaries([3, 4, 4])
    assert torch.autograd.gradcheck(lambda *x: mla_attention(*x, cu_q, cu_k, scale=SCALE), inputs(9, 11))


def test_memory_grows_with_length_not_its_square(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores exist for one tile only, and without gradients no probabilities are kept."""
    monkeypatch.setattr(reference, "_TILE_VALUES", 1 << 14)
    monkeypatch.setattr(reference, "_KEPT_VALUES", 0)
    tensors, cu = inputs(1500, 1500), boundaries([1500])
    with Watch() as watch, torch.no_grad():
        mla_attention(*tensors, cu, scale=SCALE)
    assert watch.largest <= max(1 << 14, 1500 * H * K)
    with Watch() as watch:
        mla_attention(*tensors, cu, scale=SCALE).sum().backward()
    assert watch.largest <= max(1 << 14, 1500 * H * K)


def test_what_is_kept_for_the_backward_pass_grows_with_length_too() -> None:
    """Probabilities of short sequences are kept, those of long ones computed again: no T^2 between the passes."""
    for length, kept in ((100, 100 * 100 * H), (2600, 0)):
        tensors = inputs(length, length, torch.float32)
        o_THV = mla_attention(*tensors, boundaries([length]), scale=SCALE)
        assert o_THV.grad_fn is not None
        saved = sum(x.numel() for x in o_THV.grad_fn.saved_tensors)
        assert saved == sum(x.numel() for x in (*tensors, o_THV)) + kept


def test_absorbed_scores_exist_for_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many tokens continue a long sequence, no intermediate passes the limit."""
    monkeypatch.setattr(reference, "_TILE_VALUES", 4 * H * 600)
    q_latent, q_shared = random(100, H, 6), random(100, H, 2)
    with Watch() as watch:
        absorbed_attention(q_latent, q_shared, [random(600, 8)], boundaries([100]), scale=SCALE)
    assert watch.largest <= 4 * H * 600


def test_short_sequences_share_tiles_of_bounded_size() -> None:
    """100 sequences of 15 tokens: a dozen tiles, each no larger than one of a long sequence."""
    tensors, cu = inputs(1500, 1500), boundaries([15] * 100)
    with Watch() as watch, torch.no_grad():
        mla_attention(*tensors, cu, scale=SCALE)
    assert watch.largest <= 128 * 128 * H and watch.calls["_softmax"] == 13


def test_dtypes_and_strides() -> None:
    """bfloat16 inputs give a float32 output close to float64's and bfloat16 gradients; v may be a strided view."""
    narrow = [x.detach().requires_grad_() for x in inputs(40, 40, torch.bfloat16)]
    cu = boundaries([30, 10])
    o_THV = mla_attention(*narrow, cu, scale=SCALE)
    assert o_THV.dtype == torch.float32
    wide = [x.detach().double().requires_grad_() for x in narrow]
    exact_THV, _ = by_definition(*wide, [30, 10], [30, 10])
    torch.testing.assert_close(o_THV.double(), exact_THV, rtol=0, atol=1e-5)
    upstream = random(*o_THV.shape, seed=9, dtype=torch.float32)
    grads = torch.autograd.grad(o_THV, narrow, upstream)
    for got, want in zip(grads, torch.autograd.grad(exact_THV, wide, upstream.double())):
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got.double(), want, rtol=2**-7, atol=1e-4)
    both_THX = random(40, H, K + V, seed=20)
    k_THK, v_THV = both_THX.split([K, V], dim=-1)
    strided = mla_attention(wide[0], k_THK, v_THV, cu, scale=SCALE)
    assert torch.equal(strided, mla_attention(wide[0], k_THK.contiguous(), v_THV.contiguous(), cu, scale=SCALE))


def test_sequences_and_time_are_kept_apart() -> None:
    """Packed equals separate, and nothing before position t sees a change from t on; gradients included."""
    lengths, t = [50, 200, 9], 120
    tensors, cu = inputs(sum(lengths), sum(lengths)), boundaries(lengths)
    whole = mla_attention(*tensors, cu, scale=SCALE)
    parts = zip(*(x.split(lengths) for x in tensors))
    separate = torch.cat([mla_attention(*part, boundaries([len(part[0])]), scale=SCALE) for part in parts])
    torch.testing.assert_close(whole, separate, rtol=1e-12, atol=1e-12)
    changed = [x.detach().clone() for x in tensors]
    for x in changed:
        x[t:250] += 3
    later = mla_attention(*changed, cu, scale=SCALE)
    assert torch.equal(later[:t], whole[:t]) and not torch.allclose(later[t:250], whole[t:250])
    torch.testing.assert_close(later[250:], whole[250:], rtol=1e-12, atol=1e-12)
    for gradient in torch.autograd.grad(whole[50:t].sum(), tensors):
        assert (gradient[:50] == 0).all() and (gradient[t:] == 0).all() and (gradient[50:t] != 0).any()


def test_largest_score() -> None:
    """What QK-Clip reads: the scaled score of one head, causal, -inf without queries."""
    q, k, v = torch.zeros(4, H, K), torch.zeros(4, H, K), torch.zeros(4, H, V)
    q[1, 2, 0], k[1, 2, 0], k[3, 2, 0] = 10.0, 7.0, 1000.0
    _, peak_H = mla_attention(q, k, v, boundaries([4]), scale=SCALE, return_max=True)
    assert peak_H.tolist() == [0, 0, 28]
    _, peak_H = mla_attention(q[:0], k[:0], v[:0], boundaries([0]), scale=SCALE, return_max=True)
    assert peak_H.tolist() == [float("-inf")] * H


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 40)), max_size=4), st.booleans())
def test_absorbed_equals_expanded(pairs: list[tuple[int, int]], small_tiles: bool) -> None:
    """Attention over latents, times the value half, is attention over the expanded keys and values."""
    C, R, content = 6, 2, 3
    lens_q, lens_k = [new for new, _ in pairs], [new + old for new, old in pairs]
    up_HKC, up_HVC = random(H, content, C, seed=1), random(H, V, C, seed=2)
    latents = [random(length, C + R, seed=10 + i) for i, length in enumerate(lens_k)]
    q_content, q_shared = random(sum(lens_q), H, content, seed=3), random(sum(lens_q), H, R, seed=4)
    latent_KC, shared_KR = torch.cat([random(0, C + R), *latents]).split([C, R], dim=-1)
    k_THK = torch.cat((torch.einsum("hkc,tc->thk", up_HKC, latent_KC), shared_KR.unsqueeze(1).expand(-1, H, R)), -1)
    v_THV = torch.einsum("hvc,tc->thv", up_HVC, latent_KC)
    q_THK = torch.cat((q_content, q_shared), -1)
    want = mla_attention(q_THK, k_THK, v_THV, boundaries(lens_q), boundaries(lens_k), scale=SCALE)
    with pytest.MonkeyPatch.context() as patch:
        if small_tiles:
            patch.setattr(reference, "_TILE_VALUES", 2 * H * 40)
        q_latent = torch.einsum("thk,hkc->thc", q_content, up_HKC)
        ctx_THC = absorbed_attention(q_latent, q_shared, latents, boundaries(lens_q), scale=SCALE)
    torch.testing.assert_close(torch.einsum("thc,hvc->thv", ctx_THC, up_HVC), want, rtol=1e-11, atol=1e-11)


def test_absorbed_isolates_sequences() -> None:
    """A cache full of NaN spoils its own sequence only; bfloat16 caches give a float32 result."""
    latents = [random(5, 8, seed=i, dtype=torch.bfloat16) for i in range(3)]
    q_latent, q_shared = random(3, H, 6, seed=5, dtype=torch.bfloat16), random(3, H, 2, seed=6, dtype=torch.bfloat16)
    want = absorbed_attention(q_latent, q_shared, latents, boundaries([1, 1, 1]), scale=SCALE)
    assert want.dtype == torch.float32
    latents[1] = torch.full_like(latents[1], float("nan"))
    got = absorbed_attention(q_latent, q_shared, latents, boundaries([1, 1, 1]), scale=SCALE)
    assert got[1].isnan().all() and torch.equal(got[[0, 2]], want[[0, 2]])


def test_refuses_boundaries_that_do_not_fit() -> None:
    """Wrong totals, more queries than keys, wrong number of sequences."""
    q, k, v = (x.detach() for x in inputs(6, 6))
    for cu_q, cu_k in (([0, 5], None), ([0, 6], [0, 3, 6]), ([0, 6], [0, 5]), ([1, 6], None)):
        with pytest.raises(ValueError, match="do not fit"):
            mla_attention(q, k, v, torch.tensor(cu_q), None if cu_k is None else torch.tensor(cu_k), scale=SCALE)
    with pytest.raises(ValueError, match="sequence 0 has 4 queries for 2 keys"):
        mla_attention(q, k, v, torch.tensor([0, 4, 6]), torch.tensor([0, 2, 6]), scale=SCALE)
    with pytest.raises(ValueError, match="sequence 1 has -2 queries"):
        mla_attention(q, k, v, torch.tensor([0, 5, 3, 6]), scale=SCALE)
    with pytest.raises(ValueError, match="latents: 1 sequences"):
        absorbed_attention(q, q, [k[0]], torch.tensor([0, 3, 6]), scale=SCALE)
    for bounds in ([0, 6], torch.tensor([0.0, 6.0]), torch.tensor([])):
        with pytest.raises(ValueError, match="cu_seqlens_q: expected integers in a tensor"):
            mla_attention(q, k, v, bounds, scale=SCALE)  # pyrefly: ignore[bad-argument-type]
        with pytest.raises(ValueError, match="cu_seqlens_q: expected integers in a tensor"):
            absorbed_attention(q, q, [k[0]], bounds, scale=SCALE)  # pyrefly: ignore[bad-argument-type]
    with pytest.raises(ValueError, match=r"\[0, 1, 2, 3, \.\.\., 6, 7, 8, 9\] \(10 values\)"):
        mla_attention(q, k, v, torch.arange(10), scale=SCALE)


def test_no_sequences() -> None:
    """No sequence of no tokens: empty outputs, and no score."""
    q, k, v = inputs(0, 0)
    o, peak_H = mla_attention(q, k, v, torch.tensor([0]), scale=SCALE, return_max=True)
    assert o.shape == (0, H, V) and peak_H.tolist() == [-math.inf] * H
    o.sum().backward()
    assert q.grad is not None and q.grad.shape == q.shape
    assert absorbed_attention(q, q[..., :2], [], torch.tensor([0]), scale=SCALE).shape == (0, H, K)
