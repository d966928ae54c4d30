"""DecodeCache: an engine's pages as a pass with one token of each request sees them, from numbers on the device alone.

It stands where a PagedCache does. Where that one asks the books of its requests, this one is given places: fixed memory
with each request's token, its position, the pages of its state and those of its latents. So a CUDA graph can hold the
whole pass. A place may be empty: no state moves, and its latent goes to a page that is nobody's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from openk3.config.model import ModelConfig
from openk3.engine.page_memory import PageMemory
from openk3.model.cache import Sequences
from openk3.model.step_cache import OneTokenStates, Places, StepLatents
from openk3.ops.kda.decode import DecodeWeights, Projected
from openk3.ops.kda.paged_decode import DecodePages, decode_pages


class DecodePlaces(NamedTuple):
    """N places in fixed memory, int32: what a pass needs to know, and nothing else of the host."""

    head_XN: Tensor  # token id, position, then the page of the state of each group of KDA layers (-1: empty)
    table_NP: Tensor  # pages of the latents, in order; those behind a request's length mean nothing

    @classmethod
    def empty(cls, count: int, groups: int, pages: int, nobody: int, device: torch.device) -> DecodePlaces:
        """Places of which none has a request; their latents go to page `nobody`."""
        head_XN = torch.zeros(2 + groups, count, dtype=torch.int32, device=device)
        head_XN[2:] = -1
        table_NP = torch.full((count, pages), nobody, dtype=torch.int32, device=device)
        return cls(head_XN, table_NP)

    @property
    def id_N(self) -> Tensor:
        """Tokens."""
        return self.head_XN[0]

    def step(self, page_tokens: int) -> PageStep:
        """The pass that they describe now."""
        return PageStep(self, page_tokens)


class PageStep(Places):
    """What all layers of a pass share, computed on the device."""

    def __init__(self, places: DecodePlaces, page_tokens: int) -> None:
        position_N = places.head_XN[1]
        self.state_GN = places.head_XN[2:]
        nth_N1 = (position_N // page_tokens).long().unsqueeze(1)
        target_N = places.table_NP.gather(1, nth_N1).squeeze(1).long()
        super().__init__(target_N, (position_N % page_tokens).long(), places.table_NP, position_N + 1)


class DecodeStates(OneTokenStates):
    """One KDA layer's states and convolution inputs, in pages of its group."""

    def __init__(self, pages: DecodePages, group: int, owner: DecodeCache) -> None:
        self._pages, self._group, self._owner = pages, group, owner

    def decode(self, projected: Projected, output_gate_NC: Tensor, weights: DecodeWeights) -> Tensor:
        """In the pages of the pass."""
        return decode_pages(projected, output_gate_NC, weights, self._pages, self._owner.step.state_GN[self._group])


class DecodeCache:
    """All layers' parts of the pages; `step` is set before each pass."""

    def __init__(self, memory: PageMemory, config: ModelConfig) -> None:
        self.step: PageStep
        self.layers: list[DecodeStates | StepLatents] = []
        self.mtp = None
        num_kda = num_mla = 0
        for kind in config.text.layer_kinds():
            if kind == "kda":
                group, row = divmod(num_kda, memory.shape.layers_per_page)
                pages = DecodePages(memory.states(row).state_PHKV, memory.joint_inputs(row))
                self.layers.append(DecodeStates(pages, group, self))
                num_kda += 1
            else:
                self.layers.append(StepLatents(memory.latents(num_mla), self))
                num_mla += 1

    def check(self, sequences: Sequences) -> None:
        """Whoever fills the places sees to it that they fit."""

    def commit(self, sequences: Sequences) -> None:
        """Layers have written; what counts is in the books of HybridCache."""
