"""Kernels of Attention Residuals in Triton's interpreter, against the definition in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import random
from torch import Tensor

from openk3.config.model import ConfigError
from openk3.ops import attn_res_gluon, attn_res_gradient_gluon, attn_res_narrow_kernel
from openk3.ops.attn_res import inter_block, merge_normed, merge_partial, mix_depth, mix_depth_normed
from openk3.ops.attn_res_fused import obstacle

EPS = 1e-5


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The public calls run the kernels."""
    monkeypatch.setenv("OPENK3_BACKEND", "triton")


def case(L: int, T: int, D: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """[query, norm weight, out weight, addend, source, ...]; sources of very different sizes."""
    vectors = [random(D, seed=s).to(dtype) for s in (1, 2, 3)]
    rows = [(random(T, D, seed=10 + i) * 4.0 ** (i % 4 - 2)).to(dtype) for i in range(L + 1)]
    return [*vectors, *rows]


def results(inputs: list[Tensor], normed: bool, added: bool, kept: bool) -> list[Tensor]:
    """Everything a call returns, and all gradients of a fixed combination of it."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    query, norm_weight, out_weight, addend, *sources = leaves
    if normed:
        found = mix_depth_normed(
            sources, query, norm_weight, out_weight, EPS, addend_TD=addend if added else None, keep_mixed=kept
        )
        assert (found.mixed_TD is not None) == kept
        outputs = [found.normed_TD, *([found.newest_TD] if added else [])]
        outputs += [] if found.mixed_TD is None else [found.mixed_TD]
        probs = found.probs_TL
    else:
        mixed, probs = mix_depth(sources, query, norm_weight, EPS)
        outputs = [mixed]
    factors = [random(*x.shape, seed=40 + n).bfloat16().to(x.dtype) for n, x in enumerate(outputs)]
    wanted = [x for x in leaves if (normed or x is not out_weight) and (added or x is not addend)]
    return [*outputs, probs, *torch.autograd.grad(outputs, wanted, factors)]


def definition(inputs: list[Tensor], *options: bool) -> list[Tensor]:
    """`results` in float64 on the PyTorch path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENK3_BACKEND", "reference")
        return results([x.double() for x in inputs], *options)


@settings(max_examples=6)
@given(
    L=st.sampled_from([1, 2, 3, 5, 9, 16]),
    T=st.sampled_from([1, 2, 7]),
    D=st.sampled_from([5, 16, 40]),
    normed=st.booleans(),
    added=st.booleans(),
    kept=st.booleans(),
)
def test_equals_the_definition(L: int, T: int, D: int, normed: bool, added: bool, kept: bool) -> None:
    """Mixture, norm, sum, weights and every gradient, whatever is asked for; odd widths and numbers of tokens."""
    inputs, options = case(L, T, D), (normed, normed and added, normed and kept)
    for a, b in zip(results(inputs, *options), definition(inputs, *options), strict=True):
        assert a.dtype == torch.float32 and a.shape == b.shape
        torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-5 * max(1.0, float(b.detach().abs().max())))


