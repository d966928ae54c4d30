"""What the tests of Kimi Delta Attention share: random inputs, and a run with all its gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from op_checks import golden_input
from torch import Tensor

from openk3.ops import KdaGate

NAMES = ("q", "k", "v", "decay_logit", "beta_logit", "A_log", "dt_bias", "state")
GOLDEN_CASES = ["random", "no_init", "extreme", "all_min", "all_max", "decode1", "varlen", "zeros", "head128", "kneqv"]


def cu_seqlens(lengths: Sequence[int]) -> Tensor:
    """Bounds of packed sequences of these lengths."""
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def kda_inputs(
    lengths: Sequence[int], H: int = 2, K: int = 8, V: int = 12, *, dtype: torch.dtype = torch.float64, seed: int = 0
) -> dict[str, Tensor]:
    """Random inputs by name, with decay from nearly none to nearly the bound."""
    generator = torch.Generator().manual_seed(seed)
    T = sum(lengths)
    shapes = ((T, H, K), (T, H, K), (T, H, V), (T, H, K), (T, H), (H,), (H, K), (len(lengths), H, K, V))
    values = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in zip(NAMES, shapes)}
    values["decay_logit"] *= 3
    return {name: value.to(dtype) for name, value in values.items()}


def run(
    op: Callable[..., tuple[Tensor, Tensor]],
    inputs: dict[str, Tensor],
    lengths: Sequence[int] | None = None,
    bound: float | None = -5.0,
) -> tuple[Tensor, Tensor]:
    """Outputs and final states."""
    q, k, v, z, beta, A_log, dt_bias = (inputs[name] for name in NAMES[:-1])
    bounds = None if lengths is None else cu_seqlens(lengths)
    return op(q, k, v, z, beta, KdaGate(A_log, dt_bias, bound), state_NHKV=inputs.get("state"), cu_seqlens=bounds)


def run_with_gradients(
    op: Callable[..., tuple[Tensor, Tensor]],
    inputs: dict[str, Tensor],
    lengths: Sequence[int] | None = None,
    bound: float | None = -5.0,
) -> dict[str, Tensor]:
    """Outputs, final states, and gradients of a fixed random combination of both."""
    leaves = {name: value.detach().clone().requires_grad_() for name, value in inputs.items()}
    o, state = run(op, leaves, lengths, bound)
    generator = torch.Generator().manual_seed(99)
    loss = sum((x.double() * torch.randn(x.shape, generator=generator, dtype=torch.float64)).sum() for x in (o, state))
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return {"o": o.detach(), "final": state.detach()} | {f"d_{name}": g for name, g in zip(leaves, grads)}


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor], atol: float = 1e-11) -> None:
    """Equal within `atol`, gradients of the per-head parameters relative to their size (they sum over all tokens)."""
    assert got.keys() == want.keys()
    for name, value in want.items():
        scale = max(1.0, float(value.abs().max())) if value.numel() else 1.0
        torch.testing.assert_close(got[name], value, rtol=0, atol=atol * scale, msg=lambda m, name=name: f"{name}: {m}")


def golden_case(case: str, dtype: torch.dtype) -> tuple[dict[str, Tensor], list[int] | None]:
    """Inputs and sequence lengths of a stored case."""
    stored = dict(zip(NAMES, ("q", "k", "v", "g_raw", "beta_logit", "A_log", "dt_bias", "initial_state")))
    if case == "no_init":
        del stored["state"]
    inputs = {name: golden_input(f"kda.{case}.{key}", dtype) for name, key in stored.items()}
    inputs["dt_bias"] = inputs["dt_bias"].view(inputs["q"].shape[1:])
    return inputs, golden_input(f"kda.{case}.cu_seqlens").diff().tolist() if case == "varlen" else None
