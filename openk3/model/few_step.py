"""FewSteps: a decoding step of very few tokens, layer by layer by kernels that read depth themselves and add to it.

All sources of depth lie in one piece of memory. What would be launches of their own (reads of depth and their norms,
sums, the norm and gate of KDA's outputs) is done by the kernels in front of it or behind it: 7 launches in a KDA layer
and 11 in an MLA layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from openk3.config.model import TextConfig
from openk3.model.depth import DepthQuery
from openk3.model.kda import KimiDeltaAttention
from openk3.model.layer import Layer
from openk3.model.mla import GatedMLA
from openk3.model.moe import DenseFFN, LatentMoE, LocalExchange
from openk3.model.norm import RMSNorm
from openk3.model.step_cache import OneTokenStates, StepLatents
from openk3.ops.attn_res import mix_depth
from openk3.ops.few.latent import attend_alone, attends_alone, step_few, steps_few
from openk3.ops.few.linear import add_linear, takes
from openk3.ops.few.mixture import Reading, mixes_few, read_dense, read_linear, read_mixture, reads_itself
from openk3.ops.few.states import StateWeights, step_states, steps_states
from openk3.ops.joint_linear import as_one

_LINEARS = (nn.Linear, RMSNorm)


class FewSteps:
    """One step over all layers of a model; the sources of depth, and how many writes there have been."""

    def __init__(self, x_ND: Tensor, layers: Sequence[Layer], writes_per_block: int) -> None:
        blocks = -(-2 * len(layers) // writes_per_block)
        self._stream_LND = x_ND.new_empty(1 + blocks, *x_ND.shape)
        self._stream_LND[0] = x_ND
        self._layers, self._per_block, self._num_writes = layers, writes_per_block, 0

    def run(self, caches: Sequence[object]) -> None:
        """All layers."""
        for layer, cache in zip(self._layers, caches, strict=True):
            self._mix(layer, cache)
            self._feed(layer)

    def read(self, query: DepthQuery) -> Tensor:
        """The last read, without a norm."""
        return mix_depth(list(self._stream_LND[: self._sources]), query.proj, query.norm, query.eps)[0]

    @property
    def _sources(self) -> int:
        return 1 + -(-self._num_writes // self._per_block)

    def _reading(self, query: DepthQuery, norm: RMSNorm) -> Reading:
        return Reading(self._stream_LND, self._sources, (query.proj, query.norm, norm.weight), query.eps)

    def _target(self) -> tuple[Tensor, bool]:
        """The running block's sum, and whether there is something in it; counts a write."""
        block, within = divmod(self._num_writes, self._per_block)
        self._num_writes += 1
        return self._stream_LND[1 + block], within > 0

    def _mix(self, layer: Layer, cache: object) -> None:
        mixer, reading = layer.mixer, self._reading(layer.mix_query, layer.mix_norm)
        weights = _joint(mixer)
        joint_NC = read_linear(reading, _whole(weights))
        parts = joint_NC.split([len(weight) for weight in weights], -1)
        into_ND, add = self._target()
        if isinstance(mixer, KimiDeltaAttention):
            places = cast(OneTokenStates, cache).state_places()
            assert places is not None
            step_states(parts, _state_weights(mixer), places, into_ND, add=add)
            return
        latents, mla = cast(StepLatents, cache), mixer
        where = latents.pages
        narrow_NC, latent_NC, gate_NC = (*parts, None)[:3]
        attend: Any = partial(latents.read, scale=mla.scale)
        if attends_alone(latent_NC, where):
            attend = partial(attend_alone, latents=where, scale=mla.scale)
        given = narrow_NC, latent_NC, gate_NC, mla._few_weights
        gated_NC = step_few(*given, places=latents.places, attend=attend)
        add_linear(gated_NC, mla.o_proj.weight, into_ND, add=add)

    def _feed(self, layer: Layer) -> None:
        reading, ffn = self._reading(layer.ffn_query, layer.ffn_norm), layer.ffn
        into_ND, add = self._target()
        if isinstance(ffn, LatentMoE):
            read_mixture(reading, ffn._weights(), ffn.form, ffn._rest(), into_ND, add=add)
            return
        dense = cast(DenseFFN, ffn)
        weights = dense.gate_proj.weight, dense.up_proj.weight, dense.down_proj.weight
        read_dense(reading, weights, (dense.beta, dense.linear_beta), into_ND, add=add)


