"""Layer: read depth, mix tokens, write; read depth, mix channels, write."""

from __future__ import annotations

from torch import nn

from openk3.config.model import TextConfig
from openk3.model.cache import LatentCache, Sequences, StateCache
from openk3.model.depth import DepthQuery, DepthStream, ResidualStream
from openk3.model.kda import KimiDeltaAttention
from openk3.model.mla import GatedMLA
from openk3.model.moe import DenseFFN, LatentMoE
from openk3.model.norm import RMSNorm
from openk3.model.trace import NO_TRACE, Trace, once
from openk3.ops.saved import again


class Layer(nn.Module):
    """One backbone layer: a KDA or MLA token mixer and a LatentMoE or dense feed-forward part."""

    def __init__(self, config: TextConfig, index: int, kind: str, moe: bool) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.index = index
        self.mix_query = DepthQuery(width, eps, index, "mixer")
        self.mix_norm = RMSNorm(width, eps)
        self.mixer = KimiDeltaAttention(config, index) if kind == "kda" else GatedMLA(config, index)
        self.ffn_query = DepthQuery(width, eps, index, "ffn")
        self.ffn_norm = RMSNorm(width, eps)
        self.ffn = LatentMoE(config, index) if moe else DenseFFN(config, config.intermediate_size)

    def forward(
        self,
        depth: DepthStream | ResidualStream,
        sequences: Sequences,
        cache: StateCache | LatentCache | None = None,
        trace: Trace = NO_TRACE,
    ) -> None:
        """Reads from and writes to `depth`; there is no other path from layer to layer."""
        x_TD = depth.read_normed(self.mix_query, self.mix_norm)
        with once(trace, "mixer") as to_mixer:
            y_TD = again("mixer", lambda x_TD: self.mixer(x_TD, sequences, cache, to_mixer), x_TD)
        depth.write(y_TD)
        trace.mixer_out(self.index, y_TD)
        x_TD = depth.read_normed(self.ffn_query, self.ffn_norm)
        with once(trace, "ffn") as to_ffn:  # not the mixer's: that may run again after this
            y_TD = again("ffn", lambda x_TD: self.ffn(x_TD, to_ffn), x_TD)
        depth.write(y_TD)
        trace.ffn_out(self.index, y_TD)
        if trace.wants("layer_out"):
            trace.layer_out(self.index, depth.prefix_TD)
