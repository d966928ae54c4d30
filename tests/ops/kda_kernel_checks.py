"""What must hold of every implementation of Kimi Delta Attention by kernels, on any device and at any size.

The judge is the chunk form in float64, on the same inputs: what is rounded to bfloat16 is rounded before both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from kda_checks import NAMES, cu_seqlens
from torch import Tensor

from openk3.ops import KdaGate, chunk_kda

Op = Callable[..., tuple[Tensor, Tensor]]
ARGUMENTS = NAMES[:-1]
SUMS = ("d_A_log", "d_dt_bias")  # over all tokens
# Most that bfloat16 products, states and outputs may cost, by the tensors' norms: about 1.5 times the largest errors of
# the kernels at real widths (docs/kda.md). One rounding costs 1.7e-3. A_log has few numbers, sums of many that cancel.
BFLOAT16 = {
    "o": 4.5e-3,
    "final": 4e-3,
    "d_q": 4.3e-3,
    "d_k": 4.8e-3,
    "d_v": 3.6e-3,
    "d_decay_logit": 5.5e-3,
    "d_beta_logit": 4.5e-3,
    "d_A_log": 1.5e-2,
    "d_dt_bias": 4e-3,
    "d_state": 3e-3,
}
# Nothing is forgotten: errors of the states add up.
OPEN = BFLOAT16 | {"o": 6.2e-3, "final": 5.5e-3, "d_q": 5.5e-3, "d_k": 6.5e-3, "d_v": 4e-3, "d_decay_logit": 7e-3}
OPEN |= {"d_beta_logit": 6e-3, "d_A_log": 3e-2, "d_dt_bias": 6e-3, "d_state": 5.5e-3}
# Nearly identical keys, written with beta near 1 and never forgotten: what is read back is a small difference.
STUBBORN = OPEN | {"o": 1.3e-2, "final": 1.8e-2, "d_q": 1.3e-2, "d_v": 8e-3, "d_decay_logit": 2e-2}
STUBBORN |= {"d_beta_logit": 2.5e-2, "d_dt_bias": 1.6e-2}
FLOAT32 = {"o": 2e-5, "final": 2e-5} | {f"d_{name}": 5e-5 for name in NAMES}


@dataclass(frozen=True)
class Case:
    """Packed sequences of these lengths, and the kind of values in them."""

    lengths: tuple[int, ...]
    H: int
    K: int = 128
    V: int = 128
    gates: str = "mixed"  # "mixed", "bound" (all at -5), "open" (near 0) or "low" (between, near the bound)
    keys: str = "random"  # or "near": almost identical, with beta near 1
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0
    state: bool = True

    @property
    def T(self) -> int:
        """Tokens in all."""
        return sum(self.lengths)

    @property
    def limits(self) -> dict[str, float]:
        """Most that errors may be."""
        if self.dtype == torch.float32:
            return FLOAT32
        if self.gates == "open":
            return STUBBORN if self.keys == "near" else OPEN
        return BFLOAT16

    def __str__(self) -> str:
        lengths = "+".join(map(str, self.lengths[:6])) + ("+.." if len(self.lengths) > 6 else "")
        return f"{lengths} H{self.H} K{self.K} V{self.V} {self.gates} {self.keys} {str(self.dtype)[6:]} s{self.seed}"


def kernel_inputs(case: Case, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Fresh values by name: tokens in the case's format, gate parameters and states in float32."""
    generator = torch.Generator(device).manual_seed(case.seed)
    T, H, K, V, N = case.T, case.H, case.K, case.V, len(case.lengths)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    values = {"q": draw(T, H, K), "k": draw(T, H, K), "v": draw(T, H, V), "decay_logit": draw(T, H, K)}
    values |= {"beta_logit": draw(T, H), "A_log": 0.3 * draw(H), "dt_bias": 0.5 * draw(H, K), "state": draw(N, H, K, V)}
    if case.keys == "near":
        values["k"] = draw(1, H, K) + 0.01 * values["k"]
        values["beta_logit"] = 6 + 0.5 * values["beta_logit"]
    shift, spread = {"mixed": (-1, 3), "bound": (40, 1), "open": (-14, 0.5), "low": (3, 0.5)}[case.gates]
    values["decay_logit"] = shift + spread * values["decay_logit"]
    values |= {name: values[name].to(case.dtype) for name in NAMES[:5]}
    if not case.state:
        del values["state"]
    return values


