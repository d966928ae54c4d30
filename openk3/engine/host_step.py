"""HostStep: a pass on a CPU, all layers in as few calls of torch as there can be.

With few tokens a CPU waits for calls, not for arithmetic: in a pass of 32 requests with recipe `tiny` the modules
of `model`, which serve training and every format too, run 1,440 kernels and make 1,500 views. This is the same
arithmetic in 620 and 200, for float32 and float64 without gradients: requests of one token are batched in every one of
them, pages are read by one gather, what depends on weights alone is computed once. Requests of several tokens keep the
modules of their mixers, and share the rest. Rounding may differ in the last digit. See docs/serving_speed.md.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from openk3.engine.host_form import Form, is_plain
from openk3.engine.host_moe import HostFeedForward
from openk3.engine.host_pages import HostPages
from openk3.engine.paged_cache import Batch, PagedCache, PagedLatents, PagedStates
from openk3.model.cache import Sequences
from openk3.model.depth import DepthQuery
from openk3.model.k3 import K3
from openk3.model.kda import KimiDeltaAttention
from openk3.model.layer import Layer
from openk3.model.mla import GatedMLA
from openk3.ops.backend import pick
from openk3.ops.joint_linear import joint_linear
from openk3.ops.kda.reference import kda_gate
from openk3.ops.norm import L2_EPS

MOST_MIXED = 1 << 24  # values of mixtures of depth that may be there at once (float32: 64 MiB)
SMALL_STATE = 512  # values of a head's state up to which products by elements beat small matrix products


class HostStep:
    """The backbone of a model whose parts and weights stay as they are (see Form), over the pages of one engine."""

    def __init__(self, model: K3, cache: PagedCache) -> None:
        layers = [cast(Layer, layer) for layer in model.layers]
        self._cache, self._width = cache, model.config.text.latent_dim
        self._depth = [HostDepth(queries) for queries in _blocks(model)]
        self._norms = [norm for layer in layers for norm in (layer.mix_norm, layer.ffn_norm)]
        self._parts: list[HostMixer | HostFeedForward] = []
        for layer, place in zip(layers, cache.layers):
            self._parts += [HostMixer(layer.mixer, place), HostFeedForward(layer.ffn, model.embed.weight.dtype)]

    @staticmethod
    def applies(model: K3) -> bool:
        """Whether a model's weights and form are ones that this reads; any other takes the pass of its modules."""
        weight, text = model.embed.weight, model.config.text
        fits = weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.float64)
        return fits and text.attn_res_mode != "full" and pick("norm", weight) == "reference" and is_plain(model)

    def fits(self, x_TD: Tensor) -> bool:
        """Whether mixtures of depth for that many tokens may be there at once."""
        return x_TD.numel() * max(depth.num_reads for depth in self._depth) <= MOST_MIXED

    def __call__(self, x_TD: Tensor) -> Tensor:
        """h_TD of embedded tokens of the bound requests, those with one token first; states and latents move on."""
        whole = self._cache.batch
        try:
            return self._run(x_TD, _Passing.of(self._cache, self._width))
        finally:
            self._cache.batch = whole

    def _run(self, x_TD: Tensor, passing: _Passing) -> Tensor:
        sources, parts = [x_TD], zip(self._parts, self._norms)
        for depth in self._depth:
            depth.open(sources)
            block_TD: Tensor | None = None
            for n in range(depth.num_reads):
                h_TD = depth.read(n, block_TD)
                if depth.is_last and n == depth.num_reads - 1:
                    return h_TD
                part, norm = next(parts)
                y_TD = part(F.rms_norm(h_TD, norm.weight.shape, norm.weight, norm.eps), passing)
                block_TD = y_TD if block_TD is None else block_TD + y_TD
            assert block_TD is not None
            sources.append(block_TD)
        raise AssertionError("the last read of depth is the output's")


class HostSteps:
    """The steps of one model, each for as long as the model's parts and weights are what it has read."""

    def __init__(self, model: K3, cache: PagedCache) -> None:
        self._model, self._cache = model, cache
        self._form: Form | None = None
        self._step: HostStep | None = None

    @torch.no_grad()
    def now(self) -> HostStep | None:
        """What runs a pass in place of the model's modules; None: they do."""
        if self._model.embed.weight.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
            return None
        if self._form is None or not self._form.holds():
            self._form = Form(self._model)
            self._step = HostStep(self._model, self._cache) if HostStep.applies(self._model) else None
        return self._step


class _Passing(NamedTuple):
    """A pass's requests in two parts: `single` of one token with their pages, and the others with their layout."""

    cache: PagedCache
    single: int
    first: Batch
    pages: HostPages | None
    rest: Batch
    sequences: Sequences

    @classmethod
    def of(cls, cache: PagedCache, width: int) -> _Passing:
        """The parts of the requests that are bound."""
        spans = cache.batch.spans
        single = sum(span.num_tokens == 1 for span in spans)
        first, rest = cache.bind(spans[:single]), cache.bind(spans[single:])
        return cls(
            cache, single, first, HostPages.of(first, width) if single else None, rest, Sequences(rest.cu_seqlens)
        )


