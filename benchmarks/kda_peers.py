"""The implementations that `benchmarks/kda.py` compares, each behind the same call.

    fla-core 0.6.0          pip install fla-core==0.6.0
    FlashKDA                built from github.com/MoonshotAI/FlashKDA (CUTLASS, forward only)
    NeMo AutoModel 0.7.0    pip install nemo_automodel==0.7.0 (CUDA forward, Triton backward; no states)

Each is a peer to compare with, never a dependency: one that cannot be imported is left out, and the reason is printed.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from kda_inputs import Inputs, reference_call, run
from torch import Tensor

from openk3.ops import KdaGate
from openk3.ops.kda.reference import kda_gate

# fla hands calls without gradients to FlashKDA where that is installed; here both are measured, each by itself.
os.environ["FLA_FLASH_KDA"] = "0"

Leaves = dict[str, Tensor]
Call = Callable[[Leaves, Inputs], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Implementation:
    """One implementation: `call(prepare(inputs), inputs)` returns outputs and final states; only `call` is timed."""

    name: str
    call: Call
    prepare: Callable[[Inputs], Leaves] = Inputs.leaves
    has_states: bool = True
    has_gradients: bool = True

    def results(self, x: Inputs, *, gradients: bool) -> dict[str, Tensor]:
        """Outputs and gradients of the inputs as they were given, whatever form the implementation wants them in."""
        if self.prepare is Inputs.leaves:
            return run(self.call, x, gradients=gradients)
        return run(lambda leaves, x: self.call(self.converted(leaves, x), x), x, gradients=gradients)

    def converted(self, leaves: Leaves, x: Inputs) -> Leaves:
        """What `prepare` makes of leaves, with autograd going through it."""
        return CONVERSIONS[self.name](leaves, x)


def ours() -> Implementation:
    """This project's fused kernels."""
    from openk3.ops.kda.fused_backward import fused_kda

    def call(leaves: Leaves, x: Inputs) -> tuple[Tensor, Tensor]:
        gate = KdaGate(leaves["A_log"], leaves["dt_bias"])
        tokens = (leaves["q"], leaves["k"], leaves["v"], leaves["decay_logit"], leaves["beta_logit"])
        return fused_kda(*tokens, gate, state_NHKV=leaves.get("state"), cu_seqlens=x.cu_seqlens)

    return Implementation("ours", call)


def reference() -> Implementation:
    """The plain PyTorch chunk form, for a dry run without a GPU."""
    return Implementation("ours", reference_call)


def fla(*, keep: bool = False) -> Implementation:
    """fla-core's chunk_kda; `keep` holds intermediates for the backward pass instead of computing them again."""
    from fla.ops.kda import chunk_kda

    options = {f"use_{part}_in_kernel": True for part in ("qk_l2norm", "gate", "beta_sigmoid")}
    options |= {"safe_gate": True, "lower_bound": -5.0, "output_final_state": True, "disable_recompute": keep}

    def call(leaves: Leaves, x: Inputs) -> tuple[Tensor, Tensor]:
        tokens = {name: leaves[name][None] for name in ("q", "k", "v")}
        tokens |= {"g": leaves["decay_logit"][None], "beta": leaves["beta_logit"][None]}
        gate = {"A_log": leaves["A_log"], "dt_bias": leaves["dt_bias"].view(-1)}
        o, final = chunk_kda(
            **tokens, **gate, **options, initial_state=leaves.get("state"), cu_seqlens=x.cu_seqlens_long
        )
        return o[0], final

    return Implementation("fla_kept" if keep else "fla", call)


def flash_kda() -> Implementation:
    """FlashKDA's forward; its states are [N, H, V, K]."""
    from flash_kda import fwd

    def call(leaves: Leaves, x: Inputs) -> tuple[Tensor, Tensor]:
        q, k, v, z, beta = (leaves[name][None] for name in ("q", "k", "v", "decay_logit", "beta_logit"))
        o, final = torch.empty_like(v), torch.empty_like(leaves["state"])
        states = {"initial_state": leaves["state"], "final_state": final, "cu_seqlens": x.cu_seqlens_long}
        fwd(q, k, v, z, beta, q.shape[-1] ** -0.5, o, leaves["A_log"], leaves["dt_bias"], -5.0, **states)
        return o[0], final.mT

    return Implementation("flashkda", call, lambda x: with_value_first(x.leaves(), x), has_gradients=False)


def nemo() -> Implementation:
    """NeMo AutoModel's fused kernels: log decay and beta are made outside, in float32, and there are no states."""
    from nemo_automodel.components.models.kimi_k3.kda_fused import fused_chunk_kda

    def call(leaves: Leaves, x: Inputs) -> tuple[Tensor, None]:
        tokens = [leaves[name][None] for name in ("q", "k", "v", "g", "beta")]
        return fused_chunk_kda(*tokens, x.cu_seqlens)[0][0], None

    def prepare(x: Inputs) -> Leaves:
        with torch.no_grad():
            made = with_gate_applied(x.leaves(), x)
        return {name: value.detach().requires_grad_() for name, value in made.items()}

    return Implementation("nemo", call, prepare, has_states=False)


def with_value_first(leaves: Leaves, x: Inputs) -> Leaves:
    """States [N, H, V, K]."""
    return leaves | {"state": leaves["state"].mT.contiguous()}


def with_gate_applied(leaves: Leaves, x: Inputs) -> Leaves:
    """Log decay and beta in float32 instead of their logits; no state."""
    made = {name: leaves[name] for name in ("q", "k", "v")}
    made["g"] = kda_gate(leaves["decay_logit"], KdaGate(leaves["A_log"], leaves["dt_bias"]))
    return made | {"beta": leaves["beta_logit"].float().sigmoid()}


CONVERSIONS: dict[str, Callable[[Leaves, Inputs], Leaves]] = {
    "flashkda": with_value_first,
    "nemo": with_gate_applied,
}
LOADERS: dict[str, Callable[[], Implementation]] = {"ours": ours, "fla": fla, "flashkda": flash_kda, "nemo": nemo}
PACKAGES = {"fla": "fla-core", "flashkda": "flash_kda", "nemo": "nemo_automodel"}


def load(names: list[str]) -> tuple[dict[str, Implementation], dict[str, str]]:
    """The implementations that can be imported, and the reason for each that cannot."""
    found, missing = {}, {}
    for name in names:
        try:
            found[name] = LOADERS[name]()
        except (ImportError, OSError) as error:
            missing[name] = f"{type(error).__name__}: {error}"
    if "fla" in found:
        found["fla_kept"] = fla(keep=True)
    return found, missing


def versions(names: list[str]) -> dict[str, str]:
    """Versions of the peers that are there."""
    found = {}
    for name in names:
        if name in PACKAGES:
            try:
                found[PACKAGES[name]] = importlib.metadata.version(PACKAGES[name])
            except importlib.metadata.PackageNotFoundError:
                found[PACKAGES[name]] = "unknown"
    return found


def forward_backward(call: Any, leaves: Leaves, x: Inputs) -> list[Tensor | None]:
    """One training step of the operator: outputs, then the gradients of all leaves."""
    o, final = call(leaves, x)
    outputs, gradients = ([o], [x.d_o]) if x.d_final is None else ([o, final], [x.d_o, x.d_final])
    return [o, final, *torch.autograd.grad(outputs, list(leaves.values()), gradients)]
