"""Inputs of Kimi Delta Attention, ordinary and hard, and the error of an implementation against float64.

The reference is the chunk form in float64 (`openk3.ops.chunk_kda`, which the tests hold against the token recurrence).
Heads do not meet each other, so large shapes are checked on a few heads: their inputs are cut out and computed alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from openk3.ops import KdaGate, chunk_kda

LEAVES = ("q", "k", "v", "decay_logit", "beta_logit", "A_log", "dt_bias", "state")
OUTPUTS = ("o", "final")
GATES = {"pinned": 60.0, "low": 8.0, "open": -12.0}  # what is added to every decay logit


@dataclass(frozen=True)
class Inputs:
    """Packed tokens [T, H, ...] in a model's format, gate and states in float32, and gradients of both outputs."""

    lengths: tuple[int, ...]
    q: Tensor
    k: Tensor
    v: Tensor
    decay_logit: Tensor
    beta_logit: Tensor
    A_log: Tensor
    dt_bias: Tensor
    state: Tensor | None
    d_o: Tensor
    d_final: Tensor | None  # None: the loss does not see the final states
    cu_seqlens: Tensor | None  # int32 [N + 1], None for a single sequence
    cu_seqlens_long: Tensor | None  # the same in int64, for those who ask for it

    def leaves(self) -> dict[str, Tensor]:
        """Everything that has a gradient, by name, as new leaves of autograd."""
        found = {name: getattr(self, name) for name in LEAVES}
        return {name: x.detach().requires_grad_() for name, x in found.items() if x is not None}

    def without_states(self) -> Inputs:
        """The same tokens from states of zero, for a loss that does not see the final states."""
        return replace(self, state=None, d_final=None)

    def with_heads(self, heads: list[int]) -> Inputs:
        """The same problem for some of the heads."""
        token = ("q", "k", "v", "decay_logit", "beta_logit", "d_o")
        cut: dict[str, Any] = {name: getattr(self, name)[:, heads].contiguous() for name in token}
        cut |= {name: getattr(self, name)[heads].contiguous() for name in ("A_log", "dt_bias")}
        for name in ("state", "d_final"):
            states = getattr(self, name)
            cut[name] = None if states is None else states[:, heads].contiguous()
        return replace(self, **cut)


def random_inputs(
    lengths: tuple[int, ...],
    heads: int,
    width: int = 128,
    *,
    device: torch.device | str,
    seed: int,
    gates: str = "mixed",
    keys: str = "random",
) -> Inputs:
    """Fresh inputs in bfloat16.

    gates: "mixed" has channels from nearly no decay to nearly the bound, "pinned" a log decay of -5 everywhere, "low"
    one of -4.998 (whose gradient is not lost in rounding), "open" one of -3e-5. keys: "random", or "near" for keys of
    one head that differ by a hundredth, with beta 0.998.
    """
    device, tokens = torch.device(device), sum(lengths)
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=device) * (high - low) + low

    q, k, v = (normal(tokens, heads, width) for _ in range(3))
    beta_logit = normal(tokens, heads)
    if keys == "near":
        k = (normal(1, heads, width, dtype=torch.float32) + 0.01 * k.float()).to(torch.bfloat16)
        beta_logit = (6 + 0.1 * beta_logit.float()).to(torch.bfloat16)
    decay_logit = normal(tokens, heads, width)
    A_log, dt_bias = uniform(-0.5, 0.5, heads), uniform(-8.0, 2.0, heads, width)
    if gates != "mixed":
        dt_bias = dt_bias * 0.01 + GATES[gates]
        A_log = A_log * 0.01
    states = (len(lengths), heads, width, width)
    state, d_final = (normal(*states, dtype=torch.float32) * 0.5 for _ in range(2))
    d_o = normal(tokens, heads, width)
    bounds = None if len(lengths) == 1 else torch.tensor([0, *lengths]).cumsum(0).to(device)
    tokens_and_gate = (q, k, v, decay_logit, beta_logit, A_log, dt_bias)
    return Inputs(lengths, *tokens_and_gate, state, d_o, d_final, None if bounds is None else bounds.int(), bounds)


def hard_cases() -> dict[str, dict[str, Any]]:
    """Arguments of `random_inputs` for each hard problem: lengths beside tile borders, packed with empty sequences."""
    shapes = {f"T={tokens}": (tokens,) for tokens in (257, 1000, 4097)}
    shapes["packed with empty"] = (0, 300, 1, 0, 17, 64, 618, 0)
    return {
        f"{shape}, gates {gates}, keys {keys}": {"lengths": lengths, "gates": gates, "keys": keys}
        for shape, lengths in shapes.items()
        for gates in ("mixed", *GATES)
        for keys in ("random", "near")
    }


def run(call: Any, x: Inputs, *, gradients: bool) -> dict[str, Tensor]:
    """Outputs of call(leaves by name, inputs) -> (o, final states), and d_NAME for each leaf if asked for.

    Final states of None (an implementation that has none) are left out.
    """
    leaves = x.leaves()
    if not gradients:
        with torch.no_grad():
            outputs = call(leaves, x)
        return {name: value for name, value in zip(OUTPUTS, outputs) if value is not None}
    outputs = {name: value for name, value in zip(OUTPUTS, call(leaves, x)) if value is not None}
    seen = {name: d for name, d in (("o", x.d_o), ("final", x.d_final)) if d is not None and name in outputs}
    grads = torch.autograd.grad([outputs[name] for name in seen], list(leaves.values()), list(seen.values()))
    found = {name: value.detach() for name, value in outputs.items()}
    return found | {f"d_{name}": grad for name, grad in zip(leaves, grads)}


def exact(x: Inputs, *, gradients: bool) -> dict[str, Tensor]:
    """The float64 chunk form of the same inputs."""
    floating = {name: value for name, value in vars(x).items() if torch.is_tensor(value) and value.is_floating_point()}
    wide = {name: value.double() for name, value in floating.items()}
    return run(reference_call, replace(x, **wide), gradients=gradients)


def reference_call(leaves: dict[str, Tensor], x: Inputs) -> tuple[Tensor, Tensor]:
    """`chunk_kda` in the leaves' own format."""
    gate = KdaGate(leaves["A_log"], leaves["dt_bias"])
    tokens = [leaves[name] for name in LEAVES[:5]]
    return chunk_kda(*tokens, gate, state_NHKV=leaves.get("state"), cu_seqlens=x.cu_seqlens)


def take_heads(found: dict[str, Tensor], heads: list[int]) -> dict[str, Tensor]:
    """Some heads of results: per-head gradients have them first, everything else in its second dimension."""
    first = ("d_A_log", "d_dt_bias")
    return {name: value[heads] if name in first else value[:, heads] for name, value in found.items()}


def join_heads(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Results of one set of heads after another as those of all."""
    first = ("d_A_log", "d_dt_bias")
    return {name: torch.cat([part[name] for part in parts], 0 if name in first else 1) for name in parts[0]}


def errors(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    """Relative error |got - want| / |want| of each result (norms over all its elements); nan stays nan.

    A result that vanishes, as the gradient of a pinned gate does, is compared as if its norm were 1e-6.
    """
    found = {}
    for name, value in got.items():
        target = want[name].double()
        size = float(torch.linalg.vector_norm(target))
        found[name] = float(torch.linalg.vector_norm(value.double() - target)) / max(size, 1e-6)
    return found
