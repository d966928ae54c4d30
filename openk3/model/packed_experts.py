"""Routed experts whose weights stay packed in MXFP4, in the order in which kernels read them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from openk3.config.model import TextConfig
from openk3.model.accounting import check_mxfp4_widths
from openk3.ops.grouped_linear import grouped_linear
from openk3.ops.latent_moe.packed import (
    MOST_PLAIN,
    SCALES,
    WORDS,
    ExpertTiles,
    Tiles,
    interleave,
    separate,
    tile_mxfp4,
    tiles_shape,
    untile_mxfp4,
    values_of,
)
from openk3.ops.situ import situ_glu

LEAVES = ("w1_EIC", "w3_EIC", "w2_ECI")  # what `Experts` holds in their place
MOST_VALUES = 1 << 26  # unpacked at a time by the definition


class PackedExperts(nn.Module):
    """All routed experts of a layer in 4.25 bits a weight; `forward` is `Experts.forward` for the same weights.

    Nothing here is trained: codes and scales are buffers. Latents still get their gradient.
    """

    gate_up_codes: Tensor
    gate_up_scales: Tensor
    down_codes: Tensor
    down_scales: Tensor

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        check_mxfp4_widths(config)
        self.inner, self.latent = config.moe_intermediate_size, config.routed_expert_hidden_size
        self.beta, self.linear_beta = config.activation_situ_beta, config.activation_situ_linear_beta
        self.wide = False  # some scale byte is above MOST_PLAIN
        self.rows = -(-self.inner // 16) * 32
        for name, shape in (("gate_up", (self.rows, self.latent)), ("down", (self.latent, self.inner))):
            sizes = (config.num_experts, *tiles_shape(*shape))
            self.register_buffer(f"{name}_codes", torch.empty(*sizes, WORDS, dtype=torch.int32))
            self.register_buffer(f"{name}_scales", torch.empty(*sizes, SCALES, dtype=torch.int32))
        self.register_load_state_dict_post_hook(lambda module, keys: module.measure())

    def forward(self, z_MC: Tensor, counts_E: Tensor) -> Tensor:
        """Rows sorted by expert, counts_E of them each -> [M, C]; experts are unpacked some at a time."""
        used = [(expert, count) for expert, count in enumerate(counts_E.tolist()) if count]
        at_once = max(1, MOST_VALUES // (3 * self.inner * self.latent))
        parts, start = [], 0
        for first in range(0, len(used), at_once):
            ids, counts = zip(*used[first : first + at_once])
            rows = z_MC[start : start + sum(counts)]
            parts.append(self._some(rows, torch.tensor(ids), torch.tensor(counts, device=counts_E.device)))
            start += sum(counts)
        return torch.cat(parts) if parts else z_MC * 0

    def _some(self, rows_MC: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
        """The outputs of these experts' rows."""
        tiles = self.tiles()
        w1, w3 = separate(values_of(_chosen(tiles.gate_up, ids), rows_MC.dtype), self.inner)
        gate, up = grouped_linear(rows_MC, w1, counts), grouped_linear(rows_MC, w3, counts)
        act = situ_glu(gate, up, self.beta, self.linear_beta)
        return grouped_linear(act, values_of(_chosen(tiles.down, ids), rows_MC.dtype), counts)

    def tiles(self) -> ExpertTiles:
        """The weights as kernels take them."""
        gate_up = Tiles(self.gate_up_codes, self.gate_up_scales, self.rows, self.latent)
        return ExpertTiles(
            gate_up, Tiles(self.down_codes, self.down_scales, self.latent, self.inner), self.inner, self.wide
        )

    @torch.no_grad()
    def load(self, leaf: str, expert: int, codes: Tensor, scale: Tensor) -> None:
        """Set one matrix of one expert, by its name in LEAVES, from what `quantize_mxfp4` gives."""
        self.wide |= bool((scale > MOST_PLAIN).any())
        codes, scale = codes[None], scale[None]
        if leaf == "w2_ECI":
            tiles = tile_mxfp4(codes, scale)
            self.down_codes[expert], self.down_scales[expert] = tiles.codes_EUSW[0], tiles.scales_EUSX[0]
            return
        part = LEAVES.index(leaf)
        tiles = tile_mxfp4(interleave(codes, codes), interleave(scale, scale))
        for mine, new in zip((self.gate_up_codes, self.gate_up_scales), (tiles.codes_EUSW, tiles.scales_EUSX)):
            _half(mine[expert], part).copy_(_half(new[0], part))

    def stored(self, leaf: str, expert: int) -> tuple[Tensor, Tensor]:
        """What `load` was given, byte for byte, on the CPU."""
        tiles, one = self.tiles(), torch.tensor([expert])
        if leaf == "w2_ECI":
            codes, scale = untile_mxfp4(_chosen(tiles.down, one))
            return codes[0].cpu(), scale[0].cpu()
        both = (separate(x, self.inner)[LEAVES.index(leaf)] for x in untile_mxfp4(_chosen(tiles.gate_up, one)))
        codes, scale = (x[0].contiguous().cpu() for x in both)
        return codes, scale

    def measure(self) -> None:
        """Find out whether scales are wide after the buffers were set from outside; asks the device."""
        scales = (self.gate_up_scales, self.down_scales)
        self.wide = any(bool((x.view(torch.uint8) > MOST_PLAIN).any()) for x in scales if not x.is_meta)


def _chosen(tiles: Tiles, ids: Tensor) -> Tiles:
    """The tiles of some experts."""
    ids = ids.to(tiles.codes_EUSW.device)
    return Tiles(tiles.codes_EUSW[ids], tiles.scales_EUSX[ids], tiles.rows, tiles.columns)


def _half(units: Tensor, part: int) -> Tensor:
    """A view of what belongs to a unit's first or second 16 rows: half of the codes, two of each four scale bytes."""
    if units.shape[-1] == WORDS:
        return units.unflatten(-1, (2, -1))[..., part, :]
    return units.view(torch.int16).unflatten(-1, (-1, 2))[..., part]
