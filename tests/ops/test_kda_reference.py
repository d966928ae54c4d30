"""The decay gate, the token recurrence and the decoding step of KDA against golden vectors and their definitions."""

from __future__ import annotations

import math

import pytest
import torch
from kda_checks import GOLDEN_CASES, cu_seqlens, golden_case, kda_inputs, run, run_with_gradients
from op_checks import DTYPES, TOLERANCE, assert_golden, golden_input, golden_output, random

from openk3.ops import KdaGate, chunk_kda, recurrent_kda
from openk3.ops.kda.decode import step_kda
from openk3.ops.kda.reference import kda_gate


@pytest.mark.parametrize("case", ["narrow", "wide"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_golden(case: str, dtype: torch.dtype) -> None:
    """Both gates; the unbounded one may differ by 2e-5, as the stored data says."""
    x, A_log, dt_bias = (golden_input(f"kda_gate.{case}.{name}", dtype) for name in ("x", "A_log", "dt_bias"))
    dt_bias = dt_bias.view(x.shape[1:])
    assert_golden(kda_gate(x, KdaGate(A_log, dt_bias)), f"kda_gate.{case}.lower_bound_-5")
    want = golden_output(f"kda_gate.{case}.softplus_variant").to(dtype)
    torch.testing.assert_close(kda_gate(x, KdaGate(A_log, dt_bias, None)), want, **TOLERANCE[dtype] | {"atol": 2e-5})


@pytest.mark.parametrize("case", GOLDEN_CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_recurrence_golden(case: str, dtype: torch.dtype) -> None:
    """Outputs, final states, log decay and beta of every stored case."""
    inputs, lengths = golden_case(case, dtype)
    o, state = run(recurrent_kda, inputs, lengths)
    assert_golden(o, f"kda.{case}.o")
    assert_golden(state, f"kda.{case}.final_state")
    assert_golden(kda_gate(inputs["decay_logit"], KdaGate(inputs["A_log"], inputs["dt_bias"])), f"kda.{case}.g")
    assert_golden(inputs["beta_logit"].sigmoid(), f"kda.{case}.beta")


@pytest.mark.parametrize("dtype", DTYPES)
def test_step_golden(dtype: torch.dtype) -> None:
    """One token on top of a stored state."""
    inputs, _ = golden_case("decode1", dtype)
    o, state = step(inputs, slice(None), inputs["state"])
    assert_golden(o, "kda.decode1.o")
    assert_golden(state, "kda.decode1.final_state")


def step(inputs: dict[str, torch.Tensor], tokens: slice | list[int], state: torch.Tensor, bound: float | None = -5.0):
    """`step_kda` for the named tokens, one per sequence."""
    q, k, v, z, beta = (inputs[name][tokens] for name in ("q", "k", "v", "decay_logit", "beta_logit"))
    return step_kda(q, k, v, z, beta, KdaGate(inputs["A_log"], inputs["dt_bias"], bound), state)


@pytest.mark.parametrize("bound", [-5.0, -1.25, None])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 130, 1000])
def test_token_by_token(length: int, bound: float | None) -> None:
    """Single steps with carried state, two sequences at once, equal the recurrence and the chunks over each; so do
    chunks of one token; the state given to a step stays as it was."""
    lengths = [length, length]
    inputs = kda_inputs(lengths, seed=length)
    o, final = run(recurrent_kda, inputs, lengths, bound)
    o_chunk, final_chunk = run(chunk_kda, inputs, lengths, bound)
    torch.testing.assert_close(o_chunk, o, rtol=0, atol=1e-11)
    torch.testing.assert_close(final_chunk, final, rtol=0, atol=1e-11)
    state = inputs["state"]
    for t in range(length):
        before = state.clone()
        o_t, after = step(inputs, [t, length + t], state, bound)
        torch.testing.assert_close(o_t, o[[t, length + t]], rtol=0, atol=1e-11)
        if t < 20:
            assert torch.equal(state, before)
            one = {n: x if x.shape[0] != 2 * length else x[[t, length + t]] for n, x in inputs.items()}
            o_one, after_one = run(chunk_kda, one | {"state": state}, [1, 1], bound)
            torch.testing.assert_close(o_one, o_t, rtol=0, atol=1e-11)
            torch.testing.assert_close(after_one, after, rtol=0, atol=1e-11)
        state = after
    torch.testing.assert_close(state, final, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("slope", "z", "want"),
    [
        (1.0, [-4.0, -1.0, 0.0, 1.0, 4.0], [-0.0899, -1.3447, -2.5000, -3.6553, -4.9101]),
        (16.0, [-0.25, -0.0625, 0.0, 0.0625, 0.25], [-0.0899, -1.3447, -2.5000, -3.6553, -4.9101]),
        (16.0, [-4.0, -1.0, 0.0, 1.0, 4.0], [0.0, 0.0, -2.5, -5.0, -5.0]),
    ],
)
@pytest.mark.parametrize("path", ["gate", "recurrence", "chunk", "step"])
def test_case_K06_bounded_gate_is_a_scaled_sigmoid(path: str, slope: float, z: list[float], want: list[float]) -> None:
    """K06: bound * sigmoid(exp(A) * z), not exp(A) * softplus(z) clipped, on every path. With a zero key nothing is
    written, so the log of a state of ones is the log decay that the path used."""
    gate = KdaGate(torch.tensor([math.log(slope)]), torch.zeros(1, len(z)))
    logit = torch.tensor(z)[None, None]
    zeros, ones = torch.zeros(1, 1, len(z)), torch.ones(1, 1, len(z), 2)
    rest = (zeros, zeros, torch.ones(1, 1, 2), logit, torch.ones(1, 1), gate)
    if path == "gate":
        got = kda_gate(logit, gate)[0, 0]
    else:
        ops = {"recurrence": recurrent_kda, "chunk": chunk_kda}
        _, state = step_kda(*rest, ones) if path == "step" else ops[path](*rest, state_NHKV=ones)
        got = state[0, 0, :, 0].log()
    torch.testing.assert_close(got, torch.tensor(want), rtol=0, atol=1e-4)


@pytest.mark.parametrize("bound", [-6.0, -5.001, 0.0, 1.0, math.nan, -math.inf])
def test_case_K04_bound_out_of_range_is_refused(bound: float) -> None:
    """K04: a bound that the tiles cannot hold is an error at once, not an infinity later."""
    with pytest.raises(ValueError, match="lower_bound must be None or in"):
        KdaGate(torch.zeros(1), torch.zeros(1, 1), bound)


def test_a_bound_that_is_text_is_shown_as_such() -> None:
    """ "-5" is not the number that it looks like."""
    with pytest.raises(ValueError, match=r"lower_bound must be None or in \[-5, 0\), got '-5'"):
        KdaGate(torch.zeros(1), torch.zeros(1, 1), "-5")  # pyrefly: ignore[bad-argument-type]


@pytest.mark.parametrize("bound", [-5.0, -0.5, None])
def test_gate_gradient(bound: float | None) -> None:
    """Derivative in the logits and both parameters, through leading dimensions of any number."""
    logit, A_log, dt_bias = (random(*s, seed=i, grad=True) for i, s in enumerate(((4, 2, 3), (2,), (2, 3))))
    assert torch.autograd.gradcheck(lambda z, a, b: kda_gate(z, KdaGate(a, b, bound)), (logit, A_log, dt_bias))
    flat = kda_gate(logit, KdaGate(A_log, dt_bias, bound))
    assert torch.equal(kda_gate(logit.view(2, 2, 2, 3), KdaGate(A_log, dt_bias, bound)).view_as(flat), flat)


def test_unbounded_gate_is_exact_where_softplus_turns_linear() -> None:
    """-exp(A_log) * log(1 + exp(z)) to float64 accuracy on both sides of where a shortcut would set in."""
    logit = torch.linspace(-40, 60, 101, dtype=torch.float64).view(1, 1, -1)
    gate = KdaGate(torch.tensor([0.3], dtype=torch.float64), torch.zeros(1, 101, dtype=torch.float64), None)
    want = -math.exp(0.3) * (logit.clamp_min(0) + torch.log1p(torch.exp(-logit.abs())))
    torch.testing.assert_close(kda_gate(logit, gate), want, rtol=1e-14, atol=0)


def test_gate_saturates_without_nan() -> None:
    """Far out on both sides the gate is the bound or zero, and its gradient zero."""
    logit = torch.tensor([-1e30, -1e4, 1e4, 1e30]).view(1, 1, 4).requires_grad_()
    A_log = torch.zeros(1, requires_grad=True)
    g = kda_gate(logit, KdaGate(A_log, torch.zeros(1, 4)))
    assert g.flatten().tolist() == [0.0, 0.0, -5.0, -5.0]
    d_logit, d_A_log = torch.autograd.grad(g.sum(), (logit, A_log))
    assert d_logit.abs().max() == 0 and d_A_log == 0


def test_number_formats() -> None:
    """bfloat16 tokens: outputs in bfloat16, the state and the gate in float32."""
    inputs = {n: x.bfloat16() if n in "q k v decay_logit beta_logit" else x.float() for n, x in kda_inputs([5]).items()}
    o, state = run(recurrent_kda, inputs)
    exact, exact_state = run(recurrent_kda, {name: x.double() for name, x in inputs.items()})
    assert o.dtype == torch.bfloat16 and state.dtype == torch.float32
    torch.testing.assert_close(o.double(), exact, rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(state.double(), exact_state, rtol=1e-5, atol=2e-6)
    o, state = step(inputs, slice(0, 1), inputs["state"].bfloat16())
    assert o.dtype == torch.bfloat16 and state.dtype == torch.float32


@pytest.mark.parametrize("op", [recurrent_kda, chunk_kda])
def test_bounds_and_states_must_fit_the_tokens(op) -> None:
    """cu_seqlens that ends early, starts late or falls is an error that names the number of tokens; so is a state too
    many."""
    inputs = kda_inputs([5])
    gate = KdaGate(inputs["A_log"], inputs["dt_bias"])
    rest = [inputs[name] for name in ("q", "k", "v", "decay_logit", "beta_logit")]
    with pytest.raises(ValueError, match=r"state_NHKV: expected \[1, 2, 8, 12\] for these tokens, got \[2, 2, 8, 12\]"):
        op(*rest, gate, state_NHKV=torch.zeros(2, 2, 8, 12))
    for bounds in ([0, 4], [1, 5], [0, 3, 2, 5]):
        with pytest.raises(ValueError, match="integers that must rise from 0 to the number of tokens, 5"):
            op(*rest, gate, cu_seqlens=torch.tensor(bounds))
    for given in (torch.tensor([]), torch.tensor([0.0, 5.0]), [0, 5]):
        with pytest.raises(ValueError, match="cu_seqlens: expected integers in a tensor"):
            op(*rest, gate, cu_seqlens=given)
    assert op(*rest, gate, cu_seqlens=cu_seqlens([5]))[0].shape == (5, 2, 12)


WRONG = {
    "batch": ("q", lambda x: x[None], r"q_THK: expected \[tokens, heads, key channels\], got \[1, 5, 2, 8\]"),
    "heads of k": ("k", lambda x: x[:, :1], r"k_THK: \[5, 1, 8\] does not fit q_THK \[5, 2, 8\]"),
    "channels of k": ("k", lambda x: x[..., :4], "k_THK"),
    "length of v": ("v", lambda x: x[:4], r"v_THV: \[4, 2, 12\] .*; expected \[5, 2, value channels\]"),
    "heads of v": ("v", lambda x: x[:, :1], "v_THV"),
    "flat v": ("v", lambda x: x.flatten(1), "v_THV"),
    "heads of logits": ("decay_logit", lambda x: x[:, :1], "decay_logit_THK"),
    "one row of logits": ("decay_logit", lambda x: x[:1], r"decay_logit_THK: .*; expected \[5, 2, 8\]"),
    "beta per channel": ("beta_logit", lambda x: x[..., None], r"beta_logit_TH: .*; expected \[5, 2\]"),
    "padded A_log": ("A_log", lambda x: torch.zeros(128), r"A_log_H must be \[2\] .* got \[128\]"),
    "flat dt_bias": ("dt_bias", lambda x: x.flatten(), r"dt_bias_HK must be \[2, 8\] .* got \[16\]"),
    "one head's dt_bias": ("dt_bias", lambda x: x[:1], "dt_bias_HK"),
    "float32 beside float64": ("k", lambda x: x.float(), "k_THK: torch.float32 beside q_THK torch.float64"),
    "an array": ("q", lambda x: x.numpy(), "q_THK: expected a tensor, got ndarray"),
    "an array of logits": ("decay_logit", lambda x: x.numpy(), "decay_logit_THK: expected a tensor, got ndarray"),
    "a list": ("beta_logit", lambda x: x.tolist(), "beta_logit_TH: expected a tensor, got list"),
    "an array of states": ("state", lambda x: x.numpy(), "state_NHKV: expected a tensor, got ndarray"),
    "no A_log": ("A_log", lambda x: None, "A_log_H: expected a tensor, got NoneType"),
    "integers": ("v", lambda x: x.long(), "v_THV: torch.int64 .* must be floating point, all float64 or none"),
    "integer queries": ("q", lambda x: x.long(), "q_THK: torch.int64 .* must be floating point"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("op", [recurrent_kda, chunk_kda])
def test_operands_that_do_not_fit_are_refused(op, name: str) -> None:
    """Nothing is stretched over heads or tokens, and a batch dimension is not taken for tokens: one clear line."""
    key, change, words = WRONG[name]
    inputs = kda_inputs([5])
    inputs[key] = change(inputs[key])
    with pytest.raises(ValueError, match=words) as error:
        run(op, inputs)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("op", [recurrent_kda, chunk_kda])
def test_a_gate_that_is_none_is_named(op) -> None:
    """None for a gate is no unbounded gate."""
    rest = [kda_inputs([5])[name] for name in ("q", "k", "v", "decay_logit", "beta_logit")]
    with pytest.raises(ValueError, match="gate: expected a KdaGate, got NoneType"):
        op(*rest, None)


@pytest.mark.parametrize("op", [recurrent_kda, chunk_kda])
def test_no_sequences(op) -> None:
    """No sequence of no tokens: empty results of the right shapes and formats, and gradients of nothing."""
    inputs = {name: x.requires_grad_() for name, x in kda_inputs([], dtype=torch.float32).items()}
    for given in (inputs, {name: x for name, x in inputs.items() if name != "state"}):
        o, state = run(op, given, [])
        assert o.shape == (0, 2, 12) and state.shape == (0, 2, 8, 12) and o.dtype == state.dtype == torch.float32
    grads = torch.autograd.grad(o.sum() + state.sum(), inputs["v"], allow_unused=True)
    assert grads[0] is None or grads[0].shape == (0, 2, 12)


@pytest.mark.parametrize("op", [recurrent_kda, chunk_kda])
def test_gate_parameters_of_another_format(op) -> None:
    """float32 parameters beside float64 tokens and the other way round: computed in the tokens' format."""
    inputs = kda_inputs([20])
    narrow = {n: x.float() for n, x in inputs.items()}
    mixed = inputs | {n: narrow[n].requires_grad_() for n in ("A_log", "dt_bias")}
    o, state = run(op, mixed)
    want, _ = run(op, {n: x.double() for n, x in mixed.items()})
    assert o.dtype == state.dtype == torch.float64
    torch.testing.assert_close(o, want, rtol=0, atol=1e-12)
    o.sum().backward()
    assert mixed["A_log"].grad.dtype == torch.float32
    o, state = run(op, {n: x.detach() for n, x in narrow.items()} | {n: inputs[n] for n in ("A_log", "dt_bias")})
    assert o.dtype == state.dtype == torch.float32
    torch.testing.assert_close(o.double(), want, rtol=1e-5, atol=1e-5)


def test_autocast_rounds_nothing() -> None:
    """All arithmetic stays in at least float32, and the chunk form's backward pass runs, inside torch.autocast, too."""
    inputs = kda_inputs([20], dtype=torch.float32)
    want, values = run_with_gradients(chunk_kda, inputs), run(recurrent_kda, inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, got_values = run_with_gradients(chunk_kda, inputs), run(recurrent_kda, inputs)
    for name, expected in want.items():
        assert torch.equal(got[name], expected), name
    assert all(torch.equal(x, y) for x, y in zip(got_values, values))


def test_a_gate_as_steep_as_can_be() -> None:
    """exp(A_log) past float32 pins the gate, whose gradients are then zero and not undefined."""
    inputs = kda_inputs([20], dtype=torch.float32)
    inputs["A_log"].fill_(100)
    got = run_with_gradients(chunk_kda, inputs)
    assert all(x.isfinite().all() for x in got.values())
    assert not got["d_A_log"].any() and not got["d_decay_logit"].any() and got["d_k"].any()
