"""Rows of `benchmarks/kda.py` over packed tokens: the operator's forward pass, or forward and backward together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from kda_inputs import Inputs, errors, exact, hard_cases, join_heads, random_inputs, take_heads
from kda_peers import Implementation, forward_backward
from kda_timing import Protocol, median_ms, peak_growth
from torch import Tensor

ROTATED_BYTES = 200e6
HEADS_AT_ONCE = 3  # in float64: a head of 131,072 tokens takes some gigabytes


@dataclass(frozen=True)
class Found:
    """What a row came to, by implementation."""

    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)
    peak_gb: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def attempt(self, name: str, measure: Callable[[], None]) -> None:
        """Measure one implementation; one that breaks is noted, and the others go on."""
        try:
            measure()
        except Exception as error:
            self.failed[name] = f"{type(error).__name__}: {str(error)[:300]}"
            print(f"{name} failed: {self.failed[name]}", flush=True)


def runs(each: Implementation, row: Any) -> bool:
    """Whether an implementation has what a row measures; keeping intermediates matters only to a backward pass."""
    return each.has_gradients if row.backward else each.name != "fla_kept"


def given(x: Inputs, each: Implementation) -> Inputs:
    """The inputs, without states for an implementation that has none."""
    return x if each.has_states else x.without_states()


@dataclass(frozen=True)
class Problem:
    """A row's inputs, several sets if one would fit the cache, and the exact results on some heads."""

    row: Any
    sets: list[Inputs]
    heads: list[int]
    exact: dict[bool, dict[str, Tensor]]  # by whether there are states; filled when first asked for

    @classmethod
    def of(cls, row: Any, device: torch.device, heads_checked: int) -> Problem:
        """Fresh inputs; so many heads are checked, from the first to the last (a single one: the last)."""
        seed = 1000 * (sum(row.lengths) + row.heads)

        def make(n: int) -> Inputs:
            return random_inputs(row.lengths, row.heads, row.width, device=device, seed=seed + n)

        first = make(0)
        size = sum(value.nbytes for value in first.leaves().values())
        turns = 1 if size > ROTATED_BYTES or device.type != "cuda" else 1 + int(ROTATED_BYTES // size)
        count = min(heads_checked, row.heads)
        heads = [row.heads - 1 - n * (row.heads - 1) // max(1, count - 1) for n in reversed(range(count))]
        return cls(row, [first, *(make(n) for n in range(1, turns))], heads, {})

    def errors(self, each: Implementation) -> dict[str, float]:
        """Of outputs, final states and gradients."""
        if each.has_states not in self.exact:
            parts = []
            for low in range(0, len(self.heads), HEADS_AT_ONCE):
                part = self.sets[0].with_heads(self.heads[low : low + HEADS_AT_ONCE])
                parts.append(exact(given(part, each), gradients=self.row.backward))
            self.exact[each.has_states] = join_heads(parts)
        got = each.results(given(self.sets[0], each), gradients=self.row.backward)
        return errors(take_heads(got, self.heads), self.exact[each.has_states])

    def time(self, each: Implementation, protocol: Protocol, device: torch.device) -> float:
        """Median milliseconds of one implementation."""
        ready = [(each.prepare(x), x) for x in (given(x, each) for x in self.sets)]
        if self.row.backward:
            calls = [lambda leaves=leaves, x=x: forward_backward(each.call, leaves, x) for leaves, x in ready]
            return median_ms(calls, device, protocol)
        with torch.no_grad():
            calls = [lambda leaves=leaves, x=x: each.call(leaves, x) for leaves, x in ready]
            return median_ms(calls, device, protocol)

    def peak_gb(self, each: Implementation, device: torch.device) -> float | None:
        """Most memory in use at once in forward and backward, inputs and gradients included."""
        x = given(self.sets[0], each)
        leaves = each.prepare(x)
        tensors = [*leaves.values(), x.d_o, *([] if x.d_final is None else [x.d_final])]
        growth = peak_growth(lambda: forward_backward(each.call, leaves, x), device)
        return None if growth is None else (growth + sum(value.nbytes for value in tensors)) / 1e9


def measure_operator(
    row: Any,
    implementations: dict[str, Implementation],
    device: torch.device,
    protocol: Protocol | None,
    *,
    heads_checked: int,
) -> dict[str, Any]:
    """One row: errors of every implementation that has it, and unless `protocol` is None times and memory."""
    problem, found = Problem.of(row, device, heads_checked), Found()

    def measure(each: Implementation) -> None:
        if each.name != "fla_kept":  # the same arithmetic as fla
            found.errors[each.name] = problem.errors(each)
        if protocol is None:
            return
        peak = problem.peak_gb(each, device) if row.backward else None
        found.peak_gb.update({} if peak is None else {each.name: peak})
        found.times[each.name] = problem.time(each, protocol, device)

    for each in implementations.values():
        if runs(each, row):
            found.attempt(each.name, lambda each=each: measure(each))
    return vars(found)


def hard_checks(
    implementations: dict[str, Implementation], device: torch.device, *, tiny: bool
) -> list[dict[str, Any]]:
    """Errors of ours and of fla-core on hard inputs, over 12 heads (each of which is a problem of its own)."""
    rows = []
    for name, case in hard_cases().items():
        if tiny:
            case = case | {"lengths": tuple(n % 37 for n in case["lengths"])}
        x = random_inputs(**case, heads=2 if tiny else 12, width=16 if tiny else 128, device=device, seed=7)
        want, found = exact(x, gradients=True), Found()

        def measure(each: Implementation, x: Inputs = x, want: Any = want, found: Found = found) -> None:
            found.errors[each.name] = errors(each.results(x, gradients=True), want)

        for key in ("ours", "fla"):
            if key in implementations:
                found.attempt(key, lambda key=key, measure=measure: measure(implementations[key]))
        rows.append({"work": name, "errors": found.errors} | ({"failed": found.failed} if found.failed else {}))
    return rows
