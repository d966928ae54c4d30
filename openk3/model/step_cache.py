"""What decoding steps continue: states and latents of many sequences in fixed places that a CUDA graph can refer to.

Every sequence owns a slot: a row of each KDA layer's pool, and a row of each MLA layer's memory with room for
`max_tokens` latents. One more row takes what steps without a sequence write. Where a step's sequences lie and how long
they are is read on the device; nothing waits for it. An engine's pages are such places too: see engine/decode_cache.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from openk3.config.model import ModelConfig
from openk3.model.cache import Sequences
from openk3.ops.backend import pick
from openk3.ops.few.head import places_of
from openk3.ops.few.states import StatePlaces
from openk3.ops.kda.decode import DecodePool, DecodeWeights, Projected, decode_kda
from openk3.ops.mla.reference import absorbed_attention

if TYPE_CHECKING:
    from openk3.ops.mla.latent_decode import LatentPages, LatentPlan


class Places:
    """One token for each of N sequences, as MLA layers ask for it: where its latent goes, and where all latents lie.

    Of sequence n the latent goes to page target_N[n], row row_N[n]; token t lies in page page_NP[n, t // page_tokens],
    row t % page_tokens, for length_N[n] tokens, this one included.
    """

    def __init__(self, target_N: Tensor, row_N: Tensor, page_NP: Tensor, length_N: Tensor) -> None:
        self.target_N, self.row_N, self.page_NP, self.length_N = target_N, row_N, page_NP, length_N
        self.bounds = torch.arange(len(target_N) + 1, dtype=torch.int32, device=target_N.device)
        self._plans: dict[int, LatentPlan] = {}

    def plan(self, pages: LatentPages, heads: int) -> LatentPlan:
        """How latents are shared out among programs; the same for all layers of equal heads."""
        from openk3.ops.mla.latent_decode import plan_latents

        if heads not in self._plans:
            self._plans[heads] = plan_latents(pages, self.bounds, heads, 1)
        return self._plans[heads]


class Step(Places):
    """One token for each of N sequences in slots of their own.

    slot_N is int32, -1 where there is no sequence; length_R int32 counts the latents in every row of memory, the last
    row being nobody's.
    """

    def __init__(self, slot_N: Tensor, length_R: Tensor) -> None:
        self.slot_N = slot_N
        super().__init__(*places_of(slot_N, length_R))

    def count(self, length_R: Tensor) -> None:
        """Enter this token in the lengths; nobody's row stays empty."""
        length_R.index_put_((self.target_N,), self.length_N)
        length_R[-1:].zero_()


class StepOwner(Protocol):
    """The cache of all layers."""

    @property
    def step(self) -> Places:
        """The step that is under way."""
        ...


class OneTokenStates(ABC):
    """A KDA layer's states in passes with one token of each sequence."""

    @abstractmethod
    def decode(self, projected: Projected, output_gate_NC: Tensor, weights: DecodeWeights) -> Tensor:
        """Move states and windows of the step's sequences on, in place; gated outputs [N, H * V]."""

    def state_places(self) -> StatePlaces | None:
        """Where states and windows of the step's sequences lie, if kernels of this package may move them on there."""
        return None


class StepStates(OneTokenStates):
    """One KDA layer's pool of states and windows."""

    def __init__(self, pool: DecodePool, owner: StepCache) -> None:
        self.pool, self._owner = pool, owner

    def decode(self, projected: Projected, output_gate_NC: Tensor, weights: DecodeWeights) -> Tensor:
        """At the slots of the step."""
        return decode_kda(projected, output_gate_NC, weights, self.pool, self._owner.step.slot_N)

    def state_places(self) -> StatePlaces:
        """The pool, and the slots of the step."""
        state_SHKV, *windows = self.pool.tensors()
        q, k, v = windows
        return StatePlaces(state_SHKV, (q, k, v), self._owner.step.slot_N)


class StepLatents:
    """One MLA layer's latents [pages, tokens of a page, C+R], in passes with one token of each sequence."""

    def __init__(self, memory_PTC: Tensor, owner: StepOwner) -> None:
        self.memory_PTC, self._owner = memory_PTC, owner

    def attend(self, latent_NC: Tensor, q_latent_NHC: Tensor, q_shared_NHR: Tensor, scale: float) -> Tensor:
        """Add each sequence's new latent, then attend to all it has: contexts [N, H, C] in at least float32."""
        memory, page_N, row_N = self.places
        memory.index_put_((page_N, row_N), latent_NC.to(memory.dtype))
        return self.read(q_latent_NHC, q_shared_NHR, scale)

    @property
    def places(self) -> tuple[Tensor, Tensor, Tensor]:
        """The memory, and in it page and row of each sequence's new latent, integers [N]."""
        step = self._owner.step
        return self.memory_PTC, step.target_N, step.row_N

    @property
    def pages(self) -> tuple[Tensor, Tensor, Tensor]:
        """The memory, each sequence's pages [N, P], and how many tokens it has, the new one included; int32."""
        step = self._owner.step
        return self.memory_PTC, step.page_NP, step.length_N

    def read(self, q_latent_NHC: Tensor, q_shared_NHR: Tensor, scale: float) -> Tensor:
        """`attend`, when the new latents are in memory."""
        step, memory = self._owner.step, self.memory_PTC
        queries = q_latent_NHC, q_shared_NHR
        same = all(x.dtype == memory.dtype for x in queries)
        obstacle = None if same else f"queries and latents differ in format: {q_latent_NHC.dtype}, {memory.dtype}"
        if pick("mla", q_latent_NHC, name="q_latent_NHC", obstacle=obstacle) == "triton":
            from openk3.ops.mla.latent_decode import LatentPages, latent_attention

            pages = LatentPages.of_pages(memory, step.page_NP, step.length_N)
            plan = step.plan(pages, q_latent_NHC.shape[1])
            return latent_attention(*queries, pages, step.bounds, scale=scale, new_tokens=1, plan=plan)
        size = memory.shape[1]
        tables = zip(step.page_NP.tolist(), step.length_N.tolist())
        rows = [memory[table[: -(-length // size)]].flatten(0, 1)[:length] for table, length in tables]
        return absorbed_attention(*queries, rows, step.bounds, scale=scale)


class StepCache:
    """All layers' fixed places for `slots` sequences of up to `max_tokens` tokens; stands where a DenseCache does."""

    def __init__(
        self, config: ModelConfig, slots: int, max_tokens: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        text, linear = config.text, config.text.linear_attn_config
        channels, rows = linear.num_heads * linear.head_dim, slots + 1
        self.slots, self.max_tokens = slots, max_tokens
        self.length_R = torch.zeros(rows, dtype=torch.int32, device=device)
        self.step = Step(torch.full((1,), -1, dtype=torch.int32, device=device), self.length_R)

        def states() -> StepStates:
            shape = (slots, linear.num_heads, linear.head_dim, linear.head_dim)
            state = torch.zeros(shape, dtype=torch.promote_types(dtype, torch.float32), device=device)
            window = (slots, channels, linear.short_conv_kernel_size)
            return StepStates(
                DecodePool(state, *(torch.zeros(window, dtype=dtype, device=device) for _ in "qkv")), self
            )

        def latents() -> StepLatents:
            return StepLatents(torch.zeros(rows, max_tokens, text.latent_dim, dtype=dtype, device=device), self)

        self.layers = [states() if kind == "kda" else latents() for kind in text.layer_kinds()]
        self.mtp = None

    def check(self, sequences: Sequences) -> None:
        """A step fits by construction."""

    def commit(self, sequences: Sequences) -> None:
        """Layers have written in place; lengths are counted by `Step.count`."""
