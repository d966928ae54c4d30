"""DenseCache: what a K3 keeps of each sequence between forward passes, in the simplest form that is right.

Per KDA layer: the state [N, H, K, V] and the last raw q, k and v projections [N, C, 4]. Per MLA layer: one row per
token of normed latent and shared key (576 values in the released model); keys and values are never kept expanded.
Depth sources are rebuilt in every pass. A pass writes beside what is committed and every layer writes in every pass, so
one that raises changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from openk3.config.model import ModelConfig
from openk3.ops.sequences import integers


@dataclass(frozen=True)
class Sequences:
    """The packed layout of one forward pass: sequence n is rows cu_seqlens[n] : cu_seqlens[n + 1]."""

    cu_seqlens: Tensor

    @cached_property
    def ends(self) -> list[int]:
        """cu_seqlens as Python integers, read from the device once."""
        return list(integers(self.cu_seqlens))

    @cached_property
    def lengths(self) -> list[int]:
        """New tokens of each sequence."""
        return [end - start for start, end in zip(self.ends, self.ends[1:])]

    @cached_property
    def one_each(self) -> bool:
        """Whether this is a decoding step: exactly one token for every sequence."""
        return all(length == 1 for length in self.lengths)


class KdaCache:
    """One KDA layer's state and convolution windows."""

    def __init__(self, state_NHKV: Tensor, windows: Sequence[Tensor]) -> None:
        self.state_NHKV = state_NHKV
        self.windows: tuple[Tensor, ...] = tuple(windows)  # q, k, v
        self._next: tuple[Tensor, tuple[Tensor, ...]] | None = None

    def write(self, state_NHKV: Tensor, windows: Sequence[Tensor]) -> None:
        """What the layer holds once the pass is committed."""
        self._next = (state_NHKV, tuple(windows))

    def commit(self) -> None:
        """Take over what was written."""
        if self._next is not None:
            (self.state_NHKV, self.windows), self._next = self._next, None

    def snapshot(self) -> Any:
        """A copy that later passes cannot change."""
        return self.state_NHKV.clone(), tuple(window.clone() for window in self.windows)

    def restore(self, snapshot: Any) -> None:
        """Go back to a snapshot; it stays usable."""
        self._next = None
        self.state_NHKV, self.windows = snapshot[0].clone(), tuple(window.clone() for window in snapshot[1])


class MlaCache:
    """One MLA layer's latents: per sequence a buffer that doubles when it is full."""

    def __init__(self, empty_NTC: Tensor) -> None:
        self._buffers = list(empty_NTC.unbind(0))
        self.lengths = [0] * len(self._buffers)
        self._next: list[int] | None = None

    def latents(self) -> list[Tensor]:
        """Committed rows [length, C+R] of each sequence."""
        return [buffer[:length] for buffer, length in zip(self._buffers, self.lengths)]

    def append(self, latent_TC: Tensor, sequences: Sequences) -> list[Tensor]:
        """Add the pass's rows; returns each sequence's rows, old and new."""
        rows = latent_TC.split(sequences.lengths)
        self._next = [length + len(new) for length, new in zip(self.lengths, rows, strict=True)]
        for n, (new, end) in enumerate(zip(rows, self._next)):
            if end > len(self._buffers[n]):
                grown = new.new_empty(max(end, 2 * len(self._buffers[n]), 16), new.shape[1])
                grown[: self.lengths[n]] = self._buffers[n][: self.lengths[n]]
                self._buffers[n] = grown
            self._buffers[n][self.lengths[n] : end] = new
        return [buffer[:end] for buffer, end in zip(self._buffers, self._next)]

    def commit(self) -> None:
        """Take over what was appended."""
        if self._next is not None:
            self.lengths, self._next = self._next, None

    def snapshot(self) -> Any:
        """A copy that later passes cannot change."""
        return [rows.clone() for rows in self.latents()]

    def restore(self, snapshot: Any) -> None:
        """Go back to a snapshot; it stays usable."""
        self._buffers = [rows.clone() for rows in snapshot]
        self.lengths, self._next = [len(rows) for rows in snapshot], None


LayerCache = KdaCache | MlaCache


class DenseCache:
    """The cache of `num_sequences` sequences; a Packed with as many sequences continues them.

    KDA states are at least float32 whatever `dtype` is. Raises ValueError if a batch has another number of sequences.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_sequences: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        text, linear = config.text, config.text.linear_attn_config
        heads, width = linear.num_heads, linear.head_dim

        def kda() -> KdaCache:
            wide = torch.promote_types(dtype, torch.float32)
            state_NHKV = torch.zeros(num_sequences, heads, width, width, dtype=wide, device=device)
            shape = (num_sequences, heads * width, linear.short_conv_kernel_size)
            return KdaCache(state_NHKV, [torch.zeros(shape, dtype=dtype, device=device) for _ in range(3)])

        def mla() -> MlaCache:
            return MlaCache(torch.empty(num_sequences, 0, text.latent_dim, dtype=dtype, device=device))

        self.lengths = [0] * num_sequences
        self.layers: list[LayerCache] = [kda() if kind == "kda" else mla() for kind in text.layer_kinds()]
        self.mtp = mla() if text.num_nextn_predict_layers else None

    def check(self, sequences: Sequences) -> None:
        """Raise ValueError if the pass does not fit this cache."""
        if len(sequences.lengths) != len(self.lengths):
            raise ValueError(
                f"cache: holds {len(self.lengths)} sequences, the batch has {len(sequences.lengths)};"
                " pass every sequence each time, an empty one where nothing is new"
            )

    def commit(self, sequences: Sequences) -> None:
        """Take over what every backbone layer wrote in the pass."""
        for layer in self.layers:
            layer.commit()
        self.lengths = [old + new for old, new in zip(self.lengths, sequences.lengths)]

    def snapshot(self) -> Any:
        """A copy of everything, for `restore`."""
        mtp = None if self.mtp is None else self.mtp.snapshot()
        return list(self.lengths), [layer.snapshot() for layer in self.layers], mtp

    def restore(self, snapshot: Any) -> None:
        """Go back to a snapshot of this cache; it stays usable."""
        self.lengths = list(snapshot[0])
        for layer, saved in zip(self.layers, snapshot[1], strict=True):
            layer.restore(saved)
        if self.mtp is not None:
            self.mtp.restore(snapshot[2])
