"""MTPLayer: one more decoder layer that predicts the token after the next one; first a training signal, then a draft.

Report section 4.1.4. Structure of the released loaders: an MLA + MoE layer on [norm(embedding of t+1) ; norm(h_t)].
Its depth queries exist in the checkpoint layout and do nothing, because the layer reads a single source.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from openk3.config.model import TextConfig
from openk3.model.cache import LatentCache, Sequences
from openk3.model.depth import ResidualStream
from openk3.model.layer import Layer
from openk3.model.mla import GatedMLA
from openk3.model.norm import RMSNorm
from openk3.model.trace import NO_TRACE, Trace
from openk3.ops.device_tables import device_table, sent
from openk3.ops.sequences import bounds_on, remember_integers


class MTPLayer(nn.Module):
    """h'_t = Layer(W_eh [RMSNorm(embed(x_{t+1})) ; RMSNorm(h_t)]); lm_head(norm(h'_t)) predicts x_{t+2}."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = RMSNorm(width, eps)
        self.hnorm = RMSNorm(width, eps)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.layer = Layer(config, config.num_hidden_layers, "mla", moe=True)
        self.norm = RMSNorm(width, eps)

    def forward(
        self,
        h_TD: Tensor,
        next_TD: Tensor,
        sequences: Sequences,
        cache: LatentCache | None = None,
        trace: Trace = NO_TRACE,
    ) -> Tensor:
        """h'_TD before `norm`, from h_t and the embedding of token t + 1.

        h_t is the backbone's output mix before its final norm. h'_t can stand for h_{t+1} in the next call: that is
        how a draft goes on.
        """
        depth = ResidualStream(self._joined(h_TD, next_TD))
        self.layer(depth, sequences, cache, trace)
        return depth.prefix_TD

    def latent(self, h_TD: Tensor, next_TD: Tensor) -> Tensor:
        """What `forward` would add to its cache [T, C+R], at a small part of its cost: there is no layer before it."""
        return cast(GatedMLA, self.layer.mixer).latent(self.layer.mix_norm(self._joined(h_TD, next_TD)))

    def _joined(self, h_TD: Tensor, next_TD: Tensor) -> Tensor:
        return self.eh_proj(torch.cat((self.enorm(next_TD), self.hnorm(h_TD)), -1))


class Pairs(NamedTuple):
    """Positions t that have a next token in their own sequence, and the layout of the sequences that they form."""

    here_T: Tensor
    sequences: Sequences


def next_token_pairs(sequences: Sequences) -> Pairs:
    """Every position but the last of each sequence, so that no pair crosses a boundary; t + 1 is `here_T + 1`.

    Made once for batches of the same layout: the tensors are not to be written to.
    """
    return _pairs(tuple(sequences.lengths), sequences.cu_seqlens.device)


@device_table(4)
def _pairs(lengths: tuple[int, ...], device: torch.device) -> Pairs:
    # Made on the CPU, so that a GPU need not be asked how many there are.
    counts = [max(0, length - 1) for length in lengths]
    bounds = tuple(accumulate(counts, initial=0))
    starts_N = torch.tensor((0, *accumulate(lengths[:-1])), dtype=torch.int64)[: len(lengths)]
    shift_N = starts_N - torch.tensor(bounds[:-1], dtype=torch.int64)
    here_T = torch.arange(bounds[-1]) + shift_N.repeat_interleave(torch.tensor(counts, dtype=torch.int64))
    shorter = bounds_on(bounds, device)
    remember_integers(shorter, bounds)
    return Pairs(sent(here_T, device), Sequences(shorter))