def cotangents(case: Case, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Gradients of the outputs, in the case's format, and of the final states."""
    generator = torch.Generator(device).manual_seed(case.seed + 7919)
    shape = (len(case.lengths), case.H, case.K, case.V)
    d_o = torch.randn(case.T, case.H, case.V, generator=generator, device=device).to(case.dtype)
    return d_o, torch.randn(shape, generator=generator, device=device)


def call(op: Op, values: dict[str, Tensor], case: Case) -> tuple[Tensor, Tensor]:
    """Outputs and final states."""
    q, k, v, z, beta, A_log, dt_bias = (values[name] for name in ARGUMENTS)
    bounds = cu_seqlens(case.lengths).to(q.device)
    return op(q, k, v, z, beta, KdaGate(A_log, dt_bias), state_NHKV=values.get("state"), cu_seqlens=bounds)


def everything(op: Op, values: dict[str, Tensor], case: Case, grads: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Outputs, final states and the gradients of all inputs."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in values.items()}
    o, final = call(op, leaves, case)
    d_o, d_final = grads
    found = torch.autograd.grad(
        (o, final), list(leaves.values()), (d_o.to(o.dtype), d_final.to(final.dtype)), materialize_grads=True
    )
    return {"o": o.detach(), "final": final.detach()} | {f"d_{name}": x for name, x in zip(leaves, found)}


def exact(case: Case, values: dict[str, Tensor], grads: tuple[Tensor, Tensor] | None) -> dict[str, Tensor]:
    """What float64 gives, a few heads at a time; without `grads` outputs and final states only."""
    heads = [slice(h, h + 12) for h in range(0, case.H, 12)]
    per_head = {"A_log", "dt_bias", *SUMS}  # all else has its heads in the second dimension
    parts = []
    for some in heads:
        wide = {name: (x[some] if name in per_head else x[:, some]).double() for name, x in values.items()}
        if grads is not None:
            parts.append(everything(chunk_kda, wide, case, (grads[0][:, some].double(), grads[1][:, some].double())))
        else:
            with torch.no_grad():
                parts.append(dict(zip(("o", "final"), call(chunk_kda, wide, case))))
    return {name: torch.cat([part[name] for part in parts], 0 if name in per_head else 1) for name in parts[0]}


def errors(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    """Norm of each difference by the norm of what is right, or by that of values of 1e-4 where those are tiny.

    A gate at its bound has no slope, so its gradients are nothing but rounding: all others are of the size of 1.
    Gradients of the gate's parameters are sums in which much cancels: they are measured by their terms as well.
    """
    found = {}
    for name in got:
        x, y = got[name].double(), want[name].double()
        assert x.shape == y.shape and bool(x.isfinite().all()), f"{name}: not finite, or {list(x.shape)}"
        size = y.norm() + 1e-4 * max(1, y.numel()) ** 0.5
        if name in SUMS and "d_decay_logit" in want:
            size = size + want["d_decay_logit"].double().norm()
        found[name] = float((x - y).norm() / size)
    return found


def assert_exact(op: Op, case: Case, device: torch.device | str = "cpu") -> dict[str, float]:
    """Outputs, states and gradients within the case's limits of float64's; returns the errors."""
    values, grads = kernel_inputs(case, device), cotangents(case, device)
    got = everything(op, values, case, grads)
    assert got["o"].dtype == case.dtype and got["final"].dtype == torch.float32
    found = errors(got, exact(case, values, grads))
    assert {name: error for name, error in found.items() if error > case.limits[name]} == {}, f"{case}: {found}"
    return found


def assert_extreme_logits(op: Op, case: Case, device: torch.device | str = "cpu") -> None:
    """Where a sigmoid is 0 or 1 to the last digit, results are finite and right, and so are zero keys and queries."""
    values, grads = kernel_inputs(case, device), cotangents(case, device)
    for name, factor in (("beta_logit", 100), ("decay_logit", 60)):
        values[name] = values[name].sign() * factor
    values["q"][::3] = 0
    values["k"][1::4] = 0
    got, want = everything(op, values, case, grads), exact(case, values, grads)
    for name in ("d_q", "d_k"):  # of a zero row: a thousand times the others, by the root's slope
        got[name][values[name[2:]].abs().sum(2) == 0] *= 1e-3
        want[name][values[name[2:]].abs().sum(2) == 0] *= 1e-3
    limits = replace(case, gates="open").limits
    assert {name: error for name, error in errors(got, want).items() if error > limits[name]} == {}


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Names of the tensors that differ in any bit of any value."""
    return [name for name in a if not torch.equal(*(x[name].contiguous().view(torch.uint8) for x in (a, b)))]


def assert_causal(op: Op, case: Case, first_H: Sequence[int], device: torch.device | str = "cpu") -> None:
    """Outputs before a token are the same bits when everything from there on changes, gates above all.

    Each head of the one sequence changes from a token of its own: heads have nothing to do with each other.
    """
    values = kernel_inputs(case, device)
    fresh = kernel_inputs(replace(case, seed=case.seed + 1), device)
    fresh["decay_logit"] += torch.tensor((-20.0, 40.0), device=device).repeat_interleave(case.K // 2)
    later_TH = torch.arange(case.T, device=device)[:, None] >= torch.tensor(first_H, device=device)
    with torch.no_grad():
        whole = call(op, values, case)[0]
        for changed in (("decay_logit",), ("q", "k", "v", "decay_logit", "beta_logit")):
            later = {name: later_TH.view(case.T, case.H, *[1] * (values[name].ndim - 2)) for name in changed}
            other = {name: torch.where(later[name], fresh[name], values[name]) for name in changed}
            differs_TH = (call(op, values | other, case)[0] != whole).any(2)
            assert differs_TH[later_TH].any() and not differs_TH[~later_TH].any()


def assert_deterministic(op: Op, case: Case, device: torch.device | str = "cpu") -> None:
    """Two runs give the same bits, gradients of the gate's parameters included, which are sums over all tokens."""
    values, grads = kernel_inputs(case, device), cotangents(case, device)
    first, second = (everything(op, values, case, grads) for _ in range(2))
    assert same_bits(first, second) == []


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Every fresh tensor is full of NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def assert_reads_no_garbage(op: Op, case: Case, device: torch.device | str = "cpu") -> None:
    """NaN in all memory that is allocated but not yet written changes no bit."""
    values, grads = kernel_inputs(case, device), cotangents(case, device)
    clean = everything(op, values, case, grads)
    with poisoned_memory():
        got = everything(op, values, case, grads)
    assert same_bits(clean, got) == []


def assert_sequences_are_alone(op: Op, case: Case, device: torch.device | str = "cpu") -> None:
    """NaN in one sequence's tokens and state reaches no other one's outputs, states or gradients."""
    values, grads = kernel_inputs(case, device), cotangents(case, device)
    spoiled = max(range(len(case.lengths)), key=lambda n: (case.lengths[n], n))
    start = sum(case.lengths[:spoiled])
    rows = slice(start, start + case.lengths[spoiled])
    clean = everything(op, values, case, grads)
    for name in ("q", "k", "v", "decay_logit", "beta_logit"):
        values[name] = values[name].clone()
        values[name][rows] = torch.nan
    got = everything(op, values, case, grads)
    assert got["o"][rows].isnan().any()
    for name in ("o", *(f"d_{name}" for name in NAMES[:5])):
        clean[name][rows] = got[name][rows] = 0
    for name in ("final", "d_state"):
        clean[name][spoiled] = got[name][spoiled] = 0
    del clean["d_A_log"], clean["d_dt_bias"]
    assert same_bits(clean, got) == []


def assert_checkpoints(op: Op, case: Case, positions: Sequence[int], device: torch.device | str = "cpu") -> None:
    """The state behind each position is the one that the tokens up to there end in, and asking for it changes little.

    Tiles end at positions, so other sums are rounded elsewhere: a few units of the formats' precision.
    """
    values = kernel_inputs(case, device)
    ends = cu_seqlens(case.lengths).tolist()
    with torch.no_grad():
        o, final, states = call(lambda *xs, **named: op(xs[:5], xs[5], tuple(positions), **named), values, case)
        assert states.shape == (len(positions), case.H, case.K, case.V) and states.dtype == torch.float32
        found = errors({"o": o, "final": final}, exact(case, values, None))
        assert all(found[name] <= case.limits[name] for name in found), found
        for position, state in zip(positions, states):
            n = next(n for n, end in enumerate(ends[1:]) if position <= end)
            part = replace(case, lengths=(position - ends[n],))
            short = {name: values[name][ends[n] : position] for name in NAMES[:5]}
            short |= {name: values[name] for name in ("A_log", "dt_bias")}
            short |= {"state": values["state"][n : n + 1]} if case.state else {}
            want = exact(part, short, None)["final"]
            assert errors({"final": state[None]}, {"final": want})["final"] <= case.limits["final"], position
