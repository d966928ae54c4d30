"""Triton kernel of causal attention over packed sequences: outputs and log-sums in float32, largest scores on request.

A program takes one tile of query rows of one head and walks over the keys that its rows see, keeping a running maximum,
sum and output of each row. Scores of a block are formed before the values of the block before it are summed: one
product can run while the other one's probabilities are made. Keys come in two parts with strides of their own, so that
a part that all heads share is never copied for each of them.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from openk3.ops.mla.attention_views import Widths


class Settings(NamedTuple):
    """Query rows and keys of a block, and launch options."""

    rows: int
    keys: int
    warps: int
    stages: int

    def options(self) -> dict[str, int]:
        """What the compiler takes."""
        return {"num_warps": self.warps, "num_stages": self.stages}


def settings(element_bytes: int, arch: int) -> Settings:
    """For keys of up to 192 channels and values of 128."""
    if element_bytes == 4:
        return Settings(32, 32, 4, 1)
    if arch == 90:
        return Settings(128, 64, 8, 3)
    return Settings(128, 32, 8, 3 if arch == 80 else 2)


@triton.jit
def wide(number):
    """A number in 64 bits, be it a plain one (the interpreter's loops count with those) or a tensor."""
    return tl.full([], 0, tl.int64) + number


@triton.jit
def _rows(at, row, live, stride: tl.constexpr, width: tl.constexpr, padded: tl.constexpr, MASKED: tl.constexpr):
    """Rows of a block; zeros outside it and beyond the true width, where either can be."""
    channel = tl.arange(0, padded)
    at += row[:, None] * stride + channel[None, :]
    if MASKED:
        block = tl.load(at, mask=live[:, None] & (channel < width)[None, :], other=0.0)
    elif width != padded:
        block = tl.load(at, mask=(channel < width)[None, :], other=0.0)
    else:
        block = tl.load(at)
    return block


@triton.jit
def _scores(
    q_a, q_b, k_pointers, first, last, strides: tl.constexpr, WIDTHS: tl.constexpr, BLOCK: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """q k^T of the block of keys from `first` on."""
    column = tl.arange(0, BLOCK)
    live = first + column < last
    at = wide(first)
    k_a = _rows(k_pointers[0] + at * strides[0], column, live, strides[0], WIDTHS[0], WIDTHS[3], MASKED)
    scores = tl.dot(q_a, tl.trans(k_a), input_precision=PRECISION)
    if WIDTHS[4] > 0:
        k_b = _rows(k_pointers[1] + at * strides[1], column, live, strides[1], WIDTHS[1], WIDTHS[4], MASKED)
        scores = tl.dot(q_b, tl.trans(k_b), scores, input_precision=PRECISION)
    return scores


@triton.jit
def _weigh(scores, peak, total, scale):
    """Probabilities relative to the new maximum, the new maximum and sum, and by how much what was summed shrinks."""
    new = tl.maximum(peak, tl.max(scores, 1))
    probs = tl.exp2(scores * scale - (new * scale)[:, None])
    shrink = tl.exp2((peak - new) * scale)
    return probs, new, total * shrink + tl.sum(probs, 1), shrink


@triton.jit
def _attend(
    state, q_a, q_b, k_pointers, v_pointer, first, last, end, past, scale,
    strides: tl.constexpr, WIDTHS: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Blocks of keys first .. last; state: maximum, sum and output of each row, probabilities of the block before."""
    peak, total, out, probs = state
    column = tl.arange(0, BLOCK)
    row = tl.arange(0, q_a.shape[0])
    for j in tl.range(first, last, BLOCK):
        scores = _scores(q_a, q_b, k_pointers, j, end, strides, WIDTHS, BLOCK, MASKED, PRECISION)
        v_at = v_pointer + wide(j - BLOCK) * strides[2]
        v = _rows(v_at, column, j - BLOCK + column < end, strides[2], WIDTHS[2], WIDTHS[5], MASKED)
        out = tl.dot(probs, v, out, input_precision=PRECISION)
        if MASKED:
            scores = tl.where((j + column)[None, :] <= (past + row)[:, None], scores, float("-inf"))
        exact, peak, total, shrink = _weigh(scores, peak, total, scale)
        out = out * shrink[:, None]
        probs = exact.to(q_a.dtype)
    return peak, total, out, probs


@triton.jit(do_not_specialize=["T", "tiles"], do_not_specialize_on_alignment=["tile_ptr"])
def attention_kernel(
    q_ptr, k_a_ptr, k_b_ptr, v_ptr, o_ptr, log_ptr, peak_ptr, tile_ptr, scale, T, tiles,
    STRIDES: tl.constexpr, A: tl.constexpr, B: tl.constexpr, V: tl.constexpr,
    PA: tl.constexpr, PB: tl.constexpr, PV: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of one head: o [., H, V], log2 of the sum of 2^scores [H, T], and the tile's largest q k [H, tiles].

    `scale` is that of the scores times log2 e, and positive. Rows of sums are T apart. Tiles: first query, queries,
    first key, keys before the first query's own, place in rows of sums. STRIDES: from token to token and from head to
    head of q, both key parts and v.
    """
    WIDTHS: tl.constexpr = (A, B, V, PA, PB, PV)
    strides: tl.constexpr = (STRIDES[2], STRIDES[4], STRIDES[6])
    tile, head = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    heads = tl.num_programs(0) // tiles
    tile_at = tile_ptr + tile * 5
    start, rows, key = tl.load(tile_at), tl.load(tile_at + 1), tl.load(tile_at + 2).to(tl.int64)
    past, line = tl.load(tile_at + 3), tl.load(tile_at + 4)
    row, column, channel = tl.arange(0, ROWS), tl.arange(0, BLOCK), tl.arange(0, PV)
    live = row < rows
    q_at = q_ptr + start.to(tl.int64) * STRIDES[0] + head * STRIDES[1]
    q_a = _rows(q_at, row, live, STRIDES[0], A, PA, True)
    q_b = q_a
    if PB > 0:
        q_b = _rows(q_at + A, row, live, STRIDES[0], B, PB, True)
    k_pointers = (k_a_ptr + key * STRIDES[2] + head * STRIDES[3], k_b_ptr + key * STRIDES[4] + head * STRIDES[5])
    v_at = v_ptr + key * STRIDES[6] + head * STRIDES[7]
    end = past + rows
    scores = _scores(q_a, q_b, k_pointers, past * 0, end, strides, WIDTHS, BLOCK, True, PRECISION)
    scores = tl.where(column[None, :] <= (past + row)[:, None], scores, float("-inf"))
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    probs, peak, total, _ = _weigh(scores, peak, tl.zeros([ROWS], tl.float32), scale)
    state = (peak, total, tl.zeros([ROWS, PV], tl.float32), probs.to(q_a.dtype))
    whole = tl.maximum((past + 1) // BLOCK * BLOCK, BLOCK)  # from here on not every row sees every key
    state = _attend(
        state, q_a, q_b, k_pointers, v_at, past * 0 + BLOCK, whole, end, past, scale,
        strides, WIDTHS, BLOCK, False, PRECISION,
    )  # fmt: skip
    peak, total, out, narrow = _attend(
        state, q_a, q_b, k_pointers, v_at, whole, end, end, past, scale, strides, WIDTHS, BLOCK, True, PRECISION
    )  # fmt: skip
    j = tl.maximum(whole, tl.cdiv(end, BLOCK) * BLOCK) - BLOCK
    v = _rows(v_at + j.to(tl.int64) * STRIDES[6], column, j + column < end, STRIDES[6], V, PV, True)
    out = tl.dot(narrow, v, out, input_precision=PRECISION)
    o_at = o_ptr + (start.to(tl.int64) * heads + head) * V + row[:, None] * (heads * V) + channel[None, :]
    tl.store(o_at, out * (1.0 / total)[:, None], mask=live[:, None] & (channel < V)[None, :])
    tl.store(log_ptr + head * T + line + row, peak * scale + tl.log2(total), mask=live)
    if peak_ptr is not None:
        tl.store(peak_ptr + head * tiles + tile, tl.max(tl.where(live, peak, float("-inf")), 0))


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """What the launcher compiles for 96 heads of 128 + 64 and 128 channels in bfloat16, with and without maxima."""
    found = settings(2, arch)
    strides = (96 * 192, 192, 96 * 256, 256, 576, 0, 96 * 256, 256)
    given: dict[str, Any] = {f"{name}_ptr": "*bf16" for name in ("q", "k_a", "k_b", "v")}
    given |= {"o_ptr": "*fp32", "log_ptr": "*fp32", "tile_ptr": "*i32:1", "scale": "fp32", "T": "i32", "tiles": "i32"}
    given |= {"STRIDES": strides, "ROWS": found.rows, "BLOCK": found.keys, "PRECISION": "tf32x3"}
    given |= Widths(128, 64, 128).constants()
    return [(attention_kernel, given | {"peak_ptr": peak}, found.options()) for peak in ("*fp32", None)]
