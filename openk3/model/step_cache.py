"""What decoding steps continue: states and latents of many sequences in fixed places that a CUDA graph can refer to.

Every sequence owns a slot: a row of each KDA layer's pool, and a row of each MLA layer's memory with room for
`max_tokens` latents. One more row takes what steps without a sequence write. Where a step's sequences lie and how long
they are is read on the device; nothing waits for it.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from openk3.config.model import ModelConfig
from openk3.model.cache import Sequences
from openk3.ops.backend import pick
from openk3.ops.kda.decode import DecodePool
from openk3.ops.mla.reference import absorbed_attention

if TYPE_CHECKING:
    from openk3.ops.mla.latent_decode import LatentPages, LatentPlan


class Step:
    """One token for each of N sequences: their slots, and how many latents each has, this token's included.

    slot_N is int32, -1 where there is no sequence; length_R int32 counts the latents in every row of memory, the last
    row being nobody's.
    """

    def __init__(self, slot_N: Tensor, length_R: Tensor) -> None:
        self.slot_N = slot_N
        self.row_N = torch.where(slot_N < 0, len(length_R) - 1, slot_N).long()
        self.position_N = length_R[self.row_N]
        self.length_N = self.position_N + 1
        self.bounds = torch.arange(len(slot_N) + 1, dtype=torch.int32, device=slot_N.device)

    @cached_property
    def page_N1(self) -> Tensor:
        """Each sequence's only page: its row."""
        return self.row_N.to(torch.int32).unsqueeze(1)

    def count(self, length_R: Tensor) -> None:
        """Enter this token in the lengths; nobody's row stays empty."""
        length_R.index_put_((self.row_N,), self.length_N)
        length_R[-1:].zero_()

    def plan(self, pages: LatentPages, heads: int) -> LatentPlan:
        """How latents are shared out among programs; the same for all layers of equal heads."""
        from openk3.ops.mla.latent_decode import plan_latents

        if heads not in self._plans:
            self._plans[heads] = plan_latents(pages, self.bounds, heads, 1)
        return self._plans[heads]

    @cached_property
    def _plans(self) -> dict[int, LatentPlan]:
        return {}


class StepStates:
    """One KDA layer's pool of states and windows; a step moves those of its slots on, in place."""

    def __init__(self, pool: DecodePool, owner: StepCache) -> None:
        self.pool, self._owner = pool, owner

    @property
    def slot_N(self) -> Tensor:
        """Slots of the step's sequences."""
        return self._owner.step.slot_N


class StepLatents:
    """One MLA layer's latents [rows, max_tokens, C+R]."""

    def __init__(self, memory_RTC: Tensor, owner: StepCache) -> None:
        self.memory_RTC, self._owner = memory_RTC, owner

    def attend(self, latent_NC: Tensor, q_latent_NHC: Tensor, q_shared_NHR: Tensor, scale: float) -> Tensor:
        """Add each sequence's new latent, then attend to all it has: contexts [N, H, C] in at least float32."""
        step, memory = self._owner.step, self.memory_RTC
        memory.index_put_((step.row_N, step.position_N.long()), latent_NC.to(memory.dtype))
        queries = q_latent_NHC, q_shared_NHR
        same = all(x.dtype == memory.dtype for x in queries)
        obstacle = None if same else f"queries and latents differ in format: {q_latent_NHC.dtype}, {memory.dtype}"
        if pick("mla", q_latent_NHC, name="q_latent_NHC", obstacle=obstacle) == "triton":
            from openk3.ops.mla.latent_decode import LatentPages, latent_attention

            pages = LatentPages.of_pages(memory, step.page_N1, step.length_N)
            plan = step.plan(pages, q_latent_NHC.shape[1])
            return latent_attention(*queries, pages, step.bounds, scale=scale, new_tokens=1, plan=plan)
        rows = [memory[row, :length] for row, length in zip(step.row_N.tolist(), step.length_N.tolist())]
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
