"""MoonViT-V2 and its projector: patches of images and short video chunks become one vector per 2x2 patches.

Attention over a chunk of several frames has two forms. `joint` (the released code): every patch of the item attends to
every other. `factorised` (the report's description): with one set of q, k and v, patches attend inside their frame,
then each position attends to itself across the frames, o = A_time(q, k, A_space(q, k, v)); on one frame A_time is the
identity, so still images are the same in both forms.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from openk3.config.model import VisionConfig
from openk3.inputs.packed import MediaItem
from openk3.model.norm import RMSNorm
from openk3.ops.norm import at_least_float32
from openk3.ops.saved import again

NORM_EPS = torch.finfo(torch.float32).eps  # the released blocks leave eps unset and normalise in float32
ROPE_BASE = 10000.0
MAX_SIDE = 512  # rows or columns of patches that the rotary table covers

Grid = tuple[int, int, int]
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def position_embedding(table_YXD: Tensor, rows: int, columns: int) -> Tensor:
    """The learned table stretched to the image by bilinear resizing [rows*columns, D], in the table's dtype."""
    if table_YXD.shape[:2] == (rows, columns):
        return table_YXD.flatten(0, 1)
    table_1DYX = table_YXD.permute(2, 0, 1).unsqueeze(0)
    resized_1DYX = F.interpolate(table_1DYX, size=(rows, columns), mode="bilinear", align_corners=False)
    return resized_1DYX.squeeze(0).flatten(1).t()


def time_embedding(frames: int, width: int, like: Tensor) -> Tensor:
    """[sin | cos] of f * 10000^(-i / (width/2)) for each frame f [frames, width], in the dtype of `like`."""
    half = width // 2
    rates = ROPE_BASE ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(frames, dtype=torch.float64).unsqueeze(1) * rates
    return torch.cat((angles.sin(), angles.cos()), 1).to(like)


def rotary_angles(grid: Grid, head_dim: int) -> Tensor:
    """Angle of each adjacent pair of channels [t*h*w, head_dim/2], float64.

    Pair 2i turns by column * 10000^(-4i/head_dim), pair 2i+1 by row * 10000^(-4i/head_dim); every frame alike.
    """
    frames, rows, columns = grid
    rates = ROPE_BASE ** (-torch.arange(0, head_dim, 4, dtype=torch.float64) / head_dim)
    x_YXR = (torch.arange(columns, dtype=torch.float64).unsqueeze(1) * rates).expand(rows, -1, -1)
    y_YXR = (torch.arange(rows, dtype=torch.float64).unsqueeze(1) * rates).unsqueeze(1).expand(-1, columns, -1)
    return torch.stack((x_YXR, y_YXR), -1).reshape(rows * columns, -1).repeat(frames, 1)


def rotate(x_THK: Tensor, turn_TR: Tensor) -> Tensor:
    """Turn adjacent channel pairs, as complex numbers, by turn [T, K/2] (complex); in at least float32, cast back."""
    pairs = torch.view_as_complex(at_least_float32(x_THK).unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turn_TR.unsqueeze(1)).flatten(-2).to(x_THK.dtype)


def merge_patches(x_TD: Tensor, grid: Grid) -> Tensor:
    """Mean over frames, then 2x2 neighbours together, row by row [h*w/4, 4, D]."""
    frames, rows, columns = grid
    pooled_TD = x_TD.unflatten(0, (frames, -1)).mean(0) if frames > 1 else x_TD
    return pooled_TD.view(rows // 2, 2, columns // 2, 2, -1).transpose(1, 2).flatten(2, 3).flatten(0, 1)


class PositionTable(nn.Module):
    """The learned table of positions, weight [rows, columns, D]."""

    def __init__(self, rows: int, columns: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns, width))


class PatchEmbed(nn.Module):
    """A linear map of each 14x14 patch plus where and when it is."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        width, side = config.vt_hidden_size, config.patch_size
        self.proj = nn.Conv2d(3, width, side, stride=side, bias=False)
        self.pos_emb = PositionTable(config.init_pos_emb_height, config.init_pos_emb_width, width)

    def forward(self, pixels_N3PP: Tensor, grids: Sequence[Grid]) -> Tensor:
        """x_TD of all items end to end."""
        weight = self.proj.weight
        x_TD = F.linear(pixels_N3PP.flatten(1).to(weight.dtype), weight.flatten(1))
        known: dict[Grid, Tensor] = {}
        for grid in grids:
            if grid not in known:
                known[grid] = self._position(grid)
        return x_TD + torch.cat([known[grid] for grid in grids])

    def _position(self, grid: Grid) -> Tensor:
        frames, rows, columns = grid
        where_SD = position_embedding(self.pos_emb.weight, rows, columns)
        if frames == 1:
            return where_SD
        return (where_SD + time_embedding(frames, where_SD.shape[1], where_SD).unsqueeze(1)).flatten(0, 1)


class VisionMLP(nn.Module):
    """fc1(GELU_tanh(fc0(x)))."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.fc0 = nn.Linear(width, inner, bias=False)
        self.fc1 = nn.Linear(inner, width, bias=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        """y_TD."""
        return self.fc1(F.gelu(self.fc0(x_TD), approximate="tanh"))


class Block(nn.Module):
    """x += W_o attention(norm0 x);  x += mlp(norm1 x)."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        width, inner = config.vt_hidden_size, config.qkv_hidden_size
        self.heads = config.vt_num_attention_heads
        self.norm0 = RMSNorm(width, NORM_EPS)
        self.wqkv = nn.Linear(width, 3 * inner, bias=False)
        self.wo = nn.Linear(inner, width, bias=False)
        self.norm1 = RMSNorm(width, NORM_EPS)
        self.mlp = VisionMLP(width, config.vt_intermediate_size)

    def forward(self, x_TD: Tensor, turn_TR: Tensor, attend: Attention) -> Tensor:
        """x_TD after both halves."""
        q_THK, k_THK, v_THK = self.wqkv(self.norm0(x_TD)).unflatten(-1, (3, self.heads, -1)).unbind(1)
        o_THK = attend(rotate(q_THK, turn_TR), rotate(k_THK, turn_TR), v_THK)
        x_TD = x_TD + self.wo(o_THK.flatten(1))
        return x_TD + self.mlp(self.norm1(x_TD))


class Encoder(nn.Module):
    """The blocks and the last norm."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.head_dim = config.qkv_hidden_size // config.vt_num_attention_heads
        self.factorised = config.video_attention == "factorised"
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.vt_num_hidden_layers))
        self.final_layernorm = RMSNorm(config.vt_hidden_size, NORM_EPS)

    def forward(self, x_TD: Tensor, grids: Sequence[Grid]) -> Tensor:
        """x_TD; items of equal length must be neighbours in `grids`."""
        angles = {grid: rotary_angles(grid, self.head_dim) for grid in set(grids)}
        angles_TR = torch.cat([angles[grid] for grid in grids]).to(x_TD.device, at_least_float32(x_TD).dtype)
        turn_TR = torch.polar(torch.ones_like(angles_TR), angles_TR)
        attend = FrameAttention(grids, self.factorised)
        for block in self.blocks:
            x_TD = again("vision", partial(block, turn_TR=turn_TR, attend=attend), x_TD)
        return self.final_layernorm(x_TD)