@pytest.fixture(params=["narrow", "wide"])
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Rows of 16 bits go through the kernels for narrow ones, or through those for all."""
    if request.param == "wide":
        monkeypatch.setattr(attn_res_narrow_kernel, "MOST_WIDTH", 0)
    return request.param


def chain(inputs: list[Tensor], passed: bool) -> list[Tensor]:
    """Three reads of growing sources, with sums before two of them, and all gradients; later reads may take what
    earlier ones pass on.
    """
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    query, norm_weight, out_weight, addend, *sources = leaves
    first = mix_depth_normed(sources[:2], query, norm_weight, out_weight, EPS, addend_TD=addend)
    known = [*first.earlier, first.newest_TD] if passed else [sources[0], sources[1] + addend]
    second = mix_depth_normed([*known, sources[2]], query, norm_weight, out_weight, EPS)
    known = [*second.earlier, second.newest_TD] if passed else [*known, sources[2]]
    third = mix_depth_normed(known, query, norm_weight, out_weight, EPS, addend_TD=sources[3])
    last = [*third.earlier, third.newest_TD] if passed else [*known[:-1], known[-1] + sources[3]]
    mixed, _ = mix_depth(last, query, norm_weight, EPS)
    outputs = [first.normed_TD, second.normed_TD, third.normed_TD, mixed]
    factors = [random(*x.shape, seed=60 + n).bfloat16().to(x.dtype) for n, x in enumerate(outputs)]
    return [*outputs, *torch.autograd.grad(outputs, leaves, factors)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sources_passed_from_read_to_read(dtype: torch.dtype, width: str) -> None:
    """Gradients that sources have from several reads are added up on the way, as autograd would; not less exactly."""
    inputs = case(4, 6, 48, dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENK3_BACKEND", "reference")
        want = chain([x.double() for x in inputs], passed=False)
        same = chain([x.double() for x in inputs], passed=True)
    assert all(torch.equal(a, b) for a, b in zip(want, same, strict=True))
    limit = 1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    for a, b in zip(chain(inputs, passed=True), want, strict=True):
        assert a.dtype == dtype and float((a.double() - b).detach().norm() / b.detach().norm()) < limit


@pytest.mark.parametrize(("dtype", "roundings"), [(torch.bfloat16, 1), (torch.float16, 3)])
def test_half_precision(dtype: torch.dtype, roundings: float, width: str) -> None:
    """As close to float64 as roundings allow: one of most results, three of a norm. In float16 the interpreter cuts
    digits off instead."""
    inputs = case(4, 9, 64, dtype)
    for a, b in zip(results(inputs, True, False, True), definition(inputs, True, False, True), strict=True):
        assert a.dtype == (torch.float32 if a.shape == (9, 4) else dtype)
        assert float((a.double() - b).detach().norm() / b.detach().norm()) < roundings * torch.finfo(dtype).eps


@pytest.mark.parametrize("added", [False, True])
def test_gradients_behind_a_norm_in_bfloat16(added: bool, width: str) -> None:
    """No further from float64 than rounding them is (2^-9 by the root of 3, of values between powers of two), small
    sources beside large ones too. The sum before has to be exact: float64 does not round it."""
    inputs = case(5, 5, 256, torch.bfloat16)
    if added:
        inputs[3] = torch.zeros_like(inputs[3])
    got, want = (run(inputs, True, added, False) for run in (results, definition))
    for a, b in zip(got[2 + added :], want[2 + added :], strict=True):
        assert float((a.double() - b).norm() / b.norm()) < 0.25 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize(("L", "D"), [(2, 300), (8, 384), (10, 512)])
def test_narrow_rows_in_parts(L: int, D: int) -> None:
    """Rows of two and three parts, the last one full or not."""
    inputs = case(L, 3, D, torch.bfloat16)
    for a, b in zip(results(inputs, True, True, True), definition(inputs, True, True, True), strict=True):
        assert float((a.double() - b).detach().norm() / b.detach().norm()) < 2 * torch.finfo(torch.bfloat16).eps


def test_narrow_settings_fit() -> None:
    """Parts cover a row and leave less than one of them idle; warps hold a part; programs fit a multiprocessor."""
    for D in (1, 16, 128, 129, 384, 640, 768, 1000, 1025, 1536, attn_res_narrow_kernel.MOST_WIDTH):
        for L in range(1, attn_res_narrow_kernel.MOST_SOURCES + 1):
            for backward in (False, True):
                constants, options, programs = attn_res_narrow_kernel.settings(D, L, backward=backward)
                columns, threads = constants["PARTS"] * constants["BLOCK"], 32 * options["num_warps"]
                assert constants["PARTS"] <= 3 and columns >= D and columns - D < max(128, columns // 2)
                assert constants["BLOCK"] == constants["NEAR"] * threads
                assert 0 < programs * threads <= 512 or not backward


def test_formats_of_their_own() -> None:
    """Weights in float32 beside sources in bfloat16; sources of two formats; each gradient in its input's format."""
    inputs = case(3, 4, 16, torch.bfloat16)
    inputs[:3] = [x.float() for x in inputs[:3]]
    for a, b in zip(results(inputs, True, True, False), definition(inputs, True, True, False), strict=True):
        assert float((a.double() - b).detach().norm() / b.detach().norm()) < 2e-2
    inputs[4] = inputs[4].float()
    got = results(inputs, True, True, False)
    for a, b in zip(got, definition(inputs, True, True, False), strict=True):
        assert float((a.double() - b).detach().norm() / b.detach().norm()) < 2e-2
    assert [x.dtype for x in got[-3:]] == [torch.float32, torch.bfloat16, torch.bfloat16]


