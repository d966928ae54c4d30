"""Stable LatentMoE and the dense SiTU feed-forward part (report section 2.3).

The router sees the full width; routed experts work in a narrower latent space; an RMSNorm after their weighted sum
bounds what enters the up-projection. `LatentMoE.exchange` is the only place that expert parallelism replaces.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from openk3.config.model import TextConfig
from openk3.model.norm import RMSNorm
from openk3.model.packed_experts import PackedExperts
from openk3.model.trace import NO_TRACE, Trace
from openk3.ops.few.mixture import Rest, mix_few, mixes_few
from openk3.ops.grouped_linear import grouped_linear
from openk3.ops.joint_linear import joint_linear, joint_linear_beside
from openk3.ops.latent_moe.layer import RoutedForm, RoutedWeights, by_kernels, latent_experts
from openk3.ops.norm import at_least_float32
from openk3.ops.overlap import runs_beside, side_by_side
from openk3.ops.routing import Routes, combine_rows, gather_rows, route, sort_by_expert
from openk3.ops.saved import again, name, remake, remake_linear
from openk3.ops.situ import situ_glu

# Rows of padding that balanced experts may get for the sake of one batched product: at most a quarter.
MAX_PADDING = 1.25
Model = TypeVar("Model", bound=nn.Module)


class DenseFFN(nn.Module):
    """W_down SiTU-GLU(W_gate x, W_up x): the first layer's feed-forward part and the shared experts."""

    joint = ("gate_proj", "up_proj")  # maps of the part's input

    def __init__(self, config: TextConfig, inner: int) -> None:
        super().__init__()
        self.beta, self.linear_beta = config.activation_situ_beta, config.activation_situ_linear_beta
        self.gate_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.down_proj = nn.Linear(inner, config.hidden_size, bias=False)

    def forward(self, x_TD: Tensor, trace: Trace = NO_TRACE, others: list[Tensor] | None = None) -> Tensor:
        """y_TD; nothing to trace. `others` is given x_TD for the one other reader that `joint_linear_beside` allows."""
        maps = self.gate_proj.weight, self.up_proj.weight
        gate_TI, up_TI, *rest = (joint_linear if others is None else joint_linear_beside)(x_TD, maps)
        if others is not None:
            others += rest
        remake_linear("ffn_hidden", gate_TI, x_TD, self.gate_proj.weight)
        remake_linear("ffn_hidden", up_TI, x_TD, self.up_proj.weight)
        return self.down_proj(_activated(gate_TI, up_TI, self.beta, self.linear_beta))


class Router(nn.Module):
    """s = sigmoid(W x), top k of s + bias, weights from s alone (report eq. 11). `bias` is set by balancing only."""

    bias: Tensor

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.k, self.groups, self.topk_group = config.num_experts_per_token, config.num_expert_group, config.topk_group
        self.renormalize, self.scale = config.moe_renormalize, config.routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.register_buffer("bias", torch.empty(config.num_experts))

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Routes]:
        """(scores_TE in at least float32, routes)."""
        scores_TE = torch.sigmoid(F.linear(at_least_float32(x_TD), at_least_float32(self.weight)))
        routes = route(
            *(scores_TE, self.bias, self.k),
            groups=self.groups,
            topk_group=self.topk_group,
            renormalize=self.renormalize,
            scale=self.scale,
        )
        return scores_TE, routes


class Experts(nn.Module):
    """All routed experts, stacked: expert e is w2[e] SiTU-GLU(w1[e] z, w3[e] z)."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        experts, inner, latent = config.num_experts, config.moe_intermediate_size, config.routed_expert_hidden_size
        self.beta, self.linear_beta = config.activation_situ_beta, config.activation_situ_linear_beta
        self.w1_EIC = nn.Parameter(torch.empty(experts, inner, latent))
        self.w3_EIC = nn.Parameter(torch.empty(experts, inner, latent))
        self.w2_ECI = nn.Parameter(torch.empty(experts, latent, inner))

    def forward(self, z_MC: Tensor, counts_E: Tensor) -> Tensor:
        """Rows sorted by expert, counts_E of them each -> [M, C]."""
        gate_MI = grouped_linear(z_MC, self.w1_EIC, counts_E)
        up_MI = grouped_linear(z_MC, self.w3_EIC, counts_E)
        name("moe_hidden", gate_MI, up_MI)
        return grouped_linear(_activated(gate_MI, up_MI, self.beta, self.linear_beta), self.w2_ECI, counts_E)


def _activated(gate_XI: Tensor, up_XI: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    activate = partial(situ_glu, beta=beta, linear_beta=linear_beta)
    act_XI = activate(gate_XI, up_XI)
    remake("situ", [act_XI], activate, gate_XI, up_XI)
    return act_XI


class DispatchPlan(NamedTuple):
    """How to undo a dispatch: which of the T*k token copies lies in each row, sorted by expert (T*k: padding)."""

    order_M: Tensor


class LocalExchange:
    """Token copies to their experts and back, where all experts live here."""

    def dispatch(self, z_TC: Tensor, expert_ids_Tk: Tensor, num_experts: int) -> tuple[Tensor, Tensor, DispatchPlan]:
        """(rows sorted by expert [M, C], rows of each expert [E], padding included, plan)."""
        order_M, counts_E = sort_by_expert(expert_ids_Tk, num_experts, max_padding=MAX_PADDING)
        return gather_rows(z_TC, order_M, expert_ids_Tk.shape[1]), counts_E, DispatchPlan(order_M)

    def combine(self, y_MC: Tensor, plan: DispatchPlan, weights_Tk: Tensor) -> Tensor:
        """Weighted sum over each token's experts [T, C], taken in at least float32."""
        return combine_rows(y_MC, plan.order_M, weights_Tk)


