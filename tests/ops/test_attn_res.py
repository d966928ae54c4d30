"""Attention Residuals against golden vectors, the definition, and its two-phase form."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import DTYPES, assert_golden, golden_input, golden_output, random
from torch import Tensor

from openk3.ops.attn_res import inter_block, merge_partial, mix_depth

EPS = 1e-5


def by_definition(sources: list[Tensor], query_D: Tensor, norm_weight_D: Tensor) -> tuple[Tensor, Tensor]:
    """Report eqs. 8-10, on one stacked tensor."""
    values_TLD = torch.stack(sources, 1)
    keys_TLD = values_TLD / (values_TLD.square().mean(-1, keepdim=True) + EPS).sqrt()
    probs_TL = (keys_TLD * (norm_weight_D * query_D)).sum(-1).softmax(-1)
    return (probs_TL.unsqueeze(-1) * values_TLD).sum(1), probs_TL


def case(num_sources: int, tokens: int = 7, width: int = 12, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """[query, norm weight, source, ...], all requiring gradients; sources of very different sizes."""
    vectors = [random(width, seed=s, dtype=dtype) for s in (1, 2)]
    sources = [random(tokens, width, seed=10 + i, dtype=dtype) * 4.0 ** (i % 4 - 2) for i in range(num_sources)]
    return [x.requires_grad_() for x in (*vectors, *sources)]


@pytest.mark.parametrize("blocks", [0, 1, 3, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_golden(dtype: torch.dtype, blocks: int) -> None:
    """Mixed values and weights, sources in order: blocks, then the running sum."""
    name = f"attn_res.{blocks}"
    sources = [*golden_input(f"{name}.blocks", dtype).unbind(1), golden_input(f"{name}.prefix", dtype)]
    query_D, norm_weight_D = golden_input(f"{name}.proj_weight", dtype)[0], golden_input(f"{name}.norm_weight", dtype)
    mixed_TD, probs_TL = mix_depth(sources, query_D, norm_weight_D, EPS)
    assert_golden(mixed_TD, f"{name}.out")
    assert_golden(probs_TL, f"{name}.probs")


def test_golden_bfloat16() -> None:
    """Everything inside in float32 and one cast at the end: within one rounding of the stored result."""
    name, dtype = "attn_res.3", torch.bfloat16
    sources = [*golden_input(f"{name}.blocks", dtype).unbind(1), golden_input(f"{name}.prefix", dtype)]
    query_D, norm_weight_D = golden_input(f"{name}.proj_weight", dtype)[0], golden_input(f"{name}.norm_weight", dtype)
    mixed_TD, probs_TL = mix_depth(sources, query_D, norm_weight_D, EPS)
    assert mixed_TD.dtype == dtype and probs_TL.dtype == torch.float32
    torch.testing.assert_close(mixed_TD, golden_output(f"{name}.bf16_out"), rtol=2**-8, atol=0)


@pytest.mark.parametrize("num_sources", [1, 2, 5, 19])
def test_equals_definition_with_gradients(num_sources: int) -> None:
    """Values, weights and every gradient, in float64."""
    inputs = case(num_sources)
    got, probs_TL = mix_depth(inputs[2:], *inputs[:2], EPS)
    want, want_probs_TL = by_definition(inputs[2:], *inputs[:2])
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(probs_TL, want_probs_TL.detach(), rtol=1e-12, atol=1e-12)
    upstream = random(*got.shape, seed=3)
    for ours, theirs in zip(*(torch.autograd.grad(x, inputs, upstream) for x in (got, want))):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


def test_gradcheck() -> None:
    """The hand-written gradient is the derivative."""
    assert torch.autograd.gradcheck(lambda *x: mix_depth(x[2:], x[0], x[1], EPS)[0], case(3, tokens=3, width=5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_gradients(dtype: torch.dtype) -> None:
    """Gradients have each input's dtype and agree with float64 to its precision."""
    inputs = case(4, tokens=9, width=32, dtype=dtype)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    upstream = random(9, 32, seed=3, dtype=dtype)
    ours = torch.autograd.grad(mix_depth(inputs[2:], *inputs[:2], EPS)[0], inputs, upstream)
    theirs = torch.autograd.grad(by_definition(exact[2:], *exact[:2])[0], exact, upstream.double())
    for narrow, wide in zip(ours, theirs):
        assert narrow.dtype == dtype
        error = (narrow.double() - wide).abs().max() / wide.abs().max()
        assert error < 32 * torch.finfo(dtype).eps


@pytest.mark.parametrize("num_sources", range(1, 10))
def test_zero_query_is_uniform(num_sources: int) -> None:
    """E04, one read: a query of zeros weighs n sources by exactly 1/n and still gets a gradient."""
    inputs = case(num_sources, dtype=torch.float32)
    query_D = torch.zeros_like(inputs[0]).requires_grad_()
    mixed_TD, probs_TL = mix_depth(inputs[2:], query_D, inputs[1], EPS)
    assert torch.equal(probs_TL, torch.full_like(probs_TL, 1 / num_sources))
    (gradient_D,) = torch.autograd.grad(mixed_TD.sum(), query_D)
    assert (gradient_D != 0).all() == (num_sources > 1)


