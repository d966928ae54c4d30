"""Chunkwise KDA: equal to the token recurrence in values, states and gradients, whatever the lengths and the decay."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kda_checks import GOLDEN_CASES, NAMES, assert_same, golden_case, kda_inputs, run, run_with_gradients
from op_checks import DTYPES, Watch, assert_golden
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from openk3.ops import KdaGate, chunk_kda, recurrent_kda
from openk3.ops.kda import chunk
from openk3.ops.kda.reference import kda_gate

BOUNDS = [-5.0, None]


@pytest.mark.parametrize("case", GOLDEN_CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_golden(case: str, dtype: torch.dtype) -> None:
    """Every stored case: decay at either end, zero rows, packed sequences, heads of 128, K != V."""
    inputs, lengths = golden_case(case, dtype)
    o, state = run(chunk_kda, inputs, lengths)
    assert_golden(o, f"kda.{case}.o")
    assert_golden(state, f"kda.{case}.final_state")


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 130, 1000])
def test_equals_recurrence(length: int, bound: float | None) -> None:
    """Outputs, final state and the gradients of all eight inputs in float64, K != V, state in and out."""
    inputs = kda_inputs([length], seed=length)
    want = run_with_gradients(recurrent_kda, inputs, bound=bound)
    assert_same(run_with_gradients(chunk_kda, inputs, bound=bound), want)


@pytest.mark.parametrize("bound", BOUNDS)
def test_packed_sequences(bound: float | None) -> None:
    """Sequences of many lengths in no order, empty ones at both ends and between: as if each were alone; an empty
    one passes its state and its state's gradient through."""
    lengths = [0, 7, 0, 40, 65, 1, 128, 40, 32, 0]
    inputs = kda_inputs(lengths)
    assert_same(
        run_with_gradients(chunk_kda, inputs, lengths, bound), run_with_gradients(recurrent_kda, inputs, lengths, bound)
    )
    _, state = run(chunk_kda, inputs, lengths, bound)
    assert torch.equal(state[[0, 2, 9]], inputs["state"][[0, 2, 9]])


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_no_tokens(lengths: list[int]) -> None:
    """No token at all, or no sequence: states come back, outputs are empty."""
    inputs = kda_inputs(lengths)
    o, state = run(chunk_kda, inputs, lengths)
    assert o.shape == (0, 2, 12) and torch.equal(state, inputs["state"])


def test_without_state_and_bounds() -> None:
    """No state is a state of zeros; no bounds is one sequence."""
    inputs = kda_inputs([37])
    del inputs["state"]
    assert_same(run_with_gradients(chunk_kda, inputs), run_with_gradients(recurrent_kda, inputs))
    zeros = inputs | {"state": torch.zeros(1, 2, 8, 12, dtype=torch.float64)}
    assert torch.equal(run(chunk_kda, inputs)[0], run(chunk_kda, zeros, [37])[0])


@settings(max_examples=12)
@given(cuts=st.lists(st.integers(0, 140), max_size=6), bound=st.sampled_from(BOUNDS), seed=st.integers(0, 99))
def test_any_split_with_carried_state(cuts: list[int], bound: float | None, seed: int) -> None:
    """A sequence in pieces, each piece starting from the last one's state: same values, states and gradients."""
    inputs = kda_inputs([140], seed=seed)
    ends = [*sorted(cuts), 140]

    def in_pieces(*rows: Tensor, state_NHKV: Tensor, cu_seqlens: None) -> tuple[Tensor, Tensor]:
        *tokens, gate = rows
        outputs, start = [], 0
        for end in ends:
            o, state_NHKV = chunk_kda(*(x[start:end] for x in tokens), gate, state_NHKV=state_NHKV)
            outputs.append(o)
            start = end
        return torch.cat(outputs), state_NHKV

    assert_same(run_with_gradients(in_pieces, inputs, bound=bound), run_with_gradients(chunk_kda, inputs, bound=bound))


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("op", [chunk_kda, recurrent_kda])
@pytest.mark.parametrize("t", [0, 14, 31, 32, 50])
def test_causal(t: int, op: Callable[..., tuple[Tensor, Tensor]], bound: float | None) -> None:
    """What comes after position t changes nothing at or before it: neither outputs nor the gradients they send to any
    input, gate parameters and state included; and it gets no gradient from there."""
    inputs = kda_inputs([70])
    changed = {n: torch.cat([x[: t + 1], x[t + 1 :].flip(0) * 2]) if len(x) == 70 else x for n, x in inputs.items()}
    outputs, gradients = [], []
    for values in (inputs, changed):
        leaves = {name: x.clone().requires_grad_() for name, x in values.items()}
        o = run(op, leaves, bound=bound)[0][: t + 1]
        outputs.append(o)
        gradients.append(torch.autograd.grad(o.square().sum(), list(leaves.values())))
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=1e-11)
    for name, before, after in zip(NAMES, *gradients, strict=True):
        torch.testing.assert_close(after, before, rtol=0, atol=1e-11, msg=name)
        assert before.any() and (len(before) != 70 or not before[t + 1 :].any()), name