def few_hidden(
    x_ND: Tensor, layers: Iterable[nn.Module], config: TextConfig, caches: Sequence[object], query: DepthQuery
) -> Tensor | None:
    """What a model's layers make of a step's embedded tokens [N, D], as `query` reads it; None where `few_steps` is."""
    if config.attn_res_mode == "full":
        return None
    steps = few_steps(x_ND, [cast(Layer, layer) for layer in layers], 2 * config.attn_res_block_size, caches)
    if steps is None:
        return None
    steps.run(caches)
    return steps.read(query)


@torch.no_grad()
def few_steps(
    x_ND: Tensor, layers: Sequence[Layer], writes_per_block: int, caches: Sequence[object]
) -> FewSteps | None:
    """A step if all layers are of this package's parts as they are, and kernels take their weights and caches."""
    if not reads_itself(x_ND, 1 + -(-2 * len(layers) // writes_per_block)):
        return None
    if not all(isinstance(cache, (OneTokenStates, StepLatents)) for cache in caches):
        return None
    fits = all(_takes_layer(x_ND, layer, cache) for layer, cache in zip(layers, caches, strict=True))
    return FewSteps(x_ND, layers, writes_per_block) if fits else None


def _takes_layer(x_ND: Tensor, layer: Layer, cache: object) -> bool:
    if not _plain(layer) or layer.mix_query.eps != layer.mix_norm.eps or layer.ffn_query.eps != layer.ffn_norm.eps:
        return False
    queries = [each for query in (layer.mix_query, layer.ffn_query) for each in (query.proj, query.norm)]
    vectors = (*queries, layer.mix_norm.weight, layer.ffn_norm.weight, layer.mixer.o_proj.weight)
    if any(x.dtype != x_ND.dtype or not x.is_contiguous() for x in vectors):
        return False
    return _takes_mixer(x_ND, layer.mixer, cache) and _takes_ffn(x_ND, layer.ffn)


def _takes_mixer(x_ND: Tensor, mixer: nn.Module, cache: object) -> bool:
    joint = as_one(_joint(mixer))
    if joint is None or joint.dtype != x_ND.dtype:
        return False
    if isinstance(mixer, KimiDeltaAttention):
        places = cache.state_places() if isinstance(cache, OneTokenStates) else None
        return places is not None and steps_states(x_ND, _state_weights(mixer), places)
    if not isinstance(mixer, GatedMLA) or not isinstance(cache, StepLatents):
        return False
    latent_NC = x_ND.new_empty(len(x_ND), mixer.kv_rank + mixer.shared)
    return takes(x_ND, mixer.o_proj.weight.shape[1]) and steps_few(latent_NC, mixer._few_weights, cache.places)


def _takes_ffn(x_ND: Tensor, ffn: nn.Module) -> bool:
    if isinstance(ffn, LatentMoE):
        return isinstance(ffn.exchange, LocalExchange) and mixes_few(x_ND, ffn._weights(), ffn.form, ffn._rest())
    if not isinstance(ffn, DenseFFN):
        return False
    weights = ffn.gate_proj.weight, ffn.up_proj.weight, ffn.down_proj.weight
    return all(x.dtype == x_ND.dtype and x.is_contiguous() for x in weights)


def _joint(mixer: nn.Module) -> list[Tensor]:
    maps = [getattr(mixer, name) for name in cast("tuple[str, ...]", mixer.joint)]
    return [each.weight for each in maps if each is not None]


def _whole(weights: Sequence[Tensor]) -> Tensor:
    whole = as_one(weights)
    assert whole is not None
    return whole


def _state_weights(mixer: KimiDeltaAttention) -> StateWeights:
    norm = mixer.o_norm.weight, mixer.o_norm.eps
    return StateWeights(mixer.f_b_proj.weight, mixer._convolutions, mixer.decay_gate, norm, mixer.o_proj.weight)


def _plain(layer: Layer) -> bool:
    """Whether nobody has hooked himself into a layer or put another class or `forward` in."""
    known = {Layer, KimiDeltaAttention, GatedMLA, DenseFFN, LatentMoE}
    for module in layer.modules():
        changed = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
        foreign = isinstance(module, (Layer, KimiDeltaAttention, GatedMLA, DenseFFN, LatentMoE, *_LINEARS))
        if changed or (foreign and type(module) not in (*known, *_LINEARS)):
            return False
    return True
