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
from openk3.model.trace import NO_TRACE, Trace


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
        y_TD = self.mixer(depth.read_normed(self.mix_query, self.mix_norm), sequences, cache, trace)
        depth.write(y_TD)
        trace.mixer_out(self.index, y_TD)
        y_TD = self.ffn(depth.read_normed(self.ffn_query, self.ffn_norm), trace)
        depth.write(y_TD)
        trace.ffn_out(self.index, y_TD)
        if trace.wants("layer_out"):
            trace.layer_out(self.index, depth.prefix_TD)