class HostMixer:
    """One layer's mixer: in few calls for requests of one token, by its module for the others."""

    def __init__(self, mixer: nn.Module, place: PagedStates | PagedLatents) -> None:
        self._module, self._place = mixer, place
        self._step: HostKda | HostMla
        if isinstance(place, PagedStates):
            self._step = HostKda(cast(KimiDeltaAttention, mixer), place)
        else:
            self._step = HostMla(cast(GatedMLA, mixer), place)

    def __call__(self, x_TD: Tensor, passing: _Passing) -> Tensor:
        """y_TD."""
        found = []
        if passing.pages is not None:
            passing.cache.batch = passing.first
            found.append(self._step(x_TD[: passing.single], passing.pages))
        if passing.rest.spans:
            passing.cache.batch = passing.rest
            found.append(self._module(x_TD[passing.single :], passing.sequences, self._place))
        return found[0] if len(found) == 1 else torch.cat(found)


def _blocks(model: K3) -> list[list[DepthQuery]]:
    """Reads of depth, cut where sources change."""
    queries, size = model.depth_queries(), 2 * model.config.text.attn_res_block_size
    return [queries[n : n + size] for n in range(0, len(queries), size)]


class HostDepth:
    """The reads of depth of one block: finished sources once for all of them, then the running sum (report 5.4.2)."""

    def __init__(self, queries: list[DepthQuery]) -> None:
        self.num_reads, self.eps = len(queries), queries[0].eps
        self.is_last = queries[-1].site == "output"
        self._vector_QD = torch.stack([query.vector_D() for query in queries]).detach()
        self._vectors = self._vector_QD.unbind()
        self._mixed: tuple[Tensor, ...] = ()
        self._weight: tuple[Tensor, ...] = ()

    def open(self, sources: list[Tensor]) -> None:
        """Mix the finished sources for every read, and keep how much each mixture weighs: log sum exp of scores."""
        if len(sources) == 1:
            x_ND = sources[0]
            scores_NQ = F.rms_norm(x_ND, x_ND.shape[1:], None, self.eps) @ self._vector_QD.T
            self._mixed, self._weight = (x_ND,) * self.num_reads, scores_NQ.unbind(1)
            return
        values_NLD = torch.stack(sources, 1)
        keys_NLD = F.rms_norm(values_NLD, values_NLD.shape[2:], None, self.eps)
        scores_NLQ = keys_NLD @ self._vector_QD.T
        top_NQ = scores_NLQ.amax(1)
        parts_NLQ = (scores_NLQ - top_NQ[:, None]).exp_()
        sum_NQ = parts_NLQ.sum(1)
        mixed_NQD = torch.bmm((parts_NLQ / sum_NQ[:, None]).mT, values_NLD)
        self._mixed, self._weight = mixed_NQD.unbind(1), sum_NQ.log_().add_(top_NQ).unbind(1)

    def read(self, n: int, block_ND: Tensor | None) -> Tensor:
        """The softmax over depth [N, D]; of two parts it is a sigmoid of the difference."""
        if block_ND is None:
            return self._mixed[n]
        score_N = torch.mv(F.rms_norm(block_ND, block_ND.shape[1:], None, self.eps), self._vectors[n])
        share_N = score_N.sub_(self._weight[n]).sigmoid_()
        return torch.lerp(self._mixed[n], block_ND, share_N[:, None])


