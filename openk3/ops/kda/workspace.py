"""The workspace of the KDA kernels: what the scans read of every tile; the most are cut only when asked for."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FEW_HEADS = 16  # A_log has one gradient a head: in so few sums the roundings that others drown are seen
FEW_TILES = 3 * 2**10  # tiles times heads, 8,192 tokens of 12: longer calls would pay more than a quarter of their time


def kept(heads: int, tiles: int = 1) -> tuple[str, ...]:
    """What gradients want kept of what rounding leaves: that of kr; with few heads, of all that meets a state.

    Long calls, of which training consists, do without.
    """
    few = heads <= FEW_HEADS and heads * tiles <= FEW_TILES
    return ("kr_rest", "nkd_rest", "inv_rest", "qd_rest") if few else ("kr_rest",)


@dataclass(frozen=True)
class Workspace:
    """What the scans read, for X tiles of C tokens. kd is stored negated, so that scans only ever add products."""

    nkd: Tensor  # [X, H, C, K]
    qd: Tensor  # [X, H, C, K]
    kr: Tensor  # [X, H, C, K]
    inv: Tensor  # [X, H, C, C]
    mqk: Tensor  # [X, H, C, C]
    decay: Tensor  # [X, H, K] float32
    beta: Tensor  # [X, H, C] float32, zero behind a tile's last token
    kr_rest: Tensor | None = None  # [X, H, C, K]: what rounding left of kr, for reverse scans; None in float32
    nkd_rest: Tensor | None = None  # as nkd; this and what follows where heads are few
    inv_rest: Tensor | None = None  # as inv
    qd_rest: Tensor | None = None  # as qd

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """X, H, C and K."""
        X, H, C, K = self.qd.shape
        return X, H, C, K

    @property
    def movable(self) -> bool:
        """Whether Hopper's copy engine takes the tiles: bfloat16, 32 tokens of 128 channels, one at least."""
        narrow = (self.nkd, self.qd, self.kr, self.inv, self.mqk, self.decay, self.beta)
        *count, C, K = self.nkd.shape
        return (
            self.nkd.dtype == torch.bfloat16 and (C, K) == (32, 128) and 0 not in count and all(map(copyable, narrow))
        )


class CutWorkspace(Workspace):
    """A workspace in two allocations. Kernels that take addresses never ask for its tensors, whose cutting takes time.

    `place` says where all of them lie: two workspaces of one place have the same addresses, formats and shapes.
    """

    narrow: Tensor
    wide: Tensor
    place: tuple[int, int, torch.dtype, tuple[str, ...], tuple[int, int, int, int]]

    def __init__(
        self, sizes: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, *, rests: tuple[str, ...]
    ) -> None:
        X, H, C, K = sizes
        rows, matrix = X * H * C * K, X * H * C * C
        widths = [C if name == "inv_rest" else K for name in rests]
        narrow = torch.empty(3 * rows + 2 * matrix + X * H * C * sum(widths), dtype=dtype, device=device)
        wide = torch.empty(X * H * (K + C), dtype=torch.float32, device=device)
        vars(self).update(narrow=narrow, wide=wide)
        vars(self)["place"] = (narrow.data_ptr(), wide.data_ptr(), dtype, rests, sizes)
        first = 3 * rows + 2 * matrix
        for name, width in zip(rests, widths):
            vars(self)[name] = narrow.as_strided((X, H, C, width), (H * C * width, C * width, width, 1), first)
            first += X * H * C * width

    def __getattr__(self, name: str) -> Any:
        if name not in _CUTS:
            raise AttributeError(name)
        X, H, C, K = self.sizes
        rows, matrix = X * H * C * K, X * H * C * C
        if name in ("decay", "beta"):
            width, first = (K, 0) if name == "decay" else (C, X * H * K)
            x = self.wide.as_strided((X, H, width), (H * width, width, 1), first)
        elif name in ("inv", "mqk"):
            first = 3 * rows + (matrix if name == "mqk" else 0)
            x = self.narrow.as_strided((X, H, C, C), (H * C * C, C * C, C, 1), first)
        else:
            x = self.narrow.as_strided(self.sizes, (H * C * K, C * K, K, 1), _CUTS.index(name) * rows)
        vars(self)[name] = x
        return x

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """X, H, C and K."""
        return self.place[4]

    @property
    def movable(self) -> bool:
        """As of any workspace; the start of each tensor is as aligned as that of its allocation."""
        narrow, wide, dtype, _, (X, H, C, K) = self.place
        return dtype == torch.bfloat16 and (C, K) == (32, 128) and X * H > 0 and (narrow | wide) % 16 == 0


_CUTS = ("nkd", "qd", "kr", "inv", "mqk", "decay", "beta")  # the first three are where they stand


def copyable(x: Tensor) -> bool:
    """Whether the copy engine takes a tensor: it must be contiguous, at an address that 16 divides."""
    return x.data_ptr() % 16 == 0 and x.is_contiguous()
