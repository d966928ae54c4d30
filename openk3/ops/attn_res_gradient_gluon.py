"""Gluon twin of the depth-mixing gradients for Hopper: a token's rows stay in shared memory until all is written.

So each row is read from memory once however often it is used. A row's place is asked for anew at once: what the ring
holds beyond one token's rows is on its way for the next.
"""

from functools import lru_cache
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from openk3.ops.attn_res_gluon import (
    Settings,
    _added,
    _arrived,
    _blocks,
    _combined,
    _dot,
    _layout,
    _product,
    _request,
    _row,
    _store_row,
    _sums,
    _vector,
    _wide,
    _width,
    _zeros,
    settings,
)


@gluon.jit
def _of_token(numbers, token, T, L: gl.constexpr):
    """L numbers of a token, or of the last one past it."""
    row = gl.minimum(token, T - 1).to(gl.int64) * L
    found = ()
    for i in gl.static_range(L):
        found = found + (gl.load(numbers + row + i),)
    return found


@gluon.jit
def _slot(base, j: gl.constexpr, SLOTS: gl.constexpr):
    """Slot of a token's row j, if its first one is in slot `base`."""
    return gl.where(base + j >= SLOTS, base + j - SLOTS, base + j)


@gluon.jit
def _request_again(
    ring, base, j: gl.constexpr, streams, token, T, SHAPE: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """Ask for the row that takes the place of a token's row j, which is done with."""
    D: gl.constexpr = SHAPE[0]
    SLOTS: gl.constexpr = SHAPE[1]
    ROWS: gl.constexpr = len(streams)
    later = token + (j + SLOTS) // ROWS * gl.num_programs(0)
    _request(ring, _slot(base, j, SLOTS), streams[(j + SLOTS) % ROWS], later, T, D, WARPS)
    async_copy.commit_group()


@gluon.jit
def _norm_gradient(
    ring, slot, out_weight, mixture, d_out, index, norm_eps, D: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """Gradient of the mixture from that of its norm, and the out weight's gradient with this token's share.

    The norm's gradient is read from the ring twice: registers are short.
    """
    d_y = _arrived(ring, slot, D, index.shape[0], WARPS)
    scaled = _product(d_y, _wide(_row(out_weight, 0, index, D)))
    along, size = _sums((_dot(scaled, mixture), _dot(mixture, mixture)))
    inverse = gl.rsqrt(size / D + norm_eps)
    slot = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [slot], gl.int32, False, 1)  # or it stays in registers
    d_y = _arrived(ring, slot, D, index.shape[0], WARPS)
    d_out = _added(d_out, inverse, _product(d_y, mixture))
    scaled = _product(d_y, _wide(_row(out_weight, 0, index, D)))
    return _combined(inverse, scaled, -inverse * inverse * inverse * along / D, mixture), d_out


@gluon.jit
def _zero(x):
    """0, which the compiler cannot know before it knows x: any number times zero, or NaN, as an integer."""
    code: gl.constexpr = "{ .reg .f32 t; mul.f32 t, $1, 0f00000000; cvt.rzi.s32.f32 $0, t; }"
    return gl.inline_asm_elementwise(code, "=r,f", [x], gl.int32, True, 1)


@gluon.jit(do_not_specialize=["T"])
def mix_backward_kernel(
    sources, grads, query, norm_weight, out_weight, d_mixed, d_normed, d_newest, probs, scores, rrms,
    d_vectors, d_outs, T, norm_eps,
    D: gl.constexpr, BLOCK: gl.constexpr, SLOTS: gl.constexpr, WANTED: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Gradients of the sources (of source i if bit i of WANTED is set), and this program's share of the vectors'."""
    L: gl.constexpr = len(sources)
    COUNT: gl.constexpr = _blocks(D, BLOCK)
    SHAPE: gl.constexpr = (D, SLOTS)
    if d_normed is not None:
        streams = (d_normed,) + sources
    else:
        streams = (d_mixed,) + sources
    index = gl.arange(0, BLOCK, _layout(BLOCK, WARPS))
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ring = gl.allocate_shared_memory(sources[0].dtype.element_ty, [SLOTS, _width(D)], flat)
    token = gl.program_id(0)
    for n in gl.static_range(SLOTS):
        _request(ring, n, streams[n % (L + 1)], token + n // (L + 1) * gl.num_programs(0), T, D, WARPS)
        async_copy.commit_group()
    d_vector = _zeros(index, COUNT)
    d_out = _zeros(index, COUNT)
    weights = _of_token(probs, token, T, L)
    base = 0
    while token < T:
        at = token.to(gl.int64) * D
        async_copy.wait_group(SLOTS - 1)
        if d_normed is not None:
            mixture = _zeros(index, COUNT)
            for i in gl.static_range(L):
                async_copy.wait_group(SLOTS - 2 - i)
                value = _arrived(ring, _slot(base, i + 1, SLOTS), D, BLOCK, WARPS)
                mixture = _added(mixture, weights[i], value)
            # not rounded, see attn_res_kernel._mixture
            grad, d_out = _norm_gradient(ring, base, out_weight, mixture, d_out, index, norm_eps, D, WARPS)
            if d_mixed is not None:
                grad = _added(grad, 1.0, _wide(_row(d_mixed, at, index, D)))
        else:
            grad = _arrived(ring, base, D, BLOCK, WARPS)
        d_weights = ()
        for first in gl.static_range(0, L, 6):
            parts = ()
            for i in gl.static_range(first, first + 6):
                if i < L:
                    if d_normed is None:
                        async_copy.wait_group(SLOTS - 2 - i)
                    value = _arrived(ring, _slot(base, i + 1, SLOTS), D, BLOCK, WARPS)
                    parts = parts + (_dot(grad, value),)
            d_weights = d_weights + _sums(parts)
        inverses = _of_token(rrms, token, T, L)
        found = _of_token(scores, token, T, L)
        next_weights = _of_token(probs, token + gl.num_programs(0), T, L)
        mean = 0.0
        for i in gl.static_range(L):
            mean += weights[i] * d_weights[i]
        token += _zero(mean)  # so that no address below is made, and kept in registers, any earlier
        at = token.to(gl.int64) * D
        vector = _vector(query, norm_weight, index, D)
        _request_again(ring, base, 0, streams, token, T, SHAPE, WARPS)
        for i in gl.static_range(L):
            value = _arrived(ring, _slot(base, i + 1, SLOTS), D, BLOCK, WARPS)
            _request_again(ring, base, i + 1, streams, token, T, SHAPE, WARPS)
            toward = weights[i] * (d_weights[i] - mean) * inverses[i]
            d_vector = _added(d_vector, toward, value)
            if (WANTED >> i) & 1:
                # score = inverse * (value . vector), and d inverse / d value = -inverse^3 * value / D
                d_value = _combined(toward, vector, -toward * found[i] * inverses[i] / D, value)
                d_value = _added(d_value, weights[i], grad)
                if (i == L - 1) & (d_newest is not None):
                    d_value = _added(d_value, 1.0, _wide(_row(d_newest, at, index, D)))
                _store_row(grads[i], at, d_value, index, D)
        base = _slot(base, L + 1, SLOTS)
        weights = next_weights
        token += gl.num_programs(0)
    async_copy.wait_group(0)
    share = gl.program_id(0).to(gl.int64) * D
    _store_row(d_vectors, share, d_vector, index, D)
    if d_outs is not None:
        _store_row(d_outs, share, d_out, index, D)


@lru_cache(maxsize=256)
def backward_constants(D: int, L: int, wanted: int, normed: bool, newest: bool) -> tuple[dict[str, int], Settings]:
    """Constants of the backward kernel, as measured for 2, 5 and 9 sources."""
    if normed and L <= 5:
        how = settings(D, 16, 1, 2)
    else:
        how = settings(D, 8, 1, 2 if newest else 4)
    return {"D": D, "BLOCK": how.block, "SLOTS": how.rows, "WANTED": wanted, "WARPS": how.warps}, how


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """What the launcher compiles for rows of 7168 in bfloat16: normed with and without a sum, as layers read; bare."""
    added, bare = ("d_mixed",), ("out_weight", "d_normed", "d_newest", "d_outs")
    normed = ("d_mixed", "d_newest")
    return [_case(L, absent) for absent in (added, normed, bare) for L in (9, 2, 5)]


def _case(L: int, absent: tuple[str, ...]) -> tuple[Any, dict[str, Any], dict[str, int]]:
    """A case of `compile_cases`; arguments named in `absent` are not given."""
    given = ("d_normed" not in absent, "d_newest" not in absent)
    constants, how = backward_constants(7168, L, 2**L - 1, *given)
    known: dict[str, Any] = constants | {"T": "i32", "norm_eps": "fp32"}
    known |= dict.fromkeys(("probs", "scores", "rrms", "d_vectors", "d_outs"), "*fp32")
    known |= dict.fromkeys(("sources", "grads"), ("*bf16",) * L)
    arguments = {x: None if x in absent else known.get(x, "*bf16") for x in mix_backward_kernel.arg_names}
    return mix_backward_kernel, arguments, how.options()