def test_weights_ignore_the_size_of_a_source() -> None:
    """E04: a source times 1000 keeps its weight (up to eps), and its raw value counts 1000 times."""
    inputs = [x.detach() for x in case(3)]
    inputs[2:] = [x / x.square().mean(-1, keepdim=True).sqrt() for x in inputs[2:]]
    _, probs_TL = mix_depth(inputs[2:], *inputs[:2], EPS)
    inputs[3] = inputs[3] * 1000
    mixed_TD, scaled_TL = mix_depth(inputs[2:], *inputs[:2], EPS)
    torch.testing.assert_close(scaled_TL, probs_TL, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mixed_TD, by_definition(inputs[2:], *inputs[:2])[0], rtol=1e-12, atol=1e-12)


def test_frozen_sources_and_unused_result() -> None:
    """A source without gradient gets none; nothing to differentiate gives nothing."""
    inputs = case(3)
    inputs[2] = inputs[2].detach()
    mixed_TD, probs_TL = mix_depth(inputs[2:], *inputs[:2], EPS)
    assert not probs_TL.requires_grad
    mixed_TD.sum().backward()
    assert inputs[2].grad is None and all(x.grad is not None for x in (*inputs[:2], *inputs[3:]))


def test_memory() -> None:
    """Kept for the backward pass: the sources themselves and two numbers per token and source."""
    inputs = case(4, tokens=50, width=64)
    mixed_TD, _ = mix_depth(inputs[2:], *inputs[:2], EPS)
    assert mixed_TD.grad_fn is not None
    shared = {x.data_ptr() for x in inputs[2:]}
    extra = sum(x.numel() for x in mixed_TD.grad_fn.saved_tensors if x.data_ptr() not in shared)
    assert extra == 64 + 2 * 50 * 4


@settings(max_examples=40)
@given(
    num_blocks=st.integers(1, 9),
    num_queries=st.integers(1, 5),
    tokens=st.integers(0, 4),
    spread=st.floats(0, 40),
    seed=st.integers(0, 99),
)
def test_two_phases_equal_one(num_blocks: int, num_queries: int, tokens: int, spread: float, seed: int) -> None:
    """Blocks for many queries at once, then each running sum: the same as one softmax over all sources."""
    width = 6
    blocks = [random(tokens, width, seed=seed + i) * (i + 1) for i in range(num_blocks)]
    vectors_QD = random(num_queries, width, seed=seed + 50) * spread
    o_QTD, max_QT, sum_QT = inter_block(blocks, vectors_QD, EPS)
    for q, vector_D in enumerate(vectors_QD):
        partial_TD = random(tokens, width, seed=seed + 60 + q) * 3
        merged_TD = merge_partial(o_QTD[q], max_QT[q], sum_QT[q], partial_TD, vector_D=vector_D, eps=EPS)
        whole_TD, _ = mix_depth([*blocks, partial_TD], vector_D, torch.ones(width, dtype=torch.float64), EPS)
        torch.testing.assert_close(merged_TD, whole_TD, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sizes", [(300.0, 1.0), (1.0, 300.0), (300.0, 300.0), (-300.0, -300.0)], ids=str)
def test_two_phases_with_scores_beyond_the_range_of_exp(sizes: tuple[float, float]) -> None:
    """float32 scores of hundreds, in the blocks, in the running sum, in both, or far below zero: the same softmax."""
    vector_D = torch.ones(8)
    blocks = [random(5, 8, seed=i, dtype=torch.float32) + sizes[0] * (i + 1) for i in range(2)]
    partial_TD = random(5, 8, seed=7, dtype=torch.float32) + sizes[1]
    for scale in (1.0, 100.0):
        one = inter_block(blocks, scale * vector_D.unsqueeze(0), EPS)
        merged_TD = merge_partial(*(x[0] for x in one), partial_TD, vector_D=scale * vector_D, eps=EPS)
        whole_TD, _ = mix_depth([*blocks, partial_TD], scale * vector_D, torch.ones(8), EPS)
        assert merged_TD.isfinite().all()
        torch.testing.assert_close(merged_TD, whole_TD, rtol=1e-3, atol=1e-3)


def test_two_phases_in_bfloat16() -> None:
    """Phase one stays in float32; phase two ends in the model's dtype."""
    blocks = [random(5, 16, seed=i, dtype=torch.bfloat16) for i in range(3)]
    vector_D = random(16, seed=9, dtype=torch.float32)
    o_QTD, max_QT, sum_QT = inter_block(blocks[:2], vector_D.unsqueeze(0), EPS)
    assert o_QTD.dtype == max_QT.dtype == sum_QT.dtype == torch.float32
    merged_TD = merge_partial(o_QTD[0], max_QT[0], sum_QT[0], blocks[2], vector_D=vector_D, eps=EPS)
    whole_TD, _ = mix_depth(blocks, vector_D, torch.ones(16), EPS)
    torch.testing.assert_close(merged_TD, whole_TD, rtol=2**-8, atol=0)


def test_edges() -> None:
    """No tokens; one source is returned as it is; no source is refused."""
    ones_D = torch.ones(4)
    mixed_TD, probs_TL = mix_depth([torch.empty(0, 4)] * 3, ones_D, ones_D, EPS)
    assert mixed_TD.shape == (0, 4) and probs_TL.shape == (0, 3)
    only_TD = random(3, 4, dtype=torch.float32)
    assert torch.equal(mix_depth([only_TD], ones_D, ones_D, EPS)[0], only_TD)
    with pytest.raises(ValueError, match="at least one"):
        mix_depth([], ones_D, ones_D, EPS)
