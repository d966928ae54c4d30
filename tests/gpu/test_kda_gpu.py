"""KDA by kernels on a GPU, at full size: values and gradients against float64, and all that the CPU suite checks."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from kda_checks import cu_seqlens
from kda_kernel_checks import (
    NAMES,
    SUMS,
    Case,
    assert_causal,
    assert_checkpoints,
    assert_deterministic,
    assert_exact,
    assert_extreme_logits,
    assert_reads_no_garbage,
    assert_sequences_are_alone,
    call,
    cotangents,
    errors,
    everything,
    exact,
    kernel_inputs,
    same_bits,
)
from torch import Tensor

from openk3.ops import KdaGate, chunk_kda
from openk3.ops.kda.fused_backward import checkpointed_kda, fused_kda

pytestmark = pytest.mark.gpu
Measured = list[tuple[str, str, dict[str, float]]]
PACKED = (0, 300, 1, 0, 64, 700, 31, 0)


@pytest.fixture(autouse=True)
def give_memory_back() -> Iterator[None]:
    """One test's memory is not the next one's."""
    yield
    torch.cuda.empty_cache()


def random_cases(count: int) -> list[Case]:
    """Lengths, heads, gates and keys of all kinds, T from 1 to 4097 in steps of about the same factor."""
    draw = random.Random(7)
    cases = []
    for number in range(count):
        T = round(math.exp(draw.uniform(0, math.log(4097))))
        cuts = sorted(draw.choices(range(T + 1), k=draw.choice((0, 0, 1, 3, 8, 40))))
        lengths = tuple(b - a for a, b in zip((0, *cuts), (*cuts, T)))
        kind = {"gates": draw.choice(("mixed", "bound", "open", "low")), "keys": draw.choice(("random", "near"))}
        heads = draw.choice((1, 2, 12, 96) if T > 100 else (12, 96))  # errors of a few numbers say little
        cases.append(Case(lengths, H=heads, seed=number, **kind))
    return cases


CASES = [
    *(Case((T,), H=H, seed=T) for T, H in ((1, 96), (33, 12), (1000, 1), (4097, 2), (4097, 96))),
    *(Case(PACKED, H=12, gates=gates, keys=keys) for gates in ("bound", "open", "low") for keys in ("random", "near")),
    *random_cases(13),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients(case: Case, gpu: torch.device, measured: Measured) -> None:
    """Outputs, states and all gradients against float64."""
    measured.append(("ours", str(case), assert_exact(fused_kda, case, gpu)))


def fla_kda(*tokens: Any, state_NHKV: Tensor | None, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """fla-core's chunk form behind our call."""
    from fla.ops.kda import chunk_kda as fla_chunk_kda

    q, k, v, g, beta, gate = (x[None] if isinstance(x, Tensor) else x for x in tokens)
    options = {f"use_{part}_in_kernel": True for part in ("qk_l2norm", "gate", "beta_sigmoid")}
    options |= {"safe_gate": True, "lower_bound": gate.lower_bound, "output_final_state": True}
    options |= {"A_log": gate.A_log_H, "dt_bias": gate.dt_bias_HK.flatten()}
    options |= {"initial_state": state_NHKV, "cu_seqlens": cu_seqlens.long()}
    o, final = fla_chunk_kda(q=q, k=k, v=v, g=g, beta=beta, **options)
    return o[0], final


@pytest.mark.parametrize("peer", ["fla"] if find_spec("fla") else [])
def test_no_less_exact_than_fla(peer: str, gpu: torch.device, measured: Measured) -> None:
    """Where fla-core is installed, no tensor's error is larger than its on the same values, whatever gates and keys.

    Gradients that are nothing but rounding (a gate at its bound has no slope) do not count.
    """
    worse = []
    for case in FLA_CASES:
        values, grads = kernel_inputs(case, gpu), cotangents(case, gpu)
        want = exact(case, values, grads)
        found = {who: errors(everything(op, values, case, grads), want) for who, op in IMPLEMENTATIONS.items()}
        measured += [(who, str(case), of) for who, of in found.items()]
        for name, error in found["ours"].items():
            if error > max(found[peer][name], 1e-5):
                worse.append((str(case), name, error, found[peer][name]))
    assert worse == []


