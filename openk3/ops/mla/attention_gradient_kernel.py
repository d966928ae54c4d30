"""Triton kernels of the gradients of causal attention, without atomics: gradients of scores are formed once and kept.

A first kernel computes probabilities again, a strip of score tiles for each tile of keys: it sums the gradient of the
values and writes the gradients of the scores, in the inputs' format, to a workspace. Two more read them as plain matrix
products: along a strip for the gradient of the keys, across strips for that of the queries. Computing scores and
probabilities a second time instead would cost more products than reading them costs bytes.
"""

from typing import Any

import triton
import triton.language as tl

from openk3.ops.mla.attention_kernel import Settings, wide
from openk3.ops.mla.attention_views import Widths


def settings(element_bytes: int, arch: int) -> dict[str, Settings]:
    """Queries and keys of a tile for each kernel, and launch options; scores are kept in square tiles of so many keys.

    For keys of up to 192 channels and values of 128. On Hopper the kernel of the scores fetches nothing ahead: the sums
    of the forward pass are read into registers beside what the products read. Neither does it on sm_89, where the
    compiler would give it too few registers.
    """
    if element_bytes == 4:
        return {name: Settings(32, 32, 4, 1) for name in ("scores", "keys", "queries")}
    size, ahead = (128, 1) if arch == 90 else (64, 1 if arch == 89 else 2)
    products = Settings(size, size, 8, 2)
    return {"scores": Settings(32, size, 8, ahead), "keys": products, "queries": products}


@triton.jit
def _rows(pointer, row, live, stride: tl.constexpr, first: tl.constexpr, width: tl.constexpr, padded: tl.constexpr):
    """Rows of a tile from channel `first` on; zeros where there is nothing."""
    channel = tl.arange(0, padded)
    at = pointer + row.to(tl.int64)[:, None] * stride + (first + channel)[None, :]
    return tl.load(at, mask=live[:, None] & (channel < width)[None, :], other=0.0)


@triton.jit
def _write_rows(pointer, row, live, values, stride, width: tl.constexpr, padded: tl.constexpr):
    channel = tl.arange(0, padded)
    at = pointer + row.to(tl.int64)[:, None] * stride + channel[None, :]
    tl.store(at, values.to(pointer.dtype.element_ty), mask=live[:, None] & (channel < width)[None, :])