class HostKda:
    """One KDA layer (see KimiDeltaAttention), states and windows in their pages."""

    def __init__(self, mixer: KimiDeltaAttention, place: PagedStates) -> None:
        self._maps = [cast(nn.Linear, getattr(mixer, name)).weight for name in mixer.joint]
        self._decay_map, self._out_map = mixer.f_b_proj.weight, mixer.o_proj.weight
        convolutions = mixer.q_conv1d, mixer.k_conv1d, mixer.v_conv1d
        self._taps_XW = torch.cat([each.weight for each in convolutions]).detach()
        self._heads, self._gate = mixer.heads, mixer.decay_gate
        self._norm, self._eps = mixer.o_norm.weight, mixer.o_norm.eps
        bound = self._gate.lower_bound
        self._slope = None if bound is None else self._gate.A_log_H.exp().clamp(max=torch.finfo(mixer.A_log.dtype).max)
        self._place = place

    def __call__(self, x_ND: Tensor, pages: HostPages) -> Tensor:
        """y_ND."""
        heads = self._heads
        *inputs, gate_NC, narrow_NK, beta_NH = joint_linear(x_ND, self._maps)
        state_NHKV, window_NXP = self._place.gather()
        window_NXW = torch.cat((window_NXP, torch.cat(inputs, -1).unsqueeze(-1)), -1)
        tokens_NX = F.silu((window_NXW * self._taps_XW).sum(-1))
        tokens_N3HK = tokens_NX.view(len(x_ND), 3, heads, -1)
        pairs_N2HK, v_NHV = tokens_N3HK[:, :2], tokens_N3HK[:, 2]
        inverse = torch.linalg.vector_norm(pairs_N2HK, dim=-1, keepdim=True).square_().add_(L2_EPS).rsqrt_()
        q_NHK, k_NHK = (pairs_N2HK * inverse).unbind(1)
        alpha_NHK = self._log_decay(F.linear(narrow_NK, self._decay_map).view_as(k_NHK)).exp_()
        state_NHKV.mul_(alpha_NHK.unsqueeze(-1))
        error_NHV = (v_NHV - _read(state_NHKV, k_NHK)).mul_(beta_NH.sigmoid().unsqueeze(-1))
        state_NHKV.addcmul_(k_NHK.unsqueeze(-1), error_NHV.unsqueeze(-2))
        o_NHV = _read(state_NHKV, q_NHK).mul_(k_NHK.shape[-1] ** -0.5)
        self._place.scatter(state_NHKV, window_NXW[..., 1:])
        o_NHV = F.rms_norm(o_NHV, self._norm.shape, self._norm, self._eps)
        return F.linear(o_NHV.view(len(x_ND), -1).mul_(gate_NC.sigmoid()), self._out_map)

    def _log_decay(self, logit_NHK: Tensor) -> Tensor:
        """A fresh tensor: `kda_gate`, with the slope at hand."""
        if self._slope is None:
            return kda_gate(logit_NHK, self._gate)
        opened = (logit_NHK + self._gate.dt_bias_HK).mul_(self._slope[:, None]).sigmoid_()
        return opened.mul_(cast(float, self._gate.lower_bound))


def _read(state_NHKV: Tensor, key_NHK: Tensor) -> Tensor:
    """S^T key [N, H, V]."""
    if state_NHKV.shape[2] * state_NHKV.shape[3] <= SMALL_STATE:
        return (state_NHKV * key_NHK.unsqueeze(-1)).sum(-2)
    return (key_NHK.unsqueeze(-2) @ state_NHKV).squeeze(-2)


class HostMla:
    """One MLA layer in absorbed form (see GatedMLA), latents in their pages."""

    def __init__(self, mixer: GatedMLA, place: PagedLatents) -> None:
        maps = (mixer.q_a_proj, mixer.kv_a_proj_with_mqa, mixer.g_proj)
        self._maps = [each.weight for each in maps if each is not None]
        self._q_map, self._out_map = mixer.q_b_proj.weight, mixer.o_proj.weight
        self._q_norm, self._latent_norm = mixer.q_a_layernorm, mixer.kv_a_layernorm
        self._rank, self._scale = mixer.kv_rank, mixer.scale
        self._nope, self._shared, self._heads = mixer.nope, mixer.shared, mixer.heads
        up_HXC = mixer.kv_b_proj.weight.detach().unflatten(0, (mixer.heads, -1))
        self._key_HKC, value_HVC = up_HXC.split((mixer.nope, mixer.value), 1)
        self._value_HCV = value_HVC.mT
        self._place = place

    def __call__(self, x_ND: Tensor, pages: HostPages) -> Tensor:
        """y_ND."""
        narrow_NC, joint_NC, *gate_NC = joint_linear(x_ND, self._maps)
        normed_NC = F.rms_norm(narrow_NC, self._q_norm.weight.shape, self._q_norm.weight, self._q_norm.eps)
        q_HNK = F.linear(normed_NC, self._q_map).view(len(x_ND), self._heads, -1).transpose(0, 1)
        latent_NC, shared_NR = joint_NC.split((self._rank, self._shared), -1)
        latent_NC = F.rms_norm(
            latent_NC, self._latent_norm.weight.shape, self._latent_norm.weight, self._latent_norm.eps
        )
        self._place.write(torch.cat((latent_NC, shared_NR), -1))
        q_HNK, q_shared_HNR = q_HNK.split((self._nope, self._shared), -1)
        q_HNC = torch.cat((torch.bmm(q_HNK, self._key_HKC), q_shared_HNR), -1)
        ctx_NHC = pages.attend(q_HNC.transpose(0, 1), self._place.latents_PTC, self._rank, self._scale)
        o_NHV = torch.bmm(ctx_NHC.transpose(0, 1), self._value_HCV).transpose(0, 1)
        o_NC = o_NHV.reshape(len(x_ND), -1)
        return F.linear(o_NC.mul_(gate_NC[0].sigmoid()) if gate_NC else o_NC, self._out_map)
