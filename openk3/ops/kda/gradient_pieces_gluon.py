"""Pieces of the Gluon kernel of gradients inside KDA tiles: a tile's gate, its normalised rows, sums over tokens."""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from openk3.ops.norm import L2_EPS

_EPS = gl.constexpr(L2_EPS)


@gluon.jit
def add(a, b):
    """How two neighbouring sums become one."""
    return a + b


@gluon.jit
def running(x):
    """Sums over all tokens up to each, x [K, C]: with its rows in another order x is laid out in blocks."""
    K: gl.constexpr = x.shape[0]
    C: gl.constexpr = x.shape[1]
    blocks: gl.constexpr = gl.BlockedLayout([1, 2], [8, 4], [8, 1], [1, 0])
    y = x.reshape([K // 16, 2, 8, C]).permute([1, 0, 2, 3]).reshape([K, C])
    y = gl.associative_scan(gl.convert_layout(y, blocks, assert_trivial=True), 1, add)
    y = y.reshape([2, K // 16, 8, C]).permute([1, 0, 2, 3]).reshape([K, C])
    return gl.convert_layout(y, x.type.layout, assert_trivial=True)


@gluon.jit
def later_sums(x, ones_s, acc):
    """acc plus sums over all tokens from each on, x [K, C] in three bfloat16 parts: a product with a triangle of ones.
    Where decay is strong, a tile's last token gives a hundred times what is left: a part less shows in the sums."""
    left: gl.constexpr = gl.DotOperandLayout(0, x.type.layout, 2)
    for _ in gl.static_range(3):
        part = x.to(gl.bfloat16)
        acc = warpgroup_mma(gl.convert_layout(part, left), ones_s, acc, is_async=True)
        x = x - part.to(gl.float32)
    return warpgroup_mma_wait(0, (acc,))


@gluon.jit
def exponent(logit, a_log_ptr, bias_ptr, head):
    """What the gate's sigmoid takes, [K, C], and the slope of that in the logit."""
    K: gl.constexpr = logit.shape[0]
    layout: gl.constexpr = logit.type.layout
    slope = gl.minimum(gl.exp2(gl.load(a_log_ptr + head).to(gl.float32) * 1.4426950408889634), 1e30)
    channel = gl.arange(0, K, layout=gl.SliceLayout(1, layout))
    shift = gl.load(bias_ptr + head * K + channel).to(gl.float32) * slope
    return logit.to(gl.float32) * slope + shift[:, None], slope


@gluon.jit
def decay(logit, live, bound, a_log_ptr, bias_ptr, head):
    """Running sums of the log2 decay of a tile, [K, C], less the middle of all, and that."""
    x, _ = exponent(logit, a_log_ptr, bias_ptr, head)
    gate = (bound * 1.4426950408889634) / (1.0 + gl.exp2(x * -1.4426950408889634))
    gate = gl.where(live[None, :], gate, gl.zeros_like(gate))
    middle = 0.5 * gl.sum(gate, 1)
    return running(gate) - middle[:, None], middle


@gluon.jit
def norm_gradient(d_x, x, norm, dots_s, scratch_s, size):
    """Gradient of a row from that of the normalised row x, both as columns [K, C]."""
    over_c: gl.constexpr = gl.SliceLayout(0, x.type.layout)
    dots_s.store(column_sums(d_x * x, scratch_s))
    return (d_x - x * dots_s.load(over_c)[None, :]) * (norm.load(over_c) * size)[None, :]


@gluon.jit
def column_sums(x, scratch_s):
    """Sums over channels of x [K, C], by way of shared memory: a warp for every few tokens."""
    K: gl.constexpr = x.shape[0]
    C: gl.constexpr = x.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([K // 8, 1], [8, 4], [1, C // 4], [0, 1])
    scratch_s.store(x)
    return gl.sum(scratch_s.load(layout), 0)


@gluon.jit
def norms(buffer, layout: gl.constexpr):
    """What normalises each row, in shared memory."""
    x = buffer.load(layout).to(gl.float32)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return gl.allocate_shared_memory(gl.float32, [buffer.shape[0]], line, gl.rsqrt(gl.sum(x * x, 1) + _EPS))


@gluon.jit
def row(buffer, norm, layout: gl.constexpr):
    """Normalised rows, [K, C]."""
    return buffer.permute((1, 0)).load(layout).to(gl.float32) * norm.load(gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def rest(x, rounded):
    """What rounding left of x, as bfloat16."""
    return (x - rounded.to(gl.float32)).to(gl.bfloat16)


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """Nothing by itself: the kernel of gradients has all of this inside."""
    return []