@triton.jit(do_not_specialize=["T", "H"], do_not_specialize_on_alignment=["tile_ptr"])
def delta_kernel(
    o_ptr, d_o_ptr, narrow_ptr, delta_ptr, tile_ptr, T, H,
    STRIDES: tl.constexpr, V: tl.constexpr, PV: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A tile of queries of a head: d_o in the products' format, and its product with o, summed over channels [H, T]."""
    head, tile = tl.program_id(0) % H, tile_ptr + tl.program_id(0) // H * 5
    side = tl.arange(0, ROWS)
    live = side < tl.load(tile + 1)
    token = tl.load(tile) + side
    d_o = _rows(d_o_ptr + head.to(tl.int64) * STRIDES[1], token, live, STRIDES[0], 0, V, PV)
    narrow = d_o.to(narrow_ptr.dtype.element_ty)
    at = (token.to(tl.int64) * H + head)[:, None] * V + tl.arange(0, PV)[None, :]
    mask = live[:, None] & (tl.arange(0, PV) < V)[None, :]
    o = tl.load(o_ptr + at, mask=mask, other=0.0)
    tl.store(narrow_ptr + at, narrow, mask=mask)
    tl.store(
        delta_ptr + head.to(tl.int64) * T + tl.load(tile + 4) + side, tl.sum(o * narrow.to(tl.float32), 1), mask=live
    )


@triton.jit
def _score_tiles(
    d_v, key_rows, q_ptr, d_o_ptr, log_ptr, delta_ptr, tile_ptr, start, line, queries, sees, first, last, scale, H,
    q_stride: tl.constexpr, WIDTHS: tl.constexpr, SIZE: tl.constexpr, STEP: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Go over queries first .. last, some columns of a score tile at a time; tile_ptr: where tile 0 would lie."""
    k_a, k_b, v = key_rows
    side = tl.arange(0, SIZE)
    column = tl.arange(0, STEP)
    inner = side[:, None] * SIZE + column[None, :]
    for i in tl.range(first, last, STEP):
        query = i + column
        live = query < queries
        row = start + query
        q_a = _rows(q_ptr, row, live, q_stride, 0, WIDTHS[0], WIDTHS[3])
        scores = tl.dot(k_a, tl.trans(q_a), input_precision=PRECISION)
        if WIDTHS[4] > 0:
            q_b = _rows(q_ptr, row, live, q_stride, WIDTHS[0], WIDTHS[1], WIDTHS[4])
            scores = tl.dot(k_b, tl.trans(q_b), scores, input_precision=PRECISION)
        log = tl.load(log_ptr + line + query, mask=live, other=float("inf"))
        delta = tl.load(delta_ptr + line + query, mask=live, other=0.0)
        probs = tl.exp2(scores * scale - log[None, :])
        if MASKED:
            probs = tl.where(query[None, :] >= sees + side[:, None], probs, 0.0)
        d_o = _rows(d_o_ptr, row, live, H * WIDTHS[2], 0, WIDTHS[2], WIDTHS[5])
        d_probs = tl.dot(v, tl.trans(d_o), input_precision=PRECISION)
        d_v = tl.dot(probs.to(d_o.dtype), d_o, d_v, input_precision=PRECISION)
        d_scores = probs * (d_probs - delta[None, :])
        tile_at = tile_ptr + wide(i // SIZE) * (SIZE * SIZE) + i % SIZE
        tl.store(tile_at + inner, d_scores.to(tile_ptr.dtype.element_ty))
    return d_v


@triton.jit(
    do_not_specialize=["T", "H", "count", "each", "strip_low", "head_low"],
    do_not_specialize_on_alignment=["key_ptr", "order_ptr"],
)
def score_gradient_kernel(
    q_ptr, k_a_ptr, k_b_ptr, v_ptr, d_o_ptr, log_ptr, delta_ptr, d_v_ptr, d_scores_ptr, key_ptr, order_ptr,
    scale, T, H, count, each, strip_low, head_low,
    STRIDES: tl.constexpr, D_STRIDES: tl.constexpr, A: tl.constexpr, B: tl.constexpr, V: tl.constexpr,
    PA: tl.constexpr, PB: tl.constexpr, PV: tl.constexpr, SIZE: tl.constexpr, STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of keys of one head: d_v, and the gradients of the scores of its strip, [keys, queries] each.

    `scale` is that of the scores times log2 e. A slab has `count` key tiles, and `each` score tiles for each head. Rows
    of sums are T apart.
    """
    WIDTHS: tl.constexpr = (A, B, V, PA, PB, PV)
    part = tl.program_id(0) // count
    head = (head_low + part).to(tl.int64)
    entry = key_ptr + tl.load(order_ptr + tl.program_id(0) % count) * 8
    key, keys, start, queries = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    sees, first, place, line = tl.load(entry + 4), tl.load(entry + 5), tl.load(entry + 6), tl.load(entry + 7)
    side = tl.arange(0, SIZE)
    row, live = key + side, side < keys
    k_a = _rows(k_a_ptr + head * STRIDES[3], row, live, STRIDES[2], 0, A, PA)
    k_b = k_a
    if PB > 0:
        k_b = _rows(k_b_ptr + head * STRIDES[5], row, live, STRIDES[4], 0, B, PB)
    v = _rows(v_ptr + head * STRIDES[7], row, live, STRIDES[6], 0, V, PV)
    # Query tile m of the strip is score tile `place - first + m` of the head.
    tile_ptr = d_scores_ptr + (part.to(tl.int64) * each + place - strip_low - first) * (SIZE * SIZE)
    heads = (q_ptr + head * STRIDES[1], d_o_ptr + head * V, log_ptr + head * T, delta_ptr + head * T)
    begin, end = first * SIZE, tl.cdiv(queries, SIZE) * SIZE
    # From query sees + SIZE - 1 on, all keys of the tile are seen.
    whole = tl.minimum(tl.maximum(begin, tl.cdiv(tl.maximum(sees, 0) + SIZE - 1, STEP) * STEP), end)
    d_v = tl.zeros([SIZE, PV], tl.float32)
    d_v = _score_tiles(
        d_v, (k_a, k_b, v), heads[0], heads[1], heads[2], heads[3], tile_ptr, start, line, queries, sees, begin, whole,
        scale, H, STRIDES[0], WIDTHS, SIZE, STEP, True, PRECISION,
    )  # fmt: skip
    d_v = _score_tiles(
        d_v, (k_a, k_b, v), heads[0], heads[1], heads[2], heads[3], tile_ptr, start, line, queries, sees, whole, end,
        scale, H, STRIDES[0], WIDTHS, SIZE, STEP, False, PRECISION,
    )  # fmt: skip
    _write_rows(d_v_ptr + head * D_STRIDES[5], row, live, d_v, D_STRIDES[4], V, PV)


@triton.jit(
    do_not_specialize=["count", "each", "strip_low", "head_low"],
    do_not_specialize_on_alignment=["key_ptr", "order_ptr"],
)
def key_gradient_kernel(
    q_ptr, d_scores_ptr, d_k_a_ptr, d_k_b_ptr, key_ptr, order_ptr, scale, count, each, strip_low, head_low,
    STRIDES: tl.constexpr, D_STRIDES: tl.constexpr, A: tl.constexpr, B: tl.constexpr,
    PA: tl.constexpr, PB: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of keys of one head: both parts of the gradient, from the strip of its score gradients."""
    part = tl.program_id(0) // count
    head = (head_low + part).to(tl.int64)
    entry = key_ptr + tl.load(order_ptr + tl.program_id(0) % count) * 8
    key, keys, start, queries = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    first, place = tl.load(entry + 5), tl.load(entry + 6)
    side = tl.arange(0, SIZE)
    inner = side[:, None] * SIZE + side[None, :]
    tile_ptr = d_scores_ptr + (part.to(tl.int64) * each + place - strip_low - first) * (SIZE * SIZE)
    q_ptr += head * STRIDES[1]
    d_a = tl.zeros([SIZE, PA], tl.float32)
    d_b = tl.zeros([SIZE, PB if PB > 0 else PA], tl.float32)
    for m in tl.range(first, tl.cdiv(queries, SIZE)):
        d_scores = tl.load(tile_ptr + wide(m) * (SIZE * SIZE) + inner)
        query = m * SIZE + side
        q_a = _rows(q_ptr, start + query, query < queries, STRIDES[0], 0, A, PA)
        d_a = tl.dot(d_scores, q_a, d_a, input_precision=PRECISION)
        if PB > 0:
            q_b = _rows(q_ptr, start + query, query < queries, STRIDES[0], A, B, PB)
            d_b = tl.dot(d_scores, q_b, d_b, input_precision=PRECISION)
    _write_rows(d_k_a_ptr + head * D_STRIDES[1], key + side, side < keys, d_a * scale, D_STRIDES[0], A, PA)
    if PB > 0:
        _write_rows(d_k_b_ptr + head * D_STRIDES[3], key + side, side < keys, d_b * scale, D_STRIDES[2], B, PB)


@triton.jit(
    do_not_specialize=["H", "count", "each", "strip_low", "tile_low", "tile_high", "head_low"],
    do_not_specialize_on_alignment=["query_ptr"],
)
def query_gradient_kernel(
    k_a_ptr, k_b_ptr, d_scores_ptr, d_q_ptr, sum_ptr, query_ptr,
    scale, H, count, each, strip_low, tile_low, tile_high, head_low,
    STRIDES: tl.constexpr, A: tl.constexpr, B: tl.constexpr, PA: tl.constexpr, PB: tl.constexpr,
    SIZE: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head: d_q, from the score gradients of the key tiles tile_low .. tile_high.

    Where a head is cut into slabs, sums [tokens, A + B] go from one slab to the next; FIRST and LAST are the ends.
    """
    part = tl.program_id(0) // count
    head = (head_low + part).to(tl.int64)
    entry = query_ptr + tl.program_id(0) % count * 10
    query, queries, m = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    key, keys, first, seen = tl.load(entry + 3), tl.load(entry + 4), tl.load(entry + 5), tl.load(entry + 6)
    before, rounds, place = tl.load(entry + 7), tl.load(entry + 8), tl.load(entry + 9)
    side = tl.arange(0, SIZE)
    inner = side[:, None] * SIZE + side[None, :]
    row, live = query + side, side < queries
    if FIRST:
        d_a = tl.zeros([SIZE, PA], tl.float32)
        d_b = tl.zeros([SIZE, PB if PB > 0 else PA], tl.float32)
    else:
        d_a = _rows(sum_ptr, row, live, A + B, 0, A, PA)
        d_b = _rows(sum_ptr, row, live, A + B, A if PB > 0 else 0, B if PB > 0 else A, PB if PB > 0 else PA)
    tile_ptr = d_scores_ptr + (part.to(tl.int64) * each + place + m - strip_low) * (SIZE * SIZE)
    for j in tl.range(tl.maximum(0, tile_low - first), tl.minimum(seen, tile_high - first)):
        late = tl.maximum(j - before, 0)
        d_scores = tl.load(tile_ptr + wide(j * rounds - late * (late + 1) // 2) * (SIZE * SIZE) + inner)
        at, there = key + j * SIZE + side, j * SIZE + side < keys
        k_a = _rows(k_a_ptr + head * STRIDES[3], at, there, STRIDES[2], 0, A, PA)
        d_a = tl.dot(tl.trans(d_scores), k_a, d_a, input_precision=PRECISION)
        if PB > 0:
            k_b = _rows(k_b_ptr + head * STRIDES[5], at, there, STRIDES[4], 0, B, PB)
            d_b = tl.dot(tl.trans(d_scores), k_b, d_b, input_precision=PRECISION)
    if LAST:
        d_q_at = d_q_ptr + head * (A + B)
        _write_rows(d_q_at, row, live, d_a * scale, H * (A + B), A, PA)
        if PB > 0:
            _write_rows(d_q_at + A, row, live, d_b * scale, H * (A + B), B, PB)
    else:
        _write_rows(sum_ptr, row, live, d_a, A + B, A, PA)
        if PB > 0:
            _write_rows(sum_ptr + A, row, live, d_b, A + B, B, PB)


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """What the launchers compile for 96 heads of 128 + 64 and 128 channels in bfloat16; long heads in several slabs."""
    widths = Widths(128, 64, 128)
    found = settings(2, arch)
    names = ("q", "k_a", "k_b", "v", "d_o", "d_v", "d_scores", "d_k_a", "d_k_b", "d_q", "narrow")
    given: dict[str, Any] = {f"{name}_ptr": "*bf16" for name in names}
    given |= {f"{name}_ptr": "*fp32" for name in ("o", "log", "delta", "sum")}
    given |= {f"{name}_ptr": "*i32:1" for name in ("key", "query", "order", "tile")} | {"scale": "fp32"}
    given |= dict.fromkeys(("T", "H", "count", "each", "strip_low", "tile_low", "tile_high", "head_low"), "i32")
    given |= {"STRIDES": (96 * 192, 192, 96 * 256, 256, 576, 0, 96 * 256, 256), "PRECISION": "tf32x3"}
    given |= {"D_STRIDES": (96 * 256, 256, 96 * 64, 64, 96 * 256, 256)} | widths.constants()
    ends = [(True, True), (True, False), (False, False), (False, True)]
    delta = {"d_o_ptr": "*fp32", "STRIDES": (96 * 128, 128), "ROWS": 32}
    cases = [_case(delta_kernel, given | delta, {"num_warps": 4})]
    for name, kernel in (("scores", score_gradient_kernel), ("keys", key_gradient_kernel)):
        cases.append(_case(kernel, given | {"SIZE": found[name].keys, "STEP": found[name].rows}, found[name].options()))
    size, options = found["queries"].keys, found["queries"].options()
    for first, last in ends:
        sums = None if first and last else "*fp32"
        values = given | {"SIZE": size, "FIRST": first, "LAST": last, "sum_ptr": sums}
        cases.append(_case(query_gradient_kernel, values, options))
    return cases


def _case(kernel: Any, given: dict[str, Any], options: dict[str, int]) -> tuple[Any, dict[str, Any], dict[str, int]]:
    return kernel, {name: given[name] for name in kernel.arg_names}, options
