"""PageMemory: the tensors behind the pages, as views of one piece of memory, and the copies that plans ask for.

A page has equal rows, one per MLA layer and one for the MTP layer. Row r of a page of latents holds `page_tokens`
latents of MLA layer r. Row r of page g of a state holds KDA layer g * rows + r: its state [H, K, V] in at least
float32, then the last W - 1 raw inputs of the q, k and v convolutions [H * K, W - 1] each, so that a head's share is
one range of bytes in each of the four. In a model with an MTP layer, room for the hidden vector of the last token comes
behind; the one in row 0 of the first group is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from openk3.config.model import ConfigError, ModelConfig
from openk3.config.serve import ROW_ALIGNMENT, CacheConfig, PageShape, carry_bytes, kda_row_bytes
from openk3.engine.page_plans import CopyPlan
from openk3.ops.device_tables import sent


class StatePages(NamedTuple):
    """One KDA layer's part of all pages: states [P, H, K, V] and inputs of q, k and v [P, C, W - 1], oldest first."""

    state_PHKV: Tensor
    inputs_PCW: tuple[Tensor, ...]


class PageMemory:
    """Memory of `config.num_pages` pages for a model whose activations have `dtype`; nothing in it is set.

    `num_spare` more pages lie behind them, which the books do not know: what is to be read by nobody goes there. Raises
    ConfigError if pages of this shape do not hold the model's latents and states.
    """

    def __init__(
        self,
        config: CacheConfig,
        model: ModelConfig,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        num_spare: int = 0,
    ) -> None:
        self.shape = config.pages
        self.dtype = dtype
        self._text = model.text
        _check(self.shape, model, dtype.itemsize)
        shape = (config.num_pages + num_spare, self.shape.layers_per_page, self.shape.row_bytes // 8)
        with torch.inference_mode(False):  # else nobody outside of the caller's inference mode could write there
            self._words_PRB = torch.empty(shape, dtype=torch.int64, device=device)
        self._kda_bytes = kda_row_bytes(model.text, dtype.itemsize)
        self._state_words = _words(self._kda_bytes + carry_bytes(model.text, dtype.itemsize))

    @property
    def nbytes(self) -> int:
        """Of all pages."""
        return self._words_PRB.nbytes

    @property
    def words_PRB(self) -> Tensor:
        """All pages as words of eight bytes [P, rows of a page, words of a row], for whoever moves bytes."""
        return self._words_PRB

    @property
    def state_words(self) -> int:
        """Words of a row that one KDA layer's state takes, with all that belongs to it."""
        return self._state_words

    def latents(self, row: int) -> Tensor:
        """Latents of the MLA layer (or the MTP layer) of this row [P, page_tokens, C+R]: a view."""
        width = self._text.latent_dim
        flat = self._row(row, 0, self.shape.page_tokens * width, self.dtype)
        return flat.unflatten(-1, (self.shape.page_tokens, width))

    def states(self, row: int) -> StatePages:
        """States and convolution inputs of the KDA layers of this row, of whatever group: views."""
        linear = self._text.linear_attn_config
        heads, width, taps = linear.num_heads, linear.head_dim, linear.short_conv_kernel_size - 1
        wide = torch.promote_types(self.dtype, torch.float32)
        count = heads * width * width
        state_PHKV = self._row(row, 0, count, wide).unflatten(-1, (heads, width, width))
        start, size = count * wide.itemsize, heads * width * taps
        inputs = [self._row(row, start + i * size * self.dtype.itemsize, size, self.dtype) for i in range(3)]
        return StatePages(state_PHKV, tuple(x.unflatten(-1, (heads * width, taps)) for x in inputs))

    def joint_inputs(self, row: int) -> Tensor:
        """The inputs of `states` as they lie, q, k and v one behind the other [P, 3 * C, W - 1]: a view."""
        state_PHKV, inputs = self.states(row)
        channels, taps = inputs[0].shape[1:]
        first_byte = state_PHKV[0].nbytes
        return self._row(row, first_byte, 3 * channels * taps, self.dtype).unflatten(-1, (3 * channels, taps))

    def carries(self) -> Tensor:
        """Hidden vectors of the last tokens that states of the first group have come to [P, D]: a view."""
        return self._row(0, self._kda_bytes, self._text.hidden_size, self.dtype)

    def carry_out(self, *plans: CopyPlan) -> None:
        """Zero and copy as plans say, none of which writes what another one reads or writes."""
        words = self._words_PRB
        state_PRB = words[:, :, : self._state_words]
        zeros = [page for plan in plans for page in plan.zero_states]
        copies = [pair for plan in plans for pair in plan.state_copies]
        if zeros:
            state_PRB.index_fill_(0, self._numbers(zeros), 0)
        for source, target, num_tokens in [copy for plan in plans for copy in plan.latent_copies]:
            count = _words(num_tokens * self._text.latent_dim * self.dtype.itemsize)
            words[target, :, :count] = words[source, :, :count]
        if copies:
            source_N, target_N = self._numbers(copies).unbind(1)
            state_PRB.index_copy_(0, target_N, state_PRB.index_select(0, source_N))

    def _numbers(self, numbers: Sequence[int] | Sequence[tuple[int, int]]) -> Tensor:
        return sent(torch.tensor(numbers, dtype=torch.int64), self._words_PRB.device)

    def poison(self, pages: Iterable[int]) -> None:
        """Make every number in these pages a NaN: what is read by mistake shows at once."""
        self._words_PRB[list(pages)] = -1  # all bits set is a NaN in every format

    def _row(self, row: int, first_byte: int, count: int, dtype: torch.dtype) -> Tensor:
        """`count` numbers of a row of every page [P, count]."""
        with torch.inference_mode(False):
            row_B = self._words_PRB[:, row].view(torch.uint8)
            return row_B[:, first_byte : first_byte + count * dtype.itemsize].view(dtype)


def _words(num_bytes: int) -> int:
    """Words that so many bytes reach into; rows end at a multiple of them."""
    return -(-num_bytes // ROW_ALIGNMENT) * ROW_ALIGNMENT // 8


def _check(shape: PageShape, model: ModelConfig, value_bytes: int) -> None:
    needed = PageShape.of(model, page_tokens=shape.page_tokens, hash_tokens=shape.hash_tokens, value_bytes=value_bytes)
    if shape.row_bytes % ROW_ALIGNMENT:
        raise ConfigError(f"row_bytes: must be a multiple of {ROW_ALIGNMENT}, got {shape.row_bytes}")
    for name in ("layers_per_page", "kda_groups", "row_bytes"):
        have, need = getattr(shape, name), getattr(needed, name)
        if have < need or (name != "row_bytes" and have != need):
            raise ConfigError(
                f"{name}: {have}, but the model's pages need {need}; PageShape.of gives a shape that fits"
            )
