"""HostFeedForward: a layer's feed-forward part for few tokens on a CPU, dense or LatentMoE, in few calls of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from openk3.engine.host_form import all_known
from openk3.model.moe import DenseFFN, Experts, LatentMoE, LocalExchange
from openk3.model.trace import NO_TRACE
from openk3.ops.grouped_linear import grouped_linear
from openk3.ops.joint_linear import joint_linear
from openk3.ops.routing import route
from openk3.ops.situ import situ_glu

FEW_VALUES = 1 << 15  # up to which torch's tanh is quicker than oneDNN's


class HostFeedForward:
    """`LatentMoE` or `DenseFFN`; one with parts of other classes, packed experts say, or with hooks runs as it is."""

    def __init__(self, part: nn.Module, dtype: torch.dtype) -> None:
        self._run: Callable[[Tensor], Tensor] = lambda x_ND: part(x_ND, NO_TRACE)
        if not all_known(part.modules(), dtype):
            return
        if isinstance(part, DenseFFN):
            self._run = HostDense(part)
        elif isinstance(part, LatentMoE) and type(part.exchange) is LocalExchange:
            self._run = HostMoe(part)

    def __call__(self, x_ND: Tensor, passing: object) -> Tensor:
        """y_ND; it reads no pages."""
        return self._run(x_ND)


class HostDense:
    """W_down SiTU-GLU(W_gate x, W_up x)."""

    def __init__(self, part: DenseFFN) -> None:
        self._maps = part.gate_proj.weight, part.up_proj.weight
        self._out_map = part.down_proj.weight
        self._betas = part.beta, part.linear_beta

    def __call__(self, x_ND: Tensor) -> Tensor:
        """y_ND."""
        gate_NI, up_NI = joint_linear(x_ND, self._maps)
        return F.linear(situ(gate_NI, up_NI, *self._betas), self._out_map)


class HostMoe:
    """LatentMoE with all its experts here."""

    def __init__(self, part: LatentMoE) -> None:
        self._router = part.router
        self._down_map, self._up_map, self._norm = part.down_proj.weight, part.up_proj.weight, part.latent_norm
        self._experts, self._shared = cast(Experts, part.experts), None
        self._betas = self._experts.beta, self._experts.linear_beta
        if part.shared is not None:
            self._shared = HostDense(part.shared)
        self._weights = self._experts.w1_EIC, self._experts.w3_EIC, self._experts.w2_ECI
        widths = self._weights[0].shape[1:]
        whole = all(width * 4 % 16 == 0 for width in widths)
        self._by_kernel = self._weights[0].dtype == torch.float32 and whole

    def __call__(self, x_ND: Tensor) -> Tensor:
        """y_ND."""
        ids_Nk, weights_Nk = self._choose(x_ND)
        slot_M, k = ids_Nk.view(-1), ids_Nk.shape[1]
        order_M = torch.argsort(slot_M, stable=True)
        token_M = order_M // k
        counts_E = torch.bincount(slot_M, minlength=len(self._weights[0]))
        z_NC = F.linear(x_ND, self._down_map)
        y_MC = self._expert_rows(z_NC.index_select(0, token_M), counts_E)
        y_MC.mul_(weights_Nk.view(-1).index_select(0, order_M).unsqueeze(1))
        u_NC = torch.zeros_like(z_NC).index_add_(0, token_M, y_MC)
        u_NC = F.rms_norm(u_NC, self._norm.weight.shape, self._norm.weight, self._norm.eps)
        if self._shared is None:
            return F.linear(u_NC, self._up_map)
        return torch.addmm(self._shared(x_ND), u_NC, self._up_map.T)

    def _choose(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Experts and weights of each token [N, k]; `route`, without its care for equal scores where none are."""
        router = self._router
        scores_NE = F.linear(x_ND, router.weight).sigmoid_()
        most = min(router.k + 1, scores_NE.shape[1])
        if router.topk_group >= router.groups:
            values, ids = (scores_NE + router.bias).topk(most, dim=-1)
            if not bool((values[:, 1:] == values[:, :-1]).any()):
                ids_Nk = ids[:, : router.k]
                weights_Nk = scores_NE.gather(1, ids_Nk)
                if router.renormalize and router.k > 1:
                    weights_Nk = weights_Nk / (weights_Nk.sum(-1, keepdim=True) + 1e-20)
                return ids_Nk.contiguous(), weights_Nk * router.scale
        options = {"groups": router.groups, "topk_group": router.topk_group, "renormalize": router.renormalize}
        routes = route(scores_NE, router.bias, router.k, scale=router.scale, **options)
        return routes.expert_ids_Tk, routes.weights_Tk

    def _expert_rows(self, z_MC: Tensor, counts_E: Tensor) -> Tensor:
        """What each row's expert makes of it [M, C], rows sorted by expert."""
        w1_EIC, w3_EIC, w2_ECI = self._weights
        if not self._by_kernel:
            gate_MI, up_MI = (grouped_linear(z_MC, weight, counts_E) for weight in (w1_EIC, w3_EIC))
            return grouped_linear(situ(gate_MI, up_MI, *self._betas), w2_ECI, counts_E)
        ends_E = counts_E.cumsum(0, dtype=torch.int32)
        gate_MI, up_MI = (F.grouped_mm(z_MC, weight.mT, offs=ends_E) for weight in (w1_EIC, w3_EIC))
        return F.grouped_mm(situ(gate_MI, up_MI, *self._betas), w2_ECI.mT, offs=ends_E)


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """`situ_glu`, which has the quicker tanh for many values."""
    if gate.numel() > FEW_VALUES:
        return situ_glu(gate, up, beta, linear_beta)
    out = (gate / beta).tanh_().mul_(gate.sigmoid())
    if linear_beta is None:
        return out.mul_(up).mul_(beta)
    return out.mul_((up / linear_beta).tanh_()).mul_(beta * linear_beta)
