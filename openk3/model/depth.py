"""DepthStream, K3's replacement of the residual stream: each sub-layer reads a softmax over what earlier ones wrote.

Block form (report eq. 10): the embedding and every finished block's sum are sources, and so is the running sum of the
unfinished block. Full form (eqs. 8-9): every sub-layer's output is a source of its own, that is, a block of one write.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from openk3.config.model import TextConfig
from openk3.model.norm import RMSNorm
from openk3.model.trace import NO_TRACE, Trace
from openk3.ops.attn_res import fuses, inter_block, merge_normed, merge_partial, mix_depth, mix_depth_normed
from openk3.ops.norm import at_least_float32
from openk3.ops.saved import name, remake

PHASE_ONE_ELEMENTS = 1 << 26  # values of sources and mixtures that phase one may hold at once (256 MiB in float32)
# Where kernels read depth: as many in the sources' own format, and only where two phases move fewer bytes than one.
FUSED_PHASE_ONE_ELEMENTS, FUSED_PHASE_ONE_TOKENS, FUSED_PHASE_ONE_SOURCES = 1 << 30, 256, 3


class DepthQuery(nn.Module):
    """One place that reads depth: the pseudo-query `proj` and the key norm weight `norm`, both [D]."""

    def __init__(self, width: int, eps: float, layer: int, site: str) -> None:
        super().__init__()
        self.eps, self.layer, self.site = eps, layer, site
        self.norm = nn.Parameter(torch.empty(width))
        self.proj = nn.Parameter(torch.empty(width))

    def vector_D(self) -> Tensor:
        """norm * proj, all that scoring needs, in at least float32."""
        return at_least_float32(self.norm) * at_least_float32(self.proj)


class _PhaseOne(NamedTuple):
    """One query over the finished sources: mixture [T, D], largest score [T], sum of exponentials [T]."""

    vector_D: Tensor
    o_TD: Tensor
    max_T: Tensor
    sum_T: Tensor


class DepthStream:
    """Depth sources of one forward pass over T tokens.

    `writes_per_block`: 2 * attn_res_block_size in block form (a layer writes twice), 1 in full form.
    `upcoming`: all reads in order; if given, reads are evaluated in two phases (report section 5.4.2), which is the
    same softmax with the finished sources read once for many queries. It is for inference: no weights are traced.
    """

    def __init__(
        self,
        x_TD: Tensor,
        writes_per_block: int,
        *,
        trace: Trace = NO_TRACE,
        upcoming: Sequence[DepthQuery] = (),
    ) -> None:
        self.sources = [x_TD]
        self.partial: Tensor | None = None
        self.writes_per_block = writes_per_block
        self.trace = trace
        name("depth_sources", x_TD)
        self._fused = fuses([x_TD])
        self._few = self._fused and len(x_TD) < FUSED_PHASE_ONE_TOKENS  # one phase only
        self._unsummed: Tensor | None = None  # written, and not yet in `partial`: the next read adds it on its way
        self._upcoming = list(upcoming)
        self._num_reads = 0
        self._num_writes = 0
        self._phase_one: list[_PhaseOne] = []

    @property
    def prefix_TD(self) -> Tensor:
        """The running block sum, or the block that was finished last."""
        self._settle()
        return self.sources[-1] if self.partial is None else self.partial

    def read(self, query: DepthQuery) -> Tensor:
        """h [T, D] = sum_i p_i v_i over the sources so far, p = softmax_i(query . RMSNorm(v_i))."""
        self._settle()
        self._num_reads += 1
        if self._has_phase_one():
            return self._merge(self._phase_one.pop(0), query.eps)
        sources = self.sources if self.partial is None else [*self.sources, self.partial]
        if len(sources) == 1:
            return sources[0]
        h_TD, probs_TL = mix_depth(sources, query.proj, query.norm, query.eps)
        remake("layer_inputs", [h_TD], partial(_mixed, query), *sources)
        self.trace.depth(query.layer, query.site, probs_TL)
        return h_TD

    def read_normed(self, query: DepthQuery, norm: RMSNorm) -> Tensor:
        """norm(read(query)) [T, D]; kernels do both, and the sum of the last write, in one pass over the sources."""
        closing = self._num_writes % self.writes_per_block == 0
        shares = bool(self._upcoming) and not self._few  # may begin a phase one
        alone = self.partial is None and (len(self.sources) == 1 or shares)
        if not self._fused or alone or norm.eps != query.eps or (closing and shares):
            return _normed(self.read(query), norm)
        self._num_reads += 1
        if self.partial is not None and self._has_phase_one():
            one = self._phase_one.pop(0)
            normed_TD, newest_TD = merge_normed(
                one[1:], self.partial, one.vector_D, norm.weight, eps=norm.eps, addend_TD=self._unsummed
            )
            self._settle(newest_TD)
            return normed_TD
        sources = self.sources if self.partial is None else [*self.sources, self.partial]
        found = mix_depth_normed(sources, query.proj, query.norm, norm.weight, norm.eps, addend_TD=self._unsummed)
        if self.partial is None:
            self.sources = [*found.earlier, found.newest_TD]
        else:
            self.sources, self.partial = found.earlier, found.newest_TD
            self._settle(found.newest_TD)
        self.trace.depth(query.layer, query.site, found.probs_TL)
        remake(
            "layer_inputs", [found.normed_TD], partial(_mixed_and_normed, query, norm), *found.earlier, found.newest_TD
        )
        return found.normed_TD

    def write(self, y_TD: Tensor) -> None:
        """Add a sub-layer's output to the running block; the block's last write makes it a source."""
        self._settle()
        if self.partial is None:
            self.partial = y_TD
            name("depth_sources", y_TD)
        else:
            self._unsummed = y_TD
        self._num_writes += 1
        if not self._fused:
            self._settle()

    def _settle(self, newest_TD: Tensor | None = None) -> None:
        """Bring the running block up to date, by a sum made elsewhere if there is one, and close it if it is full."""
        if self._unsummed is not None:
            assert self.partial is not None
            self.partial = self.partial + self._unsummed if newest_TD is None else newest_TD
            name("depth_sources", self.partial)
            self._unsummed = None
        if self.partial is not None and self._num_writes % self.writes_per_block == 0:
            self.sources = [*self.sources, self.partial]
            self.partial = None

    def _has_phase_one(self) -> bool:
        """Whether the next read has a phase-one result; begins a phase one if that is worth it."""
        return len(self.sources) > 1 and bool(self._upcoming) and (bool(self._phase_one) or self._begin_phase_one())

    def _begin_phase_one(self) -> bool:
        """Phase one for the next reads, as many as share the finished sources and fit into memory."""
        left_in_block = self.writes_per_block - self._num_writes % self.writes_per_block
        elements = FUSED_PHASE_ONE_ELEMENTS if self._fused else PHASE_ONE_ELEMENTS
        room = elements // max(1, self.sources[0].numel()) - len(self.sources)
        queries = self._upcoming[self._num_reads - 1 :][: max(0, min(left_in_block, room))]
        if len(queries) < 2:  # nothing to share: the plain softmax reads less memory
            return False
        if self._few or (self._fused and len(self.sources) < FUSED_PHASE_ONE_SOURCES):
            return False
        vectors_QD = torch.stack([query.vector_D() for query in queries])
        options = {"dtype": self.sources[0].dtype} if self._fused else {}
        o_QTD, max_QT, sum_QT = inter_block(self.sources, vectors_QD, queries[0].eps, **options)
        self._phase_one = [_PhaseOne(*row) for row in zip(vectors_QD, o_QTD, max_QT, sum_QT, strict=True)]
        return True

    def _merge(self, one: _PhaseOne, eps: float) -> Tensor:
        """Phase two: the running block joins the softmax."""
        if self.partial is None:
            return one.o_TD.to(self.sources[0].dtype)
        return merge_partial(one.o_TD, one.max_T, one.sum_T, self.partial, vector_D=one.vector_D, eps=eps)


class ResidualStream:
    """The stream of the MTP layer: its one source is the running sum, and a softmax over one source is 1."""

    def __init__(self, x_TD: Tensor) -> None:
        self.prefix_TD = x_TD
        name("depth_sources", x_TD)

    def read(self, query: DepthQuery) -> Tensor:
        """The running sum, whatever the query."""
        return self.prefix_TD

    def read_normed(self, query: DepthQuery, norm: RMSNorm) -> Tensor:
        """Its norm, whatever the query."""
        return _normed(self.prefix_TD, norm)

    def write(self, y_TD: Tensor) -> None:
        """Add to it."""
        self.prefix_TD = self.prefix_TD + y_TD
        name("depth_sources", self.prefix_TD)


def _normed(x_TD: Tensor, norm: RMSNorm) -> Tensor:
    normed_TD = norm(x_TD)
    remake("layer_inputs", [normed_TD], norm, x_TD)
    return normed_TD


def _mixed(query: DepthQuery, *sources: Tensor) -> Tensor:
    return mix_depth(sources, query.proj, query.norm, query.eps)[0]


def _mixed_and_normed(query: DepthQuery, norm: RMSNorm, *sources: Tensor) -> Tensor:
    return mix_depth_normed(sources, query.proj, query.norm, norm.weight, norm.eps).normed_TD


def open_stream(
    x_TD: Tensor, config: TextConfig, queries: Sequence[DepthQuery], trace: Trace = NO_TRACE
) -> DepthStream:
    """The stream of a whole model; in two phases where neither gradients nor depth weights are wanted.

    `queries` are all reads in order. In full form every read has sources of its own, so there is nothing to share.
    """
    if config.attn_res_mode == "full":
        return DepthStream(x_TD, 1, trace=trace)
    two_phase = not torch.is_grad_enabled() and not trace.wants("depth")
    upcoming = queries if two_phase else ()
    return DepthStream(x_TD, 2 * config.attn_res_block_size, trace=trace, upcoming=upcoming)
