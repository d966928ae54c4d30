"""The short convolution's kernels on a GPU: against float64 at full size, and past 2^31 values."""

from __future__ import annotations

import pytest
import torch
from kda_checks import cu_seqlens
from kda_kernel_checks import errors, poisoned_memory, same_bits
from torch import Tensor

from openk3.ops.short_conv import short_conv, short_convs

pytestmark = pytest.mark.gpu


def draw(lengths: list[int], C: int, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """Inputs, weights, windows, and gradients of what comes out."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shapes = {"x": (sum(lengths), C), "weight": (C, 4), "window": (len(lengths), C, 4)}
    shapes |= {"d_y": shapes["x"], "d_new": shapes["window"]}
    values = {name: torch.randn(shape, generator=generator, device="cuda") for name, shape in shapes.items()}
    return {name: x if name == "weight" else x.to(dtype) for name, x in values.items()}


def everything(values: dict[str, Tensor], lengths: list[int], activation: bool = True) -> dict[str, Tensor]:
    """Outputs, windows and all gradients."""
    leaves = [values[name].detach().clone().requires_grad_() for name in ("x", "weight", "window")]
    bounds = cu_seqlens(lengths).cuda()
    y, new = short_conv(leaves[0], leaves[1], window_NCW=leaves[2], cu_seqlens=bounds, activation=activation)
    grads = torch.autograd.grad((y, new), leaves, (values["d_y"], values["d_new"]))
    return {"y": y.detach(), "new": new.detach()} | dict(zip(("d_x", "d_weight", "d_window"), grads))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("lengths", [[1], [0, 3, 4097, 1, 0, 2, 1000], [1] * 700, [16384]], ids=lambda x: str(x[:4]))
def test_against_float64(lengths: list[int], dtype: torch.dtype) -> None:
    """Outputs, windows and gradients of packed sequences, 12 heads wide."""
    values = draw(lengths, 1536, dtype)
    got = everything(values, lengths)
    found = errors(got, everything({name: x.double() for name, x in values.items()}, lengths))
    assert max(found.values()) < (4e-3 if dtype == torch.bfloat16 else 2e-6), found


def test_same_bits_every_time_and_alone() -> None:
    """Two runs, a run amid NaN, and q, k and v convolved at once give the same bits."""
    lengths = [5, 0, 3000, 64]
    parts = [draw(lengths, 512, torch.bfloat16, seed) for seed in range(3)]
    want = [everything(part, lengths) for part in parts]
    with poisoned_memory():
        for part, right in zip(parts, want):
            assert same_bits(right, everything(part, lengths)) == []
    inputs = [tuple(part[name] for part in parts) for name in ("x", "weight", "window")]
    ys, news = short_convs(inputs[0], inputs[1], windows_NCW=inputs[2], cu_seqlens=cu_seqlens(lengths).cuda())
    for y, new, right in zip(ys, news, want):
        assert torch.equal(y, right["y"]) and torch.equal(new, right["new"])


def test_case_K02_a_more_than_2_to_the_31_values() -> None:
    """K02 a: the last 64 of 174,800 tokens of 12,288 channels give what they give alone, gradients too."""
    T, C = 174_800, 96 * 128
    alone = draw([64], C, torch.bfloat16)
    alone["window"].zero_()
    whole = alone | {name: alone[name].new_zeros(T, C) for name in ("x", "d_y")}
    for name in ("x", "d_y"):
        whole[name][-64:] = alone[name]
    want, got = everything(alone, [64]), everything(whole, [T])
    assert not got["y"][:-64].any() and not got["d_x"][:-67].any()
    assert torch.equal(got["y"][-64:], want["y"]) and torch.equal(got["new"], want["new"])
    assert torch.equal(got["d_x"][-64:], want["d_x"])
    assert errors({"d_weight": got["d_weight"]}, {"d_weight": want["d_weight"]})["d_weight"] < 1e-5
