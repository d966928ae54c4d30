"""PagedCache: what K3.forward continues where requests live in pages; it stands where a DenseCache does.

A pass is bound to the requests of its sequences first. Latents are written behind each request's computed tokens, where
nobody reads yet; states are overwritten in place, in pages that only their request has. So a pass that raises leaves
latents as they were, and states of which nobody knows how far they have come: their requests must start again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from openk3.config.model import ModelConfig
from openk3.engine.page_memory import PageMemory
from openk3.engine.page_plans import RequestCache
from openk3.model.cache import Drafts, Sequences, States
from openk3.ops.device_tables import sent
from openk3.ops.kda.decode import Projected
from openk3.ops.mla.paged_rows import PagedRows, PageTables
from openk3.ops.sequences import remember_integers

Replay = Callable[[Projected, Sequences, States], States]


class Span(NamedTuple):
    """A request's tokens in a pass: `num_tokens` of them from its token `start` on."""

    cache: RequestCache
    start: int
    num_tokens: int


def bounds_of(bounds: Sequence[int], device: torch.device) -> Tensor:
    """Bounds of sequences on a device, int32; nobody waits for it, neither to send them nor to read them."""
    found = sent(torch.tensor(bounds, dtype=torch.int32), device)
    remember_integers(found, bounds)
    return found


@dataclass(frozen=True)
class Batch:
    """The requests of one pass, and where their rows and states lie; read by every layer, computed once."""

    spans: tuple[Span, ...]
    page_tokens: int
    device: torch.device

    @cached_property
    def starts(self) -> list[int]:
        """Tokens of each request before the pass."""
        return [span.start for span in self.spans]

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each request in the pass."""
        return [span.num_tokens for span in self.spans]

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """Bounds of the requests' tokens, int32 [N + 1]."""
        return bounds_of([0, *accumulate(self.lengths)], self.device)

    @cached_property
    def targets(self) -> tuple[Tensor, Tensor]:
        """(page [T], row in it [T]) of each token's latents."""
        found = [np.empty((2, 0), dtype=np.int64)]
        for cache, start, num_tokens in self.spans:
            nth_T, row_T = np.divmod(np.arange(start, start + num_tokens), self.page_tokens)
            found.append(np.stack((np.array(cache.pages, dtype=np.int64)[nth_T], row_T)))
        pages_T, rows_T = sent(torch.from_numpy(np.concatenate(found, 1)), self.device)
        return pages_T, rows_T

    @cached_property
    def tables(self) -> PageTables:
        """Where all tokens of each request lie, those of the pass included."""
        lengths = tuple(span.start + span.num_tokens for span in self.spans)
        return PageTables(tuple(span.cache.pages for span in self.spans), lengths, self.page_tokens, self.device)

    @cached_property
    def slots(self) -> list[Tensor]:
        """For each group of KDA layers, the page of each request's state [N]."""
        groups = zip(*(span.cache.states for span in self.spans))
        return list(sent(torch.tensor(list(groups), dtype=torch.int64), self.device))


class PagedStates:
    """One KDA layer's states and windows, in pages of its group."""

    def __init__(self, owner: PagedCache, group: int, row: int) -> None:
        self._owner, self._group = owner, group
        self._state_PHKV, _ = owner.memory.states(row)
        self._inputs_PXW = owner.memory.joint_inputs(row)
        self.drafts: Drafts | None = None

    def replay(self, run: Replay, which: list[int], rows: Tensor, sequences: Sequences) -> None:
        """Move states of drafts on by `rows` of the inputs that the pass has kept, as the layer's `run` has it."""
        assert self.drafts is not None and self.drafts.inputs is not None
        self.write(which, run(self.drafts.inputs.rows(rows), sequences, self.read(which)))

    def is_new(self, which: slice) -> bool:
        """Whether none of these requests has a token before the pass."""
        return not any(self._owner.batch.starts[which])

    def read(self, which: slice | list[int]) -> States:
        """Copies of what these requests have reached; a window's oldest input, which nobody needs, is zero."""
        slot_N = self._owner.batch.slots[self._group][which]
        inputs = self._inputs_PXW.index_select(0, slot_N).chunk(3, 1)
        return self._state_PHKV.index_select(0, slot_N), tuple(F.pad(inputs_NCW, (1, 0)) for inputs_NCW in inputs)

    def gather(self) -> tuple[Tensor, Tensor]:
        """Copies of what all requests of the pass have reached: states, and W - 1 inputs of q, k and v [N, 3 * C]."""
        slot_N = self._owner.batch.slots[self._group]
        return self._state_PHKV.index_select(0, slot_N), self._inputs_PXW.index_select(0, slot_N)

    def scatter(self, state_NHKV: Tensor, inputs_NXW: Tensor) -> None:
        """Overwrite what `gather` has read."""
        slot_N = self._owner.batch.slots[self._group]
        self._state_PHKV.index_copy_(0, slot_N, state_NHKV)
        self._inputs_PXW.index_copy_(0, slot_N, inputs_NXW)

    def write(self, which: slice | list[int], states: States) -> None:
        """Overwrite the requests' own pages."""
        slot_N = self._owner.batch.slots[self._group][which]
        state_NHKV, windows = states
        self._state_PHKV.index_copy_(0, slot_N, state_NHKV.to(self._state_PHKV.dtype))
        self._inputs_PXW.index_copy_(0, slot_N, torch.cat(windows, 1)[..., 1:].to(self._inputs_PXW.dtype))