class FrameAttention:
    """Bidirectional attention inside each item; runs of items of one shape go in one batch."""

    def __init__(self, grids: Sequence[Grid], factorised: bool) -> None:
        self.factorised = factorised
        runs = [(shape, len(list(run))) for shape, run in itertools.groupby((t, h * w) for t, h, w in grids)]
        self.runs = [(items, frames, patches) for (frames, patches), items in runs]

    def __call__(self, q_THK: Tensor, k_THK: Tensor, v_THK: Tensor) -> Tensor:
        """o_THK, scale K^-0.5."""
        sizes = [items * frames * patches for items, frames, patches in self.runs]
        parts = zip(q_THK.split(sizes), k_THK.split(sizes), v_THK.split(sizes))
        return torch.cat([self._run(*qkv, run) for qkv, run in zip(parts, self.runs)])

    def _run(self, q: Tensor, k: Tensor, v: Tensor, run: tuple[int, int, int]) -> Tensor:
        items, frames, patches = run
        if not self.factorised or frames == 1:
            return _attend(q, k, v, items)
        v = _attend(q, k, v, items * frames)

        def by_position(x: Tensor) -> Tensor:
            return x.unflatten(0, (items, frames, patches)).transpose(1, 2).flatten(0, 2)

        o = _attend(by_position(q), by_position(k), by_position(v), items * patches)
        return o.unflatten(0, (items, patches, frames)).transpose(1, 2).flatten(0, 2)


def _attend(q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, num_sequences: int) -> Tensor:
    q, k, v = (x.unflatten(0, (num_sequences, -1)).transpose(1, 2) for x in (q_THK, k_THK, v_THK))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1)


class MoonViT(nn.Module):
    """The vision tower; parameters are shared by images and video."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.max_frames = config.init_pos_emb_time
        self.patch_embed = PatchEmbed(config)
        self.encoder = Encoder(config)

    def forward(self, images: Sequence[MediaItem]) -> Tensor:
        """Merged patches of all items, in their order [sum of h*w/4, 4, D].

        Items do not see each other: a batch only shares its matrix products. Raises ValueError for an item too large
        and for patches of another size.
        """
        side = list(self.patch_embed.proj.weight.shape[1:])
        for n, (pixels, (frames, rows, columns)) in enumerate(images):
            if list(pixels.shape[1:]) != side:
                raise ValueError(f"image {n}: patches of {list(pixels.shape[1:])}; the vision tower reads {side}")
            if frames > self.max_frames or max(rows, columns) > MAX_SIDE:
                raise ValueError(
                    f"image {n}: grid {(frames, rows, columns)} exceeds {self.max_frames} frames"
                    f" or {MAX_SIDE} patches on a side; preprocess it first"
                )
        # Equal lengths side by side: attention then takes each run of them in one batch.
        order = sorted(range(len(images)), key=lambda n: (images[n].grid_thw[0], images[n].num_tokens))
        grids = [images[n].grid_thw for n in order]
        x_TD = self.patch_embed(torch.cat([images[n].pixels_N3PP for n in order]), grids)
        parts = self.encoder(x_TD, grids).split([t * h * w for t, h, w in grids])
        merged = {n: merge_patches(part, grid) for n, part, grid in zip(order, parts, grids)}
        return torch.cat([merged[n] for n in range(len(images))])


class Projector(nn.Module):
    """Four merged patches to one vector of the backbone's width: Linear, exact GELU, Linear, RMSNorm."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        merged = config.vt_hidden_size * config.merge_kernel_size[0] * config.merge_kernel_size[1]
        self.proj = nn.Sequential(
            nn.Linear(merged, merged, bias=False),
            nn.GELU(),
            nn.Linear(merged, config.text_hidden_size, bias=False),
        )
        self.post_norm = RMSNorm(config.text_hidden_size, config.projector_ln_eps)

    def forward(self, merged_T4D: Tensor) -> Tensor:
        """One vector per image token [n, D]."""
        return self.post_norm(self.proj(merged_T4D.flatten(1)))
