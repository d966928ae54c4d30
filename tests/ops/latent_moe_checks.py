"""What must hold of the routed experts by kernels, on any device: inputs, and the definition from `ops.routing`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from openk3.ops.grouped_linear import grouped_linear
from openk3.ops.latent_moe.experts_fused import Form, mix_experts, tile_rows
from openk3.ops.latent_moe.route_fused import Choice, Routed, route, sort
from openk3.ops.norm import rms_norm
from openk3.ops.routing import combine_rows, gather_rows, sort_by_expert
from openk3.ops.situ import situ_glu

NAMES = ("z", "weights", "w1", "w3", "w2", "norm")


@dataclass(frozen=True)
class Case:
    """T tokens with k of E experts each, latents of C and inner layers of I values."""

    T: int
    E: int
    k: int
    C: int
    I: int
    dtype: torch.dtype = torch.bfloat16
    linear_beta: float | None = 25.0
    idle: tuple[int, ...] = ()  # experts that no token chooses
    seed: int = 0

    @property
    def form(self) -> Form:
        """K3's constants."""
        return Form(4.0, self.linear_beta, 1e-5)


def draw(case: Case, device: str = "cpu") -> tuple[dict[str, Tensor], Routed, Tensor]:
    """(operands by name, routes, gradient of the result)."""
    generator = torch.Generator(device).manual_seed(case.seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=generator, device=device) * scale

    bias = 0.1 * normal(case.E)
    bias[list(case.idle)] = -9.0
    routed = route(2 * normal(case.T, case.E), bias, Choice(case.k, True, 1.0))
    values = {"z": normal(case.T, case.C), "weights": routed.weights_Tk}
    values |= {name: normal(case.E, case.I, case.C, scale=2 * case.C**-0.5) for name in ("w1", "w3")}
    values |= {"w2": normal(case.E, case.C, case.I, scale=case.I**-0.5), "norm": 1 + 0.3 * normal(case.C)}
    values = {name: x if name == "weights" else x.to(case.dtype) for name, x in values.items()}
    return values, routed, normal(case.T, case.C).to(case.dtype)


def by_kernels(case: Case, values: dict[str, Tensor], routed: Routed) -> Tensor:
    """The result of the kernels."""
    z, weights, w1, w3, w2, norm = (values[name] for name in NAMES)
    return mix_experts(z, weights, sort(routed, tile_rows(z, case.k, case.E)), (w1, w3, w2), (norm, case.form))


def by_definition(case: Case, values: dict[str, Tensor], routed: Routed) -> Tensor:
    """The result of the PyTorch definition, in the values' format."""
    z, weights, w1, w3, w2, norm = (values[name] for name in NAMES)
    order_M, counts_E = sort_by_expert(routed.ids_Tk, case.E, max_padding=0)
    rows = gather_rows(z, order_M, case.k)
    act = situ_glu(grouped_linear(rows, w1, counts_E), grouped_linear(rows, w3, counts_E), 4.0, case.linear_beta)
    return rms_norm(combine_rows(grouped_linear(act, w2, counts_E), order_M, weights), norm, 1e-5)


def results(case: Case, run: object, values: dict[str, Tensor], routed: Routed, d_out: Tensor) -> dict[str, Tensor]:
    """Output and all gradients."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in values.items()}
    out = run(case, leaves, routed)  # type: ignore[operator]
    grads = torch.autograd.grad(out, list(leaves.values()), d_out.to(out.dtype))
    return {"out": out.detach()} | {f"d_{name}": grad for name, grad in zip(leaves, grads)}


def errors(case: Case, device: str = "cpu", leave_out: Sequence[str] = ()) -> dict[str, float]:
    """Norm ratios of the kernels' results against the definition in float64."""
    values, routed, d_out = draw(case, device)
    got = results(case, by_kernels, values, routed, d_out)
    want = results(case, by_definition, {name: x.double() for name, x in values.items()}, routed, d_out)
    assert all(got[name].dtype == (torch.float32 if name == "d_weights" else case.dtype) for name in got)
    pairs = {name: (got[name].double(), want[name]) for name in got if name not in leave_out}
    return {name: float((a - b).norm() / b.norm().clamp(min=1e-30)) for name, (a, b) in pairs.items()}