class PagedLatents:
    """One MLA layer's latents (or the MTP layer's), in a row of all pages."""

    def __init__(self, owner: PagedCache, row: int) -> None:
        self._owner = owner
        self.latents_PTC = owner.memory.latents(row)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each request before the pass."""
        return self._owner.batch.starts

    def append(self, latent_TC: Tensor, sequences: Sequences) -> PagedRows:
        """Write the pass's rows; returns all rows of each request, where they lie."""
        self.write(latent_TC)
        return PagedRows(self.latents_PTC, self._owner.batch.tables)

    def write(self, latent_TC: Tensor) -> None:
        """Write the pass's rows."""
        self.latents_PTC[self._owner.batch.targets] = latent_TC.to(self.latents_PTC.dtype)

    def commit(self) -> None:
        """Rows count once the books say so: nothing to do here."""


class PagedCarries:
    """The hidden vector behind each request's last token, which goes where its state goes."""

    def __init__(self, owner: PagedCache) -> None:
        self._owner = owner
        self._carry_PD = owner.memory.carries()

    def read(self) -> Tensor:
        """Of the requests of the pass [N, D]; zeros before the first token."""
        return self._carry_PD[self._owner.batch.slots[0]]

    def write(self, which: list[int], carry_ND: Tensor) -> None:
        """Overwrite those of some requests."""
        self._carry_PD[self._owner.batch.slots[0][which]] = carry_ND.to(self._carry_PD.dtype)


class PagedCache:
    """All layers' parts of the pages, for the passes of one engine: `bind` requests, then run the model."""

    def __init__(self, memory: PageMemory, config: ModelConfig, device: torch.device | str = "cpu") -> None:
        self.memory = memory
        self._device = torch.device(device)
        self.batch = Batch((), memory.shape.page_tokens, self._device)
        rows = memory.shape.layers_per_page
        num_kda = num_mla = 0
        self.layers: list[PagedStates | PagedLatents] = []
        for kind in config.text.layer_kinds():
            if kind == "kda":
                self.layers.append(PagedStates(self, *divmod(num_kda, rows)))
                num_kda += 1
            else:
                self.layers.append(PagedLatents(self, num_mla))
                num_mla += 1
        has_mtp = config.text.num_nextn_predict_layers > 0
        self.mtp = PagedLatents(self, num_mla) if has_mtp else None
        self.carries = PagedCarries(self) if has_mtp and num_kda else None

    def bind(self, spans: Sequence[Span], drafts: slice | None = None) -> Batch:
        """The next pass continues these requests, in this order; room for their tokens must be reserved.

        `drafts` are those whose states stay as they are (see Drafts), for `replay`.
        """
        self.batch = Batch(tuple(spans), self.memory.shape.page_tokens, self._device)
        for states in self.states:
            states.drafts = None if drafts is None else Drafts(drafts)
        return self.batch

    @property
    def states(self) -> list[PagedStates]:
        """Of all KDA layers."""
        return [layer for layer in self.layers if isinstance(layer, PagedStates)]

    def check(self, sequences: Sequences) -> None:
        """Raise ValueError if the pass is not the one that was announced."""
        if sequences.lengths != self.batch.lengths:
            raise ValueError(f"cache: bound to {self.batch.lengths} tokens, the batch has {sequences.lengths}")

    def commit(self, sequences: Sequences) -> None:
        """Layers have written; what counts is in the books of HybridCache."""