def pinned(T: int, logit: Tensor, dtype: torch.dtype, **gate: float) -> dict[str, Tensor]:
    """Inputs whose decay logits are the given channels at every token."""
    inputs = kda_inputs([T], H=2, K=16, V=16, dtype=torch.float64)
    inputs |= {"decay_logit": logit.double().expand(T, 2, 16).clone(), "dt_bias": torch.zeros(2, 16).double()}
    inputs["A_log"] = torch.full((2,), gate.get("A_log", 0.0)).double()
    return {name: x.to(dtype) for name, x in inputs.items()}


ONE_CHANNEL = torch.full((16,), -3.0)
ONE_CHANNEL[5] = 1e4
PINNED = {
    "at the bound": torch.full((16,), 1e4),
    "near the bound": torch.full((16,), 7.0),
    "one channel at the bound": ONE_CHANNEL,
    "no decay": torch.full((16,), -1e4),
    "hardly any decay": torch.full((16,), -12.0),
}


@pytest.mark.parametrize("name", PINNED)
@pytest.mark.parametrize("T", [64, 129])
def test_case_K04_strong_decay_keeps_gradients(T: int, name: str) -> None:
    """K04: with log decay pinned at or near -5, in one channel only, or at 0, float32 values and gradients are finite
    and those of the float64 recurrence; 64 tokens at the bound are 320 nats, where exp overflows at 88."""
    want = run_with_gradients(recurrent_kda, pinned(T, PINNED[name], torch.float64))
    assert_same(run_with_gradients(chunk_kda, pinned(T, PINNED[name], torch.float64)), want)
    got = run_with_gradients(chunk_kda, pinned(T, PINNED[name], torch.float32))
    assert_same({key: x.double() for key, x in got.items()}, want, atol=5e-6)


@pytest.mark.parametrize("step", [-6.0, -60.0, -600.0])
@pytest.mark.parametrize("T", [64, 129])
def test_case_K04_unbounded_gate(T: int, step: float) -> None:
    """K04: the unbounded gate may decay by any amount per token, -6 to beyond the range of exp."""
    logit = torch.full((16,), math.log(math.e - 1))  # softplus 1, so the step is -exp(A_log)
    inputs = pinned(T, logit, torch.float32, A_log=math.log(-step))
    gate = KdaGate(inputs["A_log"], inputs["dt_bias"], None)
    torch.testing.assert_close(kda_gate(inputs["decay_logit"], gate), torch.full((T, 2, 16), step))
    want = run_with_gradients(recurrent_kda, {n: x.double() for n, x in inputs.items()}, bound=None)
    got = {key: x.double() for key, x in run_with_gradients(chunk_kda, inputs, bound=None).items()}
    for result in (got, want):
        for name in ("d_decay_logit", "d_A_log", "d_dt_bias"):
            result[name] /= -step * (1 if name == "d_decay_logit" else T)  # of the log decay, per token
    assert_same(got, want, atol=5e-6)


@pytest.mark.parametrize("bound", BOUNDS)
def test_identical_keys(bound: float | None) -> None:
    """All keys equal, beta near 1, hardly any decay: the triangle is as ill-conditioned as it gets and stays exact
    to float32, where inverting it by powers cancels binomially growing terms."""
    inputs = pinned(64, torch.full((16,), -9.0), torch.float64)
    inputs["k"] = inputs["k"][:1].expand_as(inputs["k"]).clone()
    inputs["beta_logit"] = torch.full_like(inputs["beta_logit"], 9.0)
    want = run_with_gradients(recurrent_kda, inputs, bound=bound)
    got = run_with_gradients(chunk_kda, {n: x.float() for n, x in inputs.items()}, bound=bound)
    assert_same({key: x.double() for key, x in got.items()}, want, atol=2e-5)


def test_zero_rows() -> None:
    """Zero queries and keys (a padded token's): zero output rows, finite gradients."""
    inputs = kda_inputs([40], dtype=torch.float32)
    inputs["q"][::3] = 0
    inputs["k"][::2] = 0
    got = run_with_gradients(chunk_kda, inputs)
    assert not got["o"][::3].any()
    assert all(x.isfinite().all() for x in got.values())
    want = run_with_gradients(recurrent_kda, {n: x.double() for n, x in inputs.items()})
    # The L2 norm's slope at zero is 1000: gradients of zero rows are large, and compared at their own size.
    assert_same({key: x.double() for key, x in got.items()}, want, atol=5e-6)