def test_a_query_of_zeros_weighs_all_alike() -> None:
    """Exactly 1 / n, and the mean as the mixture; one source comes back as it is."""
    for L in (1, 2, 3, 6, 9):
        query, norm_weight, _, _, *sources = case(L, 3, 8)
        mixed, probs = mix_depth(sources, torch.zeros_like(query), norm_weight, EPS)
        assert torch.equal(probs, torch.full_like(probs, 1 / L))
        torch.testing.assert_close(mixed, torch.stack(sources).mean(0))
        assert L > 1 or torch.equal(mixed, sources[0])


def test_large_scores() -> None:
    """A softmax of scores in the thousands neither overflows nor loses its gradients."""
    inputs = case(4, 5, 32)
    inputs[0] *= 300
    for a, b in zip(results(inputs, True, False, True), definition(inputs, True, False, True), strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-3 * float(b.detach().abs().max()))


def test_frozen_sources_and_unused_results() -> None:
    """Only what is asked for has a gradient; the others are the same bits as ever; results may go unused."""
    inputs = case(4, 5, 16)
    want = results(inputs, True, True, False)
    query, norm_weight, out_weight, addend, *sources = [x.clone().requires_grad_() for x in inputs]
    sources[1] = sources[1].detach()
    found = mix_depth_normed(sources, query, norm_weight, out_weight, EPS, addend_TD=addend)
    assert not found.probs_TL.requires_grad
    factors = [random(5, 16, seed=40 + n).bfloat16().float() for n in range(2)]
    leaves = [query, norm_weight, out_weight, addend, sources[0], *sources[2:]]
    got = torch.autograd.grad((found.normed_TD, found.newest_TD), leaves, factors, retain_graph=True)
    for a, b in zip(got, [x for n, x in enumerate(want[3:]) if n != 5], strict=True):
        assert torch.equal(a, b)
    only = torch.autograd.grad(found.newest_TD, [addend, sources[-1]], factors[1], retain_graph=True)
    assert torch.equal(only[0], factors[1]) and torch.equal(only[1], factors[1])
    alone = torch.autograd.grad(found.normed_TD, [addend], factors[0])[0]
    torch.testing.assert_close(alone + factors[1], got[3])