class LatentMoE(nn.Module):
    """y = W_up RMSNorm(sum_j p_j E_j(W_down x)) + Shared(x)  (report eqs. 11-13)."""

    def __init__(self, config: TextConfig, layer: int) -> None:
        super().__init__()
        width, latent = config.hidden_size, config.routed_expert_hidden_size
        self.layer, self.num_experts = layer, config.num_experts
        self.router = Router(config)
        self.down_proj = nn.Linear(width, latent, bias=False)
        self.experts: Experts | PackedExperts = Experts(config)
        self.latent_norm = RMSNorm(latent, config.rms_norm_eps)
        self.up_proj = nn.Linear(latent, width, bias=False)
        self.shared = DenseFFN(config, config.shared_intermediate_size) if config.num_shared_experts else None
        self.exchange = LocalExchange()
        self.form = RoutedForm(
            *(config.num_experts_per_token, config.moe_renormalize, config.routed_scaling_factor),
            *(config.activation_situ_beta, config.activation_situ_linear_beta, config.rms_norm_eps),
            grouped=config.topk_group < config.num_expert_group,
        )

    def forward(self, x_TD: Tensor, trace: Trace = NO_TRACE) -> Tensor:
        """y_TD; the trace sees scores, the bias in use and the routes."""
        if isinstance(self.exchange, LocalExchange) and by_kernels(x_TD, self._weights(), self.form):
            return self._fused(x_TD, trace)
        scores_TE, routes = self.router(x_TD)
        trace.routing(self.layer, scores_TE, self.router.bias, routes)
        z_TC = self.down_proj(x_TD)
        z_MC, counts_E, plan = self.exchange.dispatch(z_TC, routes.expert_ids_Tk, self.num_experts)
        name("moe_latents", z_MC)
        y_MC = again("moe_hidden", lambda z_MC: self.experts(z_MC, counts_E), z_MC)
        name("moe_latents", y_MC)
        u_TC = self.exchange.combine(y_MC, plan, routes.weights_Tk)
        name("moe_latents", u_TC)
        normed_TC = self.latent_norm(u_TC)
        name("moe_latents", normed_TC)
        y_TD = self.up_proj(normed_TC)
        return y_TD if self.shared is None else y_TD + self.shared(x_TD)

    def _weights(self) -> RoutedWeights:
        experts = self.experts
        dense = (
            experts.tiles() if isinstance(experts, PackedExperts) else (experts.w1_EIC, experts.w3_EIC, experts.w2_ECI)
        )
        return RoutedWeights(
            *(self.down_proj.weight, self.router.weight, self.router.bias, dense, self.latent_norm.weight)
        )

    def _rest(self) -> Rest:
        if self.shared is None:
            return Rest(self.up_proj.weight, None)
        gate, up, down = self.shared.gate_proj, self.shared.up_proj, self.shared.down_proj
        return Rest(self.up_proj.weight, (gate.weight, up.weight, down.weight))

    def _fused(self, x_TD: Tensor, trace: Trace) -> Tensor:
        """`forward` by kernels, shared experts beside the routed ones; the up-projection adds to what those give."""
        if trace is NO_TRACE and mixes_few(x_TD, self._weights(), self.form, self._rest()):
            return mix_few(x_TD, self._weights(), self.form, self._rest())

        def routed(x_TD: Tensor) -> Tensor:
            u_TC, scores_TE, routes = latent_experts(
                x_TD, self._weights(), self.form, with_scores=trace is not NO_TRACE
            )
            if scores_TE is not None:
                trace.routing(self.layer, scores_TE, self.router.bias, routes)
            return u_TC

        if self.shared is None:
            return self.up_proj(routed(x_TD))
        if runs_beside(x_TD):
            u_TC, y_TD = side_by_side(x_TD, partial(routed, x_TD), partial(self.shared, x_TD))
        else:
            others: list[Tensor] = []
            y_TD = self.shared(x_TD, others=others)
            u_TC = routed(*others)
        return y_TD.addmm_(u_TC, self.up_proj.weight.T)


def keep_packed(model: Model, config: TextConfig) -> Model:
    """The model itself, every layer's routed experts replaced by ones that stay in MXFP4, with undefined values."""
    for module in model.modules():
        if isinstance(module, LatentMoE):
            module.experts = PackedExperts(config)
    return model