def few_heads(count: int) -> list[Case]:
    """Random lengths and kinds of values for 12 and for 2 heads, by turns."""
    draw = random.Random(23)
    cases = []
    for seed in range(count):
        T = round(math.exp(draw.uniform(math.log(100), math.log(4097))))
        cuts = sorted(draw.choices(range(T + 1), k=draw.choice((0, 1, 3))))
        lengths = tuple(b - a for a, b in zip((0, *cuts), (*cuts, T)))
        kind = {"gates": draw.choice(("mixed", "open", "low")), "keys": draw.choice(("random", "near"))}
        cases += [Case(lengths, H=H, seed=100 + seed, **kind) for H in (12, 2)]
    return cases


FLA_CASES = [
    *(
        Case((1500, 0, 500, 33), H=96, gates=gates, keys=keys, seed=3)
        for gates in ("mixed", "bound", "open", "low")
        for keys in ("random", "near")
    ),
    *few_heads(6),
    *random_cases(13),
    *(Case((T,), H=H, seed=T) for T in (1, 15, 300, 4097) for H in (1, 2)),
]
IMPLEMENTATIONS = {"ours": fused_kda, "fla": fla_kda}


def fresh_seeds(case: Case, count: int = 8) -> list[int]:
    """Seeds that follow from what the case is, so that nobody has chosen them."""
    return random.Random(str(replace(case, seed=0))).sample(range(2**31), count)


@pytest.mark.parametrize("peer", ["fla"] if find_spec("fla") else [])
@pytest.mark.parametrize("case", few_heads(6), ids=str)
def test_sums_of_few_heads_over_draws(case: Case, peer: str, gpu: torch.device, measured: Measured) -> None:
    """Gradients of A_log and dt_bias of few heads: squared errors of eight draws together are at most fla-core's.

    A few sums of values that nearly cancel: in a single draw the one or the other might come nearer by chance. There is
    no floor, and no draw that somebody has seen before choosing it: lengths, gates and keys are those of the comparison
    above, seeds follow from them. The largest quotient of a single draw is printed.
    """
    off = {who: dict.fromkeys(SUMS, 0.0) for who in IMPLEMENTATIONS}
    size, single = dict.fromkeys(SUMS, 0.0), dict.fromkeys(SUMS, 0.0)
    for seed in fresh_seeds(case):
        drawn = replace(case, seed=seed)
        values, grads = kernel_inputs(drawn, gpu), cotangents(drawn, gpu)
        want = exact(drawn, values, grads)
        for name in SUMS:
            size[name] += float(want[name].double().square().sum())
        found = {who: everything(op, values, drawn, grads) for who, op in IMPLEMENTATIONS.items()}
        for name in SUMS:
            squares = {
                who: float((got[name].double() - want[name].double()).square().sum()) for who, got in found.items()
            }
            single[name] = max(single[name], math.sqrt(squares["ours"] / squares[peer]))
            for who, square in squares.items():
                off[who][name] += square
    pooled = {who: {name: math.sqrt(of[name] / size[name]) for name in SUMS} for who, of in off.items()}
    measured += [(who, f"{case} over draws", of) for who, of in pooled.items()]
    print(f"{case}: largest quotient of a draw {single}")
    assert all(pooled["ours"][name] <= pooled[peer][name] for name in SUMS), pooled


TWINS = [
    Case((2049,), H=96),
    Case((20000,), H=2),
    Case(PACKED, 12, keys="near"),
    Case(PACKED, 12, gates="open", keys="near"),
]


