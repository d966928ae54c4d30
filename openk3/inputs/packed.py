"""Packed: the one batch layout, tokens of many sequences end to end with their images and labels."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

IGNORE = -100  # a label that no loss counts
MERGE = 4  # patches per image token: the tower merges 2x2 (report section 2.4)
_MAX_ID = 2**31 - 1


class MediaItem(NamedTuple):
    """One image or video chunk: pixels_N3PP (N = t*h*w patches, frame then row then column) and its grid (t, h, w)."""

    pixels_N3PP: Tensor
    grid_thw: tuple[int, int, int]

    @property
    def num_tokens(self) -> int:
        """Tokens it takes in the text: frames are pooled away, patches merge 2x2."""
        return self.grid_thw[1] * self.grid_thw[2] // MERGE


class PaddedLayout(NamedTuple):
    """Where the sequences lay in a padded [B, width] batch: row b starts at column starts[b]."""

    starts: tuple[int, ...]
    width: int


@dataclass(frozen=True, eq=False)
class Packed:
    """Sequences end to end: sequence n is token_ids_T[cu_seqlens[n] : cu_seqlens[n + 1]].

    token_ids_T int64 [T]; cu_seqlens int32 [N+1]; images in the order of their placeholders; labels_T int64 [T] or
    None (the token ids themselves), unshifted, -100 ignored; padded is set by `from_padded`; expanded says that every
    image already has one placeholder per token.
    """

    token_ids_T: Tensor
    cu_seqlens: Tensor
    images: tuple[MediaItem, ...] = ()
    labels_T: Tensor | None = None
    padded: PaddedLayout | None = None
    expanded: bool = False

    def __post_init__(self) -> None:
        _check_layout(self.token_ids_T, self.cu_seqlens, self.labels_T)

    @classmethod
    def join(
        cls,
        sequences: Iterable[Any],
        images: Iterable[Any] = (),
        labels: Iterable[Any] | None = None,
    ) -> Packed:
        """Pack token id sequences (lists, arrays or 1-D tensors; any may be empty).

        Each holds ONE media placeholder id per image; `images` are (pixels [N, 3, P, P], (t, h, w)) pairs in the same
        order; `labels`, if given, has one equally long sequence per sequence. Raises ValueError naming the sequence,
        image or count at fault.
        """
        rows = [_ids(row, f"sequence {n}") for n, row in enumerate(sequences)]
        token_ids_T = torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64)
        labels_T = None
        if labels is not None:
            label_rows = [_ids(row, f"labels {n}", lowest=IGNORE) for n, row in enumerate(labels)]
            if len(label_rows) != len(rows):
                raise ValueError(f"labels: {len(label_rows)} sequences of labels for {len(rows)} sequences of tokens")
            for n, (row, label) in enumerate(zip(rows, label_rows, strict=True)):
                if len(row) != len(label):
                    raise ValueError(f"labels {n}: {len(label)} labels for {len(row)} tokens")
            labels_T = torch.cat(label_rows) if label_rows else torch.empty(0, dtype=torch.int64)
        cu_seqlens = _cumulative([len(row) for row in rows])
        return cls(token_ids_T, cu_seqlens, _media(images), labels_T)

    @classmethod
    def from_padded(
        cls,
        ids_BT: Any,
        mask_BT: Any,
        labels_BT: Any = None,
        images: Iterable[Any] = (),
    ) -> Packed:
        """Pack a padded batch: mask_BT [B, T] is 1 at tokens, 0 at padding (left, right or both, no holes).

        `to_padded` later puts per-token results back at the same places. Raises ValueError naming the row at fault.
        """
        ids, mask = _tensor(ids_BT, "from_padded ids"), _tensor(mask_BT, "from_padded mask")
        labels = None if labels_BT is None else _tensor(labels_BT, "from_padded labels")
        if ids.ndim != 2 or mask.shape != ids.shape or (labels is not None and labels.shape != ids.shape):
            shapes = [tuple(x.shape) for x in (ids, mask, labels) if x is not None]
            raise ValueError(f"from_padded: ids, mask and labels must share one [batch, length] shape, got {shapes}")
        if bool(((mask != 0) & (mask != 1)).any()):
            raise ValueError("from_padded: the mask may hold only 0 (padding) and 1 (token)")
        keep = mask.bool()
        lengths = keep.sum(1).tolist()
        starts = keep.int().argmax(1).tolist() if ids.shape[1] else [0] * len(lengths)
        for b, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            if not bool(keep[b, start : start + length].all()):
                raise ValueError(f"from_padded: row {b} has padding between its tokens; pad left or right only")
        token_ids_T = _ids(ids[keep], "from_padded ids")
        labels_T = None if labels is None else _ids(labels[keep], "from_padded labels", lowest=IGNORE)
        layout = PaddedLayout(tuple(starts), ids.shape[1])
        return cls(token_ids_T, _cumulative(lengths).to(ids.device), _media(images), labels_T, layout)

    @property
    def num_sequences(self) -> int:
        """N, empty sequences included."""
        return len(self.cu_seqlens) - 1

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids_T)

    @property
    def lengths(self) -> Tensor:
        """Tokens of each sequence, int64 [N]."""
        return self.cu_seqlens.diff().long()

    @property
    def sequence_T(self) -> Tensor:
        """Which sequence each token belongs to, int64 [T]."""
        index = torch.arange(self.num_sequences, device=self.cu_seqlens.device)
        return torch.repeat_interleave(index, self.lengths, output_size=self.num_tokens)

    @property
    def position_T(self) -> Tensor:
        """Place of each token inside its own sequence, int64 [T]."""
        return torch.arange(self.num_tokens, device=self.cu_seqlens.device) - self.cu_seqlens[self.sequence_T]

    def to(self, device: torch.device | str) -> Packed:
        """The same batch with every tensor on `device`; a GPU is not waited for."""
        return dataclasses.replace(
            self,
            token_ids_T=_moved(self.token_ids_T, device),
            cu_seqlens=_moved(self.cu_seqlens, device),
            images=tuple(MediaItem(_moved(item.pixels_N3PP, device), item.grid_thw) for item in self.images),
            labels_T=None if self.labels_T is None else _moved(self.labels_T, device),
        )

    def shifted_labels(self) -> Tensor:
        """What position t has to predict: the label of t + 1 in the same sequence, -100 at each end; int64 [T]."""
        labels_T = self.token_ids_T if self.labels_T is None else self.labels_T
        shifted_T = torch.full_like(labels_T, IGNORE)
        shifted_T[:-1] = labels_T[1:]
        if len(shifted_T):
            # An empty sequence names the last token before it once more, or, as -1, the last one of all.
            # Filled by the device itself: a value that is assigned would be a tensor on the CPU first.
            shifted_T.index_fill_(0, self.cu_seqlens[1:].long() - 1, IGNORE)
        return shifted_T

    def expand(self, media_token_id: int) -> Packed:
        """Replace each image's placeholder by one per image token (h*w/4 of them), with labels -100 there.

        Already expanded input (as many placeholders as image tokens, each image's in one piece) is only marked.
        Raises ValueError naming both counts when placeholders and images do not fit.
        """
        return self if self.expanded else _expand(self, media_token_id)

    def to_padded(self, x_T: Tensor, fill: float = 0) -> Tensor:
        """Scatter per-token values [T, ...] to [B, T', ...]: the layout of `from_padded`, else padded on the right.

        A model's results for images fit the expanded batch. Raises ValueError for another number of values.
        """
        if len(x_T) != self.num_tokens:
            hint = "; expand(media_token_id) the batch first" if self.images and not self.expanded else ""
            raise ValueError(f"to_padded: {len(x_T)} values for {self.num_tokens} tokens{hint}")
        layout = self.padded
        if layout is None:
            layout = PaddedLayout((0,) * self.num_sequences, max(self.lengths.tolist(), default=0))
        out = x_T.new_full((self.num_sequences, layout.width, *x_T.shape[1:]), fill)
        starts = torch.tensor(layout.starts, dtype=torch.int64, device=self.cu_seqlens.device)
        rows_T = self.sequence_T
        out[rows_T.to(x_T.device), (starts[rows_T] + self.position_T).to(x_T.device)] = x_T
        return out


def _moved(x: Tensor, device: torch.device | str) -> Tensor:
    """x on a device; from memory that a GPU reads by itself, as a copy from any other waits for its turn."""
    if x.device.type == "cpu" and torch.device(device).type == "cuda":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


def _expand(packed: Packed, media_token_id: int) -> Packed:
    is_media_T = packed.token_ids_T == media_token_id
    found = int(is_media_T.sum())
    counts = [item.num_tokens for item in packed.images]
    labels_T = packed.labels_T
    if counts:
        labels_T = (packed.token_ids_T if labels_T is None else labels_T).masked_fill(is_media_T, IGNORE)
    if found == sum(counts):
        _check_runs(packed, is_media_T, counts)
        return dataclasses.replace(packed, labels_T=labels_T, expanded=True)
    if found != len(counts):
        raise ValueError(
            f"images: {found} placeholders (token {media_token_id}) in the text for {len(counts)} images"
            f" ({sum(counts)} image tokens); write one placeholder per image"
        )
    copies_T = torch.ones_like(packed.token_ids_T)
    copies_T[is_media_T] = torch.tensor(counts, dtype=torch.int64, device=copies_T.device)
    ends_T = torch.cat([copies_T.new_zeros(1), copies_T.cumsum(0)])
    cu_seqlens = ends_T[packed.cu_seqlens.long()]
    if int(cu_seqlens[-1]) > _MAX_ID:
        raise ValueError(f"images: {int(cu_seqlens[-1])} tokens after expansion; a batch holds at most {_MAX_ID}")
    layout = packed.padded
    if layout is not None:
        layout = _grow(layout, packed.lengths.tolist(), cu_seqlens.diff().tolist())
    return Packed(
        token_ids_T=packed.token_ids_T.repeat_interleave(copies_T),
        cu_seqlens=cu_seqlens.to(torch.int32),
        images=packed.images,
        labels_T=None if labels_T is None else labels_T.repeat_interleave(copies_T),
        padded=layout,
        expanded=True,
    )


def _check_runs(packed: Packed, is_media_T: Tensor, counts: Sequence[int]) -> None:
    where = is_media_T.nonzero().flatten().tolist()
    sequence = packed.sequence_T[is_media_T].tolist()
    first = 0
    for n, count in enumerate(counts):
        last = first + count - 1
        if where[last] - where[first] != count - 1 or sequence[last] != sequence[first]:
            raise ValueError(f"images: the {count} placeholders of image {n} do not stand in one piece")
        first += count


def _grow(layout: PaddedLayout, old: Sequence[int], new: Sequence[int]) -> PaddedLayout:
    """Rows that ended at the right edge of a left-padded batch still do after they grew; others keep their start."""
    left_padded = any(layout.starts)
    at_right = [left_padded and s + n == layout.width for s, n in zip(layout.starts, old, strict=True)]
    needed = [n if right else s + n for s, n, right in zip(layout.starts, new, at_right, strict=True)]
    width = max([layout.width, *needed])
    starts = [width - n if right else s for s, n, right in zip(layout.starts, new, at_right, strict=True)]
    return PaddedLayout(tuple(starts), width)


def _check_layout(ids_T: Tensor, cu_seqlens: Tensor, labels_T: Tensor | None) -> None:
    for name, value in (("token_ids_T", ids_T), ("cu_seqlens", cu_seqlens), ("labels_T", labels_T)):
        whole = isinstance(value, Tensor) and value.ndim == 1 and value.dtype in (torch.int64, torch.int32)
        if value is not None and not whole:
            raise ValueError(f"{name}: must be a flat tensor of integers; Packed.join makes one from lists")
    if labels_T is not None and len(labels_T) != len(ids_T):
        raise ValueError(f"labels_T: {len(labels_T)} labels for {len(ids_T)} tokens")
    # Reading a GPU's numbers would wait for it.
    ends = cu_seqlens.tolist() if cu_seqlens.device.type == "cpu" else [0, len(ids_T)]
    if ends[:1] != [0] or ends[-1] != len(ids_T) or any(a > b for a, b in zip(ends, ends[1:])):
        raise ValueError(f"cu_seqlens: must ascend from 0 to the {len(ids_T)} tokens, got {ends[:8]}")


def _cumulative(lengths: Sequence[int]) -> Tensor:
    total = sum(lengths)
    if total > _MAX_ID:
        raise ValueError(f"sequences: {total} tokens in all; a batch holds at most {_MAX_ID}")
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(torch.int32)


def _ids(row: Any, where: str, lowest: int = 0) -> Tensor:
    """A 1-D int64 tensor of ids in [0, 2^31), or labels that may also be `lowest`."""
    ids = _tensor(row, f"{where}: expected a flat list of integers")
    if ids.numel() == 0 and ids.ndim == 1:
        return torch.empty(0, dtype=torch.int64, device=ids.device)
    if ids.ndim != 1:
        raise ValueError(f"{where}: expected one flat list of integers, got shape {list(ids.shape)}")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(f"{where}: token ids must be integers, got {ids.dtype}")
    ids = ids.long()
    wrong = ((ids < 0) & (ids != lowest)) | (ids > _MAX_ID)
    if bool(wrong.any()):
        at = int(wrong.int().argmax())
        raise ValueError(f"{where}: {int(ids[at])} at position {at} is not a token id (0..{_MAX_ID})")
    return ids


def _media(images: Iterable[Any]) -> tuple[MediaItem, ...]:
    items = []
    for n, image in enumerate(images):
        if not isinstance(image, Sequence) or isinstance(image, str) or len(image) != 2:
            raise ValueError(f"image {n}: expected (pixels, (frames, rows, columns)), got a {type(image).__name__}")
        grid = _tensor(image[1], f"image {n}: grid must be (frames, rows, columns)").tolist()
        whole = isinstance(grid, list) and len(grid) == 3 and all(type(side) is int and side > 0 for side in grid)
        if not whole or grid[1] % 2 or grid[2] % 2:
            raise ValueError(f"image {n}: grid {grid} must be (frames, rows, columns) with even rows and columns")
        pixels, (t, h, w) = _tensor(image[0], f"image {n}: pixels"), grid
        if pixels.ndim != 4 or len(pixels) != t * h * w:
            shape = list(pixels.shape)
            raise ValueError(f"image {n}: pixels {shape} do not hold the {t * h * w} patches of {(t, h, w)}")
        if not pixels.is_floating_point():
            raise ValueError(f"image {n}: pixels must be floating point, got {pixels.dtype}")
        items.append(MediaItem(pixels, (t, h, w)))
    return tuple(items)


def _tensor(value: Any, what: str) -> Tensor:
    """A list, array or tensor as a tensor (torch refuses reversed arrays); a one-line ValueError for anything else."""
    if isinstance(value, np.ndarray) and min(value.strides, default=0) < 0:
        value = value.copy()
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{what} ({str(error).splitlines()[0]})") from None
