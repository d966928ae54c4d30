"""Decode rows of `benchmarks/kda.py`: one token for each request, as the recurrence alone and fused with all around it.

A step reads and writes every state once, so states must come from memory and not from the cache: each row steps through
groups of requests whose states take more than 200 MB together, one call a group, all of them in one CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from kda_inputs import errors
from kda_operator import Found
from kda_timing import Protocol, all_of, median_ms, replayed
from torch import Tensor

from openk3.ops import KdaGate
from openk3.ops.kda.decode import DecodePool, DecodeWeights, Projected, decode_kda, step_kda_in_place

ROTATED_BYTES = 220e6
GRAPH_STEPS = 16  # at least, in one graph: a model has as many layers, and a replay has a cost of its own
TAPS = 4
EPS = 1e-5


@dataclass(frozen=True)
class Steps:
    """Groups of N requests: projections of one token each, and the pool in which group i has slots i * N and on."""

    heads: int
    width: int
    tokens: list[Projected]
    output_gates: list[Tensor]
    weights: DecodeWeights
    pool: DecodePool
    slots: list[Tensor]

    def heads_of(self, x_NC: Tensor) -> Tensor:
        """[N, H * D] as [N, H, D]."""
        return x_NC.unflatten(-1, (self.heads, self.width))

    def group(self, n: int) -> DecodePool:
        """The pool's part that belongs to a group, as views."""
        size = len(self.slots[n])
        return DecodePool(*(x[n * size : (n + 1) * size] for x in self.pool.tensors()))

    def copied(self, dtype: torch.dtype | None = None) -> Steps:
        """The first group alone with a pool of its own, in another format if one is given."""

        def moved(x: Tensor) -> Tensor:
            return x.detach().clone() if dtype is None else x.to(dtype)

        gate = KdaGate(moved(self.weights.gate.A_log_H), moved(self.weights.gate.dt_bias_HK))
        convolutions = [moved(x) for x in self.weights.convolutions()]
        weights = DecodeWeights(*convolutions, gate, moved(self.weights.norm_weight_V), self.weights.norm_eps)
        tokens = Projected(*(moved(x) for x in self.tokens[0].tensors()))
        pool = DecodePool(*(moved(x) for x in self.group(0).tensors()))
        return Steps(self.heads, self.width, [tokens], [moved(self.output_gates[0])], weights, pool, self.slots[:1])


Step = Callable[[Steps, int], Tensor]