@pytest.mark.parametrize("case", TWINS, ids=str)
def test_triton_twins(case: Case, gpu: torch.device, measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs on GPUs other than Hopper, here: to the same limits, and the same bits in two runs."""
    monkeypatch.setenv("OPENK3_GLUON", "0")
    measured.append(("twins", str(case), assert_exact(fused_kda, case, gpu)))
    assert_deterministic(fused_kda, case, gpu)


LONG = [Case((32768, 100, 0), H=1), Case((16384, 100, 0), H=12), Case((8192,), H=24)]


@pytest.mark.parametrize("case", LONG, ids=str)
def test_long_sequences(case: Case, gpu: torch.device, measured: Measured) -> None:
    """Sequences long enough to be cut among the multiprocessors: few heads that keep more, and those that do not."""
    measured.append(("ours", str(case), assert_exact(fused_kda, case, gpu)))


@pytest.mark.parametrize(("K", "V"), [(128, 64), (64, 128), (32, 16)])
def test_widths(K: int, V: int, gpu: torch.device, measured: Measured) -> None:
    """Heads of other widths."""
    case = Case((200, 0, 90), H=3, K=K, V=V)
    measured.append(("ours", str(case), assert_exact(fused_kda, case, gpu)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("gates", ["mixed", "bound"])
def test_formats(gates: str, dtype: torch.dtype, gpu: torch.device, measured: Measured) -> None:
    """float32 tokens are computed in float32 throughout, float16 ones as bfloat16 ones are."""
    case = Case(PACKED, H=2, gates=gates, dtype=dtype)
    measured.append(("ours", str(case), assert_exact(fused_kda, case, gpu)))


@pytest.mark.parametrize(("T", "H"), [(300, 96), (20000, 2), (5000, 12)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_causal(T: int, H: int, dtype: torch.dtype, gpu: torch.device) -> None:
    """No bit of an output depends on later tokens, whether the sequence is cut among multiprocessors or not."""
    draw = random.Random(T)
    first_H = [T - 1, T // 2, *draw.choices(range(1, T), k=96)][:H]
    assert_causal(fused_kda, Case((T,), H=H, dtype=dtype), first_H, gpu)


@pytest.mark.parametrize("gluon", ["1", "0"])
def test_extreme_logits(gluon: str, gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gates and betas that are off or on entirely, rows of zeros."""
    monkeypatch.setenv("OPENK3_GLUON", gluon)
    assert_extreme_logits(fused_kda, Case(PACKED, H=12), gpu)


@pytest.mark.parametrize("case", [Case((4097,), H=12), Case((20000,), H=1), Case(PACKED, H=96)], ids=str)
def test_deterministic(case: Case, gpu: torch.device) -> None:
    """Two runs give the same bits."""
    assert_deterministic(fused_kda, case, gpu)


@pytest.mark.parametrize("case", [Case((65536,), H=12, gates="open"), Case((8192,), H=24, gates="open")], ids=str)
def test_parts_in_any_order(case: Case, gpu: torch.device) -> None:
    """More parts than multiprocessors, and other work beside them: the bits stay the same."""
    values, grads = kernel_inputs(case, gpu), cotangents(case, gpu)
    first = everything(fused_kda, values, case, grads)
    beside, x = torch.cuda.Stream(gpu), torch.randn(4096, 4096, device=gpu)
    for _ in range(4):
        with torch.cuda.stream(beside):
            for _ in range(20):
                x = (x @ x).clamp(-1, 1)
        assert same_bits(first, everything(fused_kda, values, case, grads)) == []
    torch.cuda.synchronize()


def test_captured_calls_keep_their_tables(gpu: torch.device) -> None:
    """A graph replays right after a hundred other lengths; lengths that are new while it is captured are refused."""
    case = Case((700, 0, 333), H=2)
    values = kernel_inputs(case, gpu)
    bounds = torch.tensor([0, 700, 700, 1033], device=gpu)
    gate = KdaGate(values["A_log"], values["dt_bias"])
    tokens = [values[name] for name in ("q", "k", "v", "decay_logit", "beta_logit")]

    def op() -> torch.Tensor:
        return fused_kda(*tokens, gate, state_NHKV=values["state"], cu_seqlens=bounds)[0]

    with torch.no_grad():
        want = op().clone()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o = op()
        for length in range(1, 101):
            fused_kda(*(x[:length] for x in tokens), gate)
        filler = [torch.full((2**size,), -1, dtype=torch.int32, device=gpu) for size in range(4, 16) for _ in range(64)]
        graph.replay()
        torch.cuda.synchronize()
        assert filler and torch.equal(o, want)
        capture = torch.cuda.graph(torch.cuda.CUDAGraph())
        with pytest.raises(RuntimeError, match="run the same call once before the capture"), capture:
            fused_kda(*(x[:801] for x in tokens), gate)


def poison(gpu: torch.device) -> None:
    """Leave NaN in the memory that the next tensors will be given, from whole gigabytes to a few hundred bytes."""
    torch.cuda.empty_cache()
    tensors = [torch.full((2**29,), torch.nan, device=gpu) for _ in range(4)]
    tensors += [torch.full((2**size,), torch.nan, device=gpu) for size in (17, 14, 11, 8) for _ in range(2048)]
    del tensors
    fresh = [torch.empty(2**size, device=gpu) for size in (26, 24, 22, 17, 14, 10, 7) for _ in range(8)]
    assert sum(bool(x.isnan().all()) for x in fresh) > len(fresh) // 2


@pytest.mark.parametrize("case", [Case((4000, 97), H=12), Case((20000,), H=1), Case(PACKED, H=2)], ids=str)
def test_memory_that_nobody_wrote_is_never_read(case: Case, gpu: torch.device) -> None:
    """With NaN in all unused memory, and in every fresh tensor, the bits are the same."""
    clean = {
        name: x.cpu()
        for name, x in everything(fused_kda, kernel_inputs(case, gpu), case, cotangents(case, gpu)).items()
    }
    poison(gpu)
    got = everything(fused_kda, kernel_inputs(case, gpu), case, cotangents(case, gpu))
    assert same_bits(clean, {name: x.cpu() for name, x in got.items()}) == []
    assert_reads_no_garbage(fused_kda, case, gpu)


def test_a_nan_stays_in_its_sequence(gpu: torch.device) -> None:
    """A NaN spoils its own sequence and nothing else."""
    assert_sequences_are_alone(fused_kda, Case(PACKED, H=12), gpu)


@pytest.mark.parametrize("case", [Case((500, 0, 300), H=12), Case((20000,), H=1)], ids=str)
def test_checkpoints(case: Case, gpu: torch.device) -> None:
    """States at positions in the middle and at the ends of sequences, cut among multiprocessors or not."""
    assert_checkpoints(checkpointed_kda, case, (1, 32, 100, 500, 501, 511, 797, 800), gpu)


def test_the_model_uses_the_kernels(gpu: torch.device) -> None:
    """`chunk_kda` on a GPU is the kernels' result, bit for bit; in float64 it is the definition's."""
    case = Case(PACKED, H=2)
    values, grads = kernel_inputs(case, gpu), cotangents(case, gpu)
    assert same_bits(everything(chunk_kda, values, case, grads), everything(fused_kda, values, case, grads)) == []


def test_case_K02_a_more_than_2_to_the_31_values(gpu: torch.device) -> None:
    """K02 a: zeros but for the last 64 of 174,800 tokens of 96 heads give what these 64 give alone, gradients too."""
    T, case = 174_800, Case((64,), H=96, state=False)
    assert T * 96 * 128 > 2**31
    last, grads = kernel_inputs(case, gpu), cotangents(case, gpu)
    tokens = {name: last[name].new_zeros(T, *last[name].shape[1:]) for name in NAMES[:5]}
    for name in tokens:
        tokens[name][-64:] = last[name]
    d_o = torch.zeros_like(tokens["v"])
    d_o[-64:] = grads[0]
    whole = everything(fused_kda, last | tokens, replace(case, lengths=(T,)), (d_o, grads[1]))
    want = exact(case, last, grads)
    assert not whole["o"][:-64].any()
    assert not whole["d_v"][:1000].any() and bool(whole["d_k"].isfinite().all())
    for name in ("o", *(f"d_{name}" for name in NAMES[:5])):
        whole[name] = whole[name][-64:]
    found = errors({name: whole[name] for name in want if name not in SUMS}, want)
    assert {name: error for name, error in found.items() if error > case.limits[name]} == {}


def test_case_K02_b_more_than_65535_sequences_and_heads(gpu: torch.device, measured: Measured) -> None:
    """K02 b: 700 sequences of one token and 96 heads, each with a state of its own."""
    case = Case((1,) * 700, H=96)
    measured.append(("ours", str(case), assert_exact(fused_kda, case, gpu)))


def test_nothing_at_all(gpu: torch.device) -> None:
    """No token and no sequence."""
    for lengths in ((), (0,), (0, 0)):
        case = Case(lengths, H=2)
        values = kernel_inputs(case, gpu)
        got = everything(fused_kda, values, case, cotangents(case, gpu))
        assert got["o"].shape == (0, 2, 128) and torch.equal(got["final"], values["state"])


def test_inputs_of_any_layout(gpu: torch.device) -> None:
    """Slices of wider tensors, transposed states and expanded gradients give the bits of contiguous ones."""
    case = Case((100, 50), H=2)
    values, (d_o, d_final) = kernel_inputs(case, gpu), cotangents(case, gpu)
    want = everything(fused_kda, values, case, (d_o[:1].expand_as(d_o).contiguous(), d_final))
    wide = torch.cat([values["q"], values["k"], values["v"], values["decay_logit"]], 2)
    slices: dict[str, Any] = dict(zip(("q", "k", "v", "decay_logit"), wide.split(128, 2)))
    slices["state"] = values["state"].mT.contiguous().mT
    leaves = {name: x.requires_grad_() for name, x in (values | slices).items()}
    o, final = call(fused_kda, leaves, case)
    found = torch.autograd.grad((o, final), list(leaves.values()), (d_o[:1].expand_as(d_o), d_final.mT.contiguous().mT))
    assert same_bits({"o": o, "final": final} | {f"d_{n}": x for n, x in zip(leaves, found)}, want) == []


def test_inputs_at_any_address(gpu: torch.device) -> None:
    """Contiguous tensors whose memory begins at an address that 16 does not divide, within the same limits."""
    case = Case((100, 50), H=2)
    values, grads = kernel_inputs(case, gpu), cotangents(case, gpu)

    def moved(x: Tensor) -> Tensor:
        return torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)

    leaves = {name: moved(x).requires_grad_() for name, x in values.items()}
    assert all(x.data_ptr() % 16 and x.is_contiguous() for x in leaves.values())
    o, final = call(fused_kda, leaves, case)
    found = torch.autograd.grad((o, final), list(leaves.values()), (moved(grads[0]), moved(grads[1])))
    got = {"o": o.detach(), "final": final.detach()} | {f"d_{name}": x for name, x in zip(leaves, found)}
    wrong = {name: e for name, e in errors(got, exact(case, values, grads)).items() if e > case.limits[name]}
    assert wrong == {}


