"""What a K3 keeps of each sequence between forward passes: the protocol, and DenseCache, its simplest right form.

Per KDA layer: the state [N, H, K, V] and the last raw q, k and v projections [N, C, 4]. Per MLA layer: one row per
token of normed latent and shared key (576 values in the released model); keys and values are never kept expanded.
Depth sources are rebuilt in every pass. In a DenseCache a pass writes beside what is committed and every layer writes
in every pass, so one that raises changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from openk3.config.model import ModelConfig
from openk3.ops.kda.decode import Projected
from openk3.ops.sequences import integers, remember_integers

States = tuple[Tensor, tuple[Tensor, ...]]  # state_NHKV, and the convolution windows [N, C, W] of q, k and v


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

    @cached_property
    def num_single(self) -> int:
        """How many sequences, counted from the first, have exactly one token."""
        return sum(1 for _ in takewhile(lambda length: length == 1, self.lengths))

    def split(self, *counts: int) -> list[Part]:
        """The sequences cut behind the first `counts`, each part a layout of its own; parts without any are left out.

        Remembered, because every layer of a pass asks again.
        """
        if counts not in self._splits:
            total = len(self.lengths)
            bounds = [0, *sorted({count for count in counts if 0 < count < total}), total]
            self._splits[counts] = [self._part(*bound) for bound in zip(bounds, bounds[1:])]
        return self._splits[counts]

    @cached_property
    def _splits(self) -> dict[tuple[int, ...], list[Part]]:
        return {}

    def _part(self, first: int, last: int) -> Part:
        if last - first == len(self.lengths):
            return Part(slice(first, last), slice(0, self.ends[-1]), self)
        layout = Sequences(self.cu_seqlens[first : last + 1] - self.ends[first])
        remember_integers(layout.cu_seqlens, [end - self.ends[first] for end in self.ends[first : last + 1]])
        return Part(slice(first, last), slice(self.ends[first], self.ends[last]), layout)


class Part(NamedTuple):
    """Consecutive sequences of a pass: which they are, their rows, and the layout that they form alone."""

    which: slice
    rows: slice
    sequences: Sequences


@dataclass
class Drafts:
    """Consecutive sequences of a pass whose tokens may yet be refused, and in one KDA layer the inputs kept of them."""

    which: slice
    inputs: Projected | None = None


class StateCache(Protocol):
    """What a KDA layer asks of its part of a cache: states and windows of some of the pass's sequences."""

    @property
    def drafts(self) -> Drafts | None:
        """Sequences that are not written: the layer keeps their inputs here instead. None where every token counts."""
        ...

    def is_new(self, which: slice) -> bool:
        """Whether these sequences are known to be at their beginning, so that there is nothing to read."""
        ...

    def read(self, which: slice) -> States:
        """States and windows that these sequences have reached; to be read only."""
        ...

    def write(self, which: slice, states: States) -> None:
        """What they have behind the pass; asked once for every sequence, in order."""
        ...


class LatentCache(Protocol):
    """What an MLA layer asks of its part of a cache."""

    @property
    def lengths(self) -> Sequence[int]:
        """Rows of each sequence before the pass."""
        ...

    def append(self, latent_TC: Tensor, sequences: Sequences) -> Sequence[Tensor]:
        """Add the pass's rows; returns each sequence's rows [length, C+R], old and new; slices of it are the same."""
        ...

    def commit(self) -> None:
        """What was appended stays."""
        ...


class Cache(Protocol):
    """What `K3.forward` continues: a pass's sequences, one after the other, are those that the cache holds."""

    @property
    def layers(self) -> Sequence[StateCache | LatentCache]:
        """One per backbone layer, of its kind."""
        ...

    @property
    def mtp(self) -> LatentCache | None:
        """The MTP layer's, if the model has one."""
        ...

    def check(self, sequences: Sequences) -> None:
        """Raise ValueError if the pass does not fit."""
        ...

    def commit(self, sequences: Sequences) -> None:
        """Every backbone layer has written: the pass counts."""
        ...


class KdaCache:
    """One KDA layer's state and convolution windows."""

    def __init__(self, state_NHKV: Tensor, windows: Sequence[Tensor]) -> None:
        self.state_NHKV = state_NHKV
        self.windows: tuple[Tensor, ...] = tuple(windows)  # q, k, v
        self.drafts: Drafts | None = None
        self._next: list[States] = []

    def is_new(self, which: slice) -> bool:
        """Its states are always there to be read."""
        return False

    def read(self, which: slice) -> States:
        """What is committed of these sequences."""
        return self.state_NHKV[which], tuple(window[which] for window in self.windows)

    def write(self, which: slice, states: States) -> None:
        """What the layer holds of these sequences once the pass is committed."""
        if which.start == 0:  # a new pass: what one that failed has left is dropped
            self._next = []
        self._next.append(states)

    def commit(self) -> None:
        """Take over what was written."""
        if self._next:
            states, windows = zip(*self._next)
            self.state_NHKV = _joined(states)
            self.windows = tuple(_joined(parts) for parts in zip(*windows))
            self._next = []

    def snapshot(self) -> Any:
        """A copy that later passes cannot change."""
        return self.state_NHKV.clone(), tuple(window.clone() for window in self.windows)

    def restore(self, snapshot: Any) -> None:
        """Go back to a snapshot; it stays usable."""
        self._next = []
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

    def replace(self, sequence: int, rows_TC: Tensor) -> None:
        """Other rows of one sequence, copied."""
        self._buffers[sequence], self.lengths[sequence], self._next = rows_TC.clone(), len(rows_TC), None

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


def _joined(parts: tuple[Tensor, ...]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


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
        self.layers: list[KdaCache | MlaCache] = [kda() if kind == "kda" else mla() for kind in text.layer_kinds()]
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