def random_steps(batch: int, heads: int, width: int, device: torch.device, seed: int) -> Steps:
    """Fresh projections in bfloat16, float32 states, as many groups as the rotation needs."""
    generator = torch.Generator(device=device).manual_seed(seed)
    groups = max(1, -int(-ROTATED_BYTES // (batch * heads * width * width * 4))) if device.type == "cuda" else 2
    C = heads * width

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    tokens = [Projected(*(normal(batch, C) for _ in range(4)), normal(batch, heads)) for _ in range(groups)]
    convolutions = [normal(C, TAPS, dtype=torch.float32) * 0.5 for _ in range(3)]
    gate = KdaGate(normal(heads, dtype=torch.float32) * 0.25, normal(heads, width, dtype=torch.float32) * 3.0 - 3.0)
    weights = DecodeWeights(*convolutions, gate, 1 + 0.1 * normal(width, dtype=torch.float32), EPS)
    slots = groups * batch
    state = normal(slots, heads, width, width, dtype=torch.float32)
    pool = DecodePool(state, *(normal(slots, C, TAPS) for _ in range(3)))
    ids = torch.arange(slots, dtype=torch.int32, device=device).split(batch)
    return Steps(heads, width, tokens, [normal(batch, C) for _ in range(groups)], weights, pool, list(ids))


def our_recurrence(steps: Steps, n: int) -> Tensor:
    """One token of group n, in place."""
    q, k, v, z, beta = steps.tokens[n].tensors()
    rows = [steps.heads_of(x) for x in (q, k, v, z)]
    return step_kda_in_place(
        *rows, beta, gate=steps.weights.gate, state_SHKV=steps.pool.state_SHKV, slot_N=steps.slots[n]
    )


def our_layer(steps: Steps, n: int) -> Tensor:
    """One token of group n from projections to gated outputs, in place."""
    return decode_kda(steps.tokens[n], steps.output_gates[n], steps.weights, steps.pool, steps.slots[n])


def fla_steps() -> dict[bool, Step]:
    """fla-core's recurrence, alone (False) and between its convolution updates and its gated norm (True)."""
    from fla.modules.causal_conv1d.ops import causal_conv1d_update
    from fla.modules.norm.fused_norm_gate import rms_norm_gated
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

    options = {f"use_{part}_in_kernel": True for part in ("qk_l2norm", "gate", "beta_sigmoid")}
    options |= {"lower_bound": -5.0, "inplace_final_state": True}

    def recurrence(steps: Steps, n: int, rows: list[Tensor] | None = None) -> Tensor:
        q, k, v, z, beta = steps.tokens[n].tensors()
        q, k, v = (steps.heads_of(x)[:, None] for x in rows or (q, k, v))
        tokens = {"q": q, "k": k, "v": v, "g": steps.heads_of(z)[:, None], "beta": beta[:, None]}
        gate = {"A_log": steps.weights.gate.A_log_H, "dt_bias": steps.weights.gate.dt_bias_HK.view(-1)}
        return fused_recurrent_kda_fwd(**tokens, **gate, **options, initial_state=steps.group(n).state_SHKV)[0][:, 0]

    def layer(steps: Steps, n: int) -> Tensor:
        windows = steps.group(n).tensors()[1:]
        parts = zip(steps.tokens[n].tensors()[:3], windows, steps.weights.convolutions())
        rows = [causal_conv1d_update(x, window, weight=w, activation="silu")[0] for x, window, w in parts]
        o, gate = recurrence(steps, n, rows), steps.heads_of(steps.output_gates[n])
        y = rms_norm_gated(o, gate, steps.weights.norm_weight_V, None, activation="sigmoid", eps=EPS)
        return y.flatten(1)

    return {False: recurrence, True: layer}


def decode_steps(names: list[str]) -> dict[str, dict[bool, Step]]:
    """Steps of ours and, if it is among the names, of fla-core: the recurrence alone and fused."""
    found = {"ours": {False: our_recurrence, True: our_layer}}
    return found | ({"fla": fla_steps()} if "fla" in names else {})


def step_errors(step: Step, fused: bool, steps: Steps) -> dict[str, float]:
    """Relative errors of outputs and new states of one step from the same pool, against the float64 definition."""
    mine, exact = steps.copied(), steps.copied(torch.float64)
    definition = our_layer if fused else our_recurrence
    want = {"o": definition(exact, 0).flatten(1), "state": exact.pool.state_SHKV}
    got = {"o": step(mine, 0).flatten(1), "state": mine.pool.state_SHKV}
    return errors(got, want)


def step_times(step: Step, steps: Steps, device: torch.device, protocol: Protocol) -> dict[str, float]:
    """Milliseconds of one step: as a part of a replayed graph (without a GPU: eager) and eager."""
    calls = [lambda n=n: step(steps, n) for n in range(len(steps.tokens))]
    eager = median_ms([all_of(calls)], device, protocol) / len(calls)
    calls = calls * -(-GRAPH_STEPS // len(calls))
    replay = [replayed(calls)] if device.type == "cuda" else [all_of(calls)]
    return {"graph": median_ms(replay, device, protocol) / len(calls), "eager": eager}


def step_bytes(batch: int, heads: int, width: int, fused: bool) -> int:
    """Bytes that a step must move: states in and out, tokens in, outputs out; fused also windows and output gates."""
    state = 2 * 4 * width * width
    tokens = 2 * 5 * width + 2
    around = 2 * (width + 2 * 3 * TAPS * width) if fused else 0
    return batch * heads * (state + tokens + around)


def measure_decode(work: Any, names: list[str], device: torch.device, protocol: Protocol | None) -> dict[str, Any]:
    """One row: errors of every implementation, and unless `protocol` is None its times."""
    steps, found = random_steps(work.batch, work.heads, work.width, device, seed=work.batch), Found()
    implementations = {name: by_kind[work.fused] for name, by_kind in decode_steps(names).items()}
    eager: dict[str, float] = {}

    def check(name: str, step: Step) -> None:
        found.errors[name] = step_errors(step, work.fused, steps)

    def measure(name: str, step: Step) -> None:
        times = step_times(step, steps, device, protocol)
        found.times[name], eager[name] = times["graph"], times["eager"]

    with torch.no_grad():  # timed steps change the pool: before them all errors, from the same states
        for name, step in implementations.items():
            found.attempt(name, lambda name=name, step=step: check(name, step))
        for name in () if protocol is None else tuple(found.errors):
            found.attempt(name, lambda name=name: measure(name, implementations[name]))
    return vars(found) | {"eager_ms": eager}