def test_no_bounds_and_no_gradient(gpu: torch.device) -> None:
    """Without bounds there is one sequence; without gradients the outputs are the same bits."""
    case = Case((700,), H=2, state=False)
    values = kernel_inputs(case, gpu)
    want = everything(fused_kda, values, case, cotangents(case, gpu))
    q, k, v, z, beta, A_log, dt_bias = (values[name] for name in NAMES[:-1])
    with torch.no_grad():
        o, final = fused_kda(q, k, v, z, beta, KdaGate(A_log, dt_bias))
        again = fused_kda(q, k, v, z, beta, KdaGate(A_log, dt_bias), cu_seqlens=cu_seqlens([700]))  # bounds on the CPU
    assert same_bits({"o": o, "final": final}, want) == [] and torch.equal(again[0], o)


def test_rows_that_are_nearly_zero(gpu: torch.device, measured: Measured) -> None:
    """Rows of q and k of norm 1e-3 weigh as much as what is added inside the root: tenfold of it would be seen."""
    case = Case((1000,), H=12, seed=5)
    values, grads = kernel_inputs(case, gpu), cotangents(case, gpu)
    for name in ("q", "k"):
        values[name] = values[name] / values[name].float().norm(dim=2, keepdim=True).to(case.dtype) * 1e-3
    found = errors(everything(fused_kda, values, case, grads), exact(case, values, grads))
    measured.append(("ours", f"{case} nearly zero", found))
    assert {name: error for name, error in found.items() if error > 2 * case.limits[name]} == {}, found