@pytest.mark.parametrize("bound", BOUNDS)
def test_float32_is_as_good_as_the_recurrence(bound: float | None) -> None:
    """Against float64, values and gradients of 300 tokens keep float32 accuracy relative to their largest value."""
    inputs = kda_inputs([300], H=2, K=32, V=32)
    want = run_with_gradients(recurrent_kda, inputs, bound=bound)
    got = run_with_gradients(chunk_kda, {n: x.float() for n, x in inputs.items()}, bound=bound)
    for name, value in want.items():
        assert (got[name] - value).abs().max() < 1e-5 * value.abs().max(), name


def test_bfloat16() -> None:
    """bfloat16 tokens are computed in float32 and rounded once; gradients differ by the rounding of the outputs'."""
    narrow = {n: x.bfloat16() if n in NAMES[:5] else x.float() for n, x in kda_inputs([50]).items()}
    got, want = (run_with_gradients(chunk_kda, x) for x in (narrow, {n: x.float() for n, x in narrow.items()}))
    assert got["o"].dtype == got["d_q"].dtype == torch.bfloat16 and got["final"].dtype == torch.float32
    torch.testing.assert_close(got["o"], want["o"].bfloat16(), rtol=0, atol=0)
    for name in ("d_q", "d_k", "d_v", "d_decay_logit", "d_beta_logit"):
        assert (got[name].float() - want[name]).abs().max() < 2**-7 * want[name].abs().max(), name


def test_gradcheck() -> None:
    """The hand-written backward pass against numerical derivatives, two sequences and a state."""
    inputs = kda_inputs([3, 18], H=1, K=3, V=2)
    leaves = [inputs[name].requires_grad_() for name in NAMES]
    assert torch.autograd.gradcheck(lambda *xs: run(chunk_kda, dict(zip(NAMES, xs)), [3, 18]), leaves)