def test_every_value_is_written_and_every_run_agrees() -> None:
    """Memory that held NaN before gives the same bits."""
    inputs = case(2, 7, 24)
    want = results(inputs, True, True, True)
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        assert torch.empty(3).isnan().all()
        got = results(inputs, True, True, True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_strided_sources() -> None:
    """Columns of a wider tensor, forward and backward."""
    inputs = case(2, 6, 16)
    wide = torch.cat([inputs[4], inputs[5]], 1)
    got = results([*inputs[:4], wide[:, :16], wide[:, 16:]], True, True, False)
    assert all(torch.equal(a, b) for a, b in zip(got, results(inputs, True, True, False), strict=True))


def test_no_tokens() -> None:
    """Results and gradients of no rows; the weights' gradients are zero."""
    inputs = case(3, 0, 8)
    got = results(inputs, True, True, True)
    assert [tuple(x.shape) for x in got[:4]] == [(0, 8), (0, 8), (0, 8), (0, 3)]
    assert all(torch.equal(x, torch.zeros(8)) for x in got[4:7])
    assert inter_block_of(inputs[4:], torch.ones(2, 8))[0].shape == (2, 0, 8)


def inter_block_of(
    sources: list[Tensor], vectors: Tensor, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Phase one by kernels."""
    with torch.no_grad():
        return inter_block(sources, vectors, EPS, dtype=dtype)


@settings(max_examples=4)
@given(L=st.sampled_from([1, 2, 5]), T=st.sampled_from([1, 16, 21]), D=st.sampled_from([5, 40]), Q=st.integers(1, 18))
def test_two_phases_equal_the_definition(L: int, T: int, D: int, Q: int) -> None:
    """Mixtures, largest scores and sums of phase one; phase two alone, and with the sum before and the norm after."""
    _, _, out_weight, addend, *sources = case(L + 1, T, D)
    *sources, partial = sources
    vectors = random(Q, D, seed=5).float()
    one = inter_block_of(sources, vectors)
    exact = inter_block([x.double() for x in sources], vectors.double(), EPS)
    for a, b in zip(one, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-5)
    q = Q - 1
    row, exact_row = (one[0][q], one[1][q], one[2][q]), (exact[0][q], exact[1][q], exact[2][q])
    with torch.no_grad():
        mixed = merge_partial(*row, partial, vector_D=vectors[q], eps=EPS)
        normed, newest = merge_normed(row, partial, vectors[q], out_weight, eps=EPS, addend_TD=addend)
    want = merge_partial(*exact_row, partial.double(), vector_D=vectors[q].double(), eps=EPS)
    torch.testing.assert_close(mixed.double(), want, rtol=2e-5, atol=2e-5)
    assert torch.equal(newest, partial + addend)
    weight = out_weight.double()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENK3_BACKEND", "reference")
        one = tuple(exact_row), partial.double(), vectors[q].double(), weight
        want, _ = merge_normed(*one, eps=EPS, addend_TD=addend.double())
    torch.testing.assert_close(normed.double(), want, rtol=2e-5, atol=2e-5)


def test_two_phases_in_bfloat16() -> None:
    """Scores lose nothing: vectors are split into three parts. Mixtures may be kept in the sources' format."""
    sources = [x.bfloat16() for x in case(4, 5, 64)[4:]]
    vectors = random(3, 64, seed=5).float()
    exact = inter_block([x.double() for x in sources], vectors.double(), EPS)
    for a, b in zip(inter_block_of(sources, vectors), exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
    short = inter_block_of(sources, vectors, torch.bfloat16)[0]
    assert short.dtype == torch.bfloat16 and torch.equal(short, inter_block_of(sources, vectors)[0].bfloat16())


def test_what_the_kernels_cannot_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than 16 sources, and rows wider than 16384, are mixed by definition: an error where kernels are forced."""
    query, norm_weight, _, _, *sources = case(17, 2, 8)
    with pytest.raises(
        ConfigError, match="attn_res cannot use its kernels here: there are 17 depth sources, more than"
    ):
        mix_depth(sources, query, norm_weight, EPS)
    assert obstacle([torch.empty(1, 16385)]) == "depth sources are 16385 wide, not 1 to 16384"
    monkeypatch.delenv("OPENK3_BACKEND")
    assert mix_depth(sources, query, norm_weight, EPS)[1].shape == (2, 17)


def test_gluon_settings_fit() -> None:
    """Whatever the width, rows of the ring fit a multiprocessor's programs, and all of a token's rows fit the ring."""
    narrowest, widest = attn_res_gluon.WIDTHS
    for D in (narrowest, 264, 512, 520, 1032, 2048, 4096, 5000, widest):
        row = 2 << (D - 1).bit_length()
        for L in range(1, attn_res_gluon.MOST_SOURCES + 1):
            for first, second in ((False, False), (False, True), (True, False), (True, True)):
                constants, how = attn_res_gluon.forward_constants(D, L, first)
                assert constants["STAGES"] >= 2
                assert constants["STAGES"] * (constants["GROUP"] + first) <= how.rows
                _, back = attn_res_gradient_gluon.backward_constants(D, L, 2**L - 1, first, second)
                assert back.rows >= L + 2
                for x in (how, back):
                    assert x.programs * x.warps <= 16 and 1 <= x.options()["maxnreg"] <= 255
                    assert x.programs * (x.rows * row + 1536) <= attn_res_gluon.SHARED