def test_backward_leaves_things_as_they_were() -> None:
    """Inputs are not written to, and a second backward pass through a kept graph gives the same gradients."""
    inputs = {name: x.requires_grad_() for name, x in kda_inputs([20, 40]).items()}
    copies = {name: x.detach().clone() for name, x in inputs.items()}
    o, state = run(chunk_kda, inputs, [20, 40])
    first, second = (
        torch.autograd.grad((o.sum() + state.sum()), list(inputs.values()), retain_graph=True) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert all(torch.equal(inputs[name], copies[name]) for name in NAMES)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("values", [1, 500, 3000])
def test_blocks(monkeypatch: pytest.MonkeyPatch, values: int, keep: bool) -> None:
    """However few steps are computed at a time, down to one, sequences that end within a block or at its border give
    the same outputs, states and gradients."""
    lengths = [33, 100, 0, 64, 65, 200, 5]
    inputs = kda_inputs(lengths)
    want = run_with_gradients(chunk_kda, inputs, lengths)
    monkeypatch.setattr(chunk, "_BLOCK_VALUES", values)
    if keep:
        assert_same(run_with_gradients(chunk_kda, inputs, lengths), want)
    else:
        o, state = run(chunk_kda, inputs, lengths)
        assert_same({"o": o, "final": state}, {name: want[name] for name in ("o", "final")})


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_chunk_sizes(monkeypatch: pytest.MonkeyPatch, size: int, bound: float | None) -> None:
    """Every chunk size gives the recurrence's values and gradients."""
    monkeypatch.setattr(chunk, "_chunk_size", lambda *shape: size)
    lengths = [33, 100, 0, 130, 5]
    inputs = kda_inputs(lengths)
    assert_same(
        run_with_gradients(chunk_kda, inputs, lengths, bound), run_with_gradients(recurrent_kda, inputs, lengths, bound)
    )


@pytest.mark.parametrize(("width", "size"), [(16, 32), (64, 64)])
def test_chunk_size_by_shape(width: int, size: int) -> None:
    """Short sequences take small chunks, few wide heads large ones; float32 is as good as the recurrence in both."""
    for length, expected in ((16, 16), (17, size), (200, size)):
        assert chunk._chunk_size(length, 2, width) == expected
    inputs = kda_inputs([200], K=width, V=width)
    want = run_with_gradients(recurrent_kda, inputs)
    got = run_with_gradients(chunk_kda, {name: x.float() for name, x in inputs.items()})
    for name, value in want.items():
        assert (got[name] - value).abs().max() < 1e-5 * value.abs().max(), name


def test_strided_inputs() -> None:
    """Slices of wider tensors, transposed states and expanded gradients are as good as contiguous ones."""
    inputs = kda_inputs([20, 40])
    wide = torch.cat([inputs["q"], inputs["k"], inputs["v"], inputs["decay_logit"]], 2)
    slices = dict(zip(("q", "k", "v", "decay_logit"), wide.split([8, 8, 12, 8], 2)))
    slices["state"] = inputs["state"].mT.contiguous().mT
    assert not slices["q"].is_contiguous() and not slices["state"].is_contiguous()
    want = run_with_gradients(chunk_kda, inputs, [20, 40])
    leaves = {name: x.requires_grad_() for name, x in (inputs | slices).items()}
    o, state = run(chunk_kda, leaves, [20, 40])
    assert torch.equal(o, want["o"]) and torch.equal(state, want["final"])
    (grad,) = torch.autograd.grad(o.sum(), leaves["v"])
    ones = torch.autograd.grad(run(chunk_kda, leaves, [20, 40])[0], leaves["v"], torch.ones_like(o))
    assert torch.equal(grad, ones[0])


@pytest.mark.parametrize("bound", BOUNDS)
def test_uninitialised_memory_is_never_read(bound: float | None) -> None:
    """With every fresh tensor filled with NaN the result is the same, padding of ragged chunks included."""
    lengths = [33, 5, 0, 64, 17]
    inputs = kda_inputs(lengths)
    want = run_with_gradients(chunk_kda, inputs, lengths, bound)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(2).isnan().all()
        got = run_with_gradients(chunk_kda, inputs, lengths, bound)
        with torch.no_grad():
            o, state = run(chunk_kda, inputs, lengths, bound)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert torch.equal(o, want["o"]) and torch.equal(state, want["final"])


def test_a_nan_stays_in_its_sequence() -> None:
    """A NaN spoils later tokens of its own sequence and nothing else."""
    inputs = kda_inputs([40, 50])
    inputs["v"][35] = math.nan
    o, state = run(chunk_kda, inputs, [40, 50])
    assert o[35:40].isnan().any() and state[0].isnan().any()
    assert o[:32].isfinite().all() and o[40:].isfinite().all() and state[1].isfinite().all()


def test_sequences_run_side_by_side() -> None:
    """Nine sequences take as many matrix products as one of the longest's length: no loop over sequences or tokens."""
    counts = []
    for lengths in ([96], [96, 64, 96, 31, 5, 77, 96, 1, 40]):
        inputs = kda_inputs(lengths)
        with Watch() as watch:
            run_with_gradients(chunk_kda, inputs, lengths)
        counts.append({name: n for name, n in watch.calls.items() if "bmm" in name or "solve" in name})
    assert counts[0] == counts[1] and counts[0]["bmm"] > 0


@pytest.mark.parametrize(("bound", "most"), [(-5.0, 2.0), (None, 7.2)])
def test_memory_is_linear(bound: float | None, most: float) -> None:
    """No intermediate holds more than a few values per key channel and token: nothing is [T, chunk, K]."""
    inputs = kda_inputs([512], H=2, K=32, V=32, dtype=torch.float32)
    with Watch() as watch:
        run_with_gradients(chunk_kda, inputs, bound=bound)
    assert watch.largest <= most * inputs["k"].numel()


def test_prefill_keeps_no_states() -> None:
    """Without gradients only the states of two steps live, so a long prompt costs no more than its tokens."""
    inputs = kda_inputs([2048], H=1, K=32, V=64, dtype=torch.float32)
    with Watch() as watch:
        o, state = run(chunk_kda, inputs)
    assert watch.largest <= 2 * inputs["v"].numel()
    want, want_state = run(recurrent_kda, {name: x.double() for name, x in inputs.items()})
    torch.testing.assert_close(o.double(), want, rtol=1e-5, atol=5e-6)
    torch.testing.assert_close(state.double(), want_state, rtol=1e-5, atol=5e-6)


def floating_values() -> int:
    """Values in all floating-point memory that is reachable."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) is Tensor and x.is_floating_point()]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() // x.itemsize for x in tensors}.values())


@pytest.mark.parametrize("bound", BOUNDS)
def test_what_is_kept_is_held_by_autograd(bound: float | None) -> None:
    """It is freed once the backward pass has used it, although the outputs live on; recomputation keeps none of it."""
    lengths = [300, 200]
    leaves = {name: x.requires_grad_() for name, x in kda_inputs(lengths, dtype=torch.float32).items()}
    want = torch.autograd.grad(run(chunk_kda, leaves, lengths, bound)[0].sum(), list(leaves.values()))
    before = floating_values()
    o, state = run(chunk_kda, leaves, lengths, bound)
    assert floating_values() - before > 10 * o.numel()
    torch.autograd.grad(o.sum(), list(leaves.values()))
    assert floating_values() - before == o.numel() + state.numel()
    with pytest.raises(RuntimeError, match="second time"):
        state.sum().backward()
    del o, state
    again = checkpoint(lambda: run(chunk_kda, leaves, lengths, bound)[0], use_reentrant=False)
    assert floating_values() - before == again.numel()
    for got, expected in zip(torch.autograd.grad(again.sum(), list(leaves.values())), want, strict=True):
        assert torch.equal(got, expected)
