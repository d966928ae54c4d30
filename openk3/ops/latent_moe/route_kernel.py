"""Triton kernels of routing: expert choice from logits, the stable sort of token copies by expert, and the gradient.

Two launches and no atomics. The first chooses experts, a warp for a token, and leaves one word of 32 bits for each
expert and 32 tokens (bit t: token t chose it) and each program's counts. The second adds up all counts, from which
follow each expert's first row and the table of row tiles for the experts' products; a token copy's row is its expert's
first row, plus the copies in earlier words, plus the bits below its own.
"""

from typing import Any

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
LOWEST = tl.constexpr(-(2**31))  # below the key of every score
WORD = tl.constexpr(32)  # tokens of a word
ROUTE_WARPS, SORT_WARPS, BACKWARD_WARPS = 4, 8, 8


@triton.jit
def _sigmoid(x):
    """1 / (1 + exp(-x)) in float32, bit by bit as PyTorch computes it on a GPU: exact exp and division."""
    if INTERPRETED:
        return 1.0 / (1.0 + tl.exp(-x))
    else:
        return tl.div_rn(1.0, 1.0 + tl.extra.libdevice.exp(-x))


@triton.jit
def _ordered(x):
    """Integers in the order of floats; NaN as PyTorch has it, above all."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _num_bits(word):
    """Bits that are set."""
    x = word.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _scores(logits, first, expert, T, E: tl.constexpr, ROWS: tl.constexpr):
    """Scores of ROWS tokens for some experts, their places, and which of them exist."""
    row = tl.arange(0, ROWS)
    live = (first + row < T)[:, None] & (expert < E)[None, :]
    at = first.to(tl.int64) * E + (row[:, None] * E + expert[None, :])
    return _sigmoid(tl.load(logits + at, mask=live, other=0.0)), at, live


@triton.jit
def _keys(logits, bias, first, T, E: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """Biased scores of ROWS tokens as integers, by chunks of experts."""
    keys = ()
    for c in tl.static_range(CHUNKS):
        expert = c * CHUNK + tl.arange(0, CHUNK)
        score, _, _ = _scores(logits, first, expert, T, E, ROWS)
        key = _ordered(score + tl.load(bias + expert, mask=expert < E, other=0.0)[None, :])
        # A key that means "taken" is no score's, whatever its bits are.
        keys = keys + (tl.where((expert < E)[None, :], tl.maximum(key, LOWEST + 1), LOWEST),)
    return keys


@triton.jit
def _top(keys, CHUNKS: tl.constexpr):
    """The largest key of each token."""
    best = keys[0]
    for c in tl.static_range(1, CHUNKS):
        best = tl.maximum(best, keys[c])
    return tl.max(best, 1)


@triton.jit
def _first(keys, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """The first of the experts that have the largest key, for each token."""
    top = _top(keys, CHUNKS)[:, None]
    lane = tl.arange(0, CHUNK)[None, :]
    first = tl.where(keys[0] == top, lane, CHUNK * CHUNKS)
    for c in tl.static_range(1, CHUNKS):
        first = tl.minimum(first, tl.where(keys[c] == top, c * CHUNK + lane, CHUNK * CHUNKS))
    return tl.min(first, 1)


@triton.jit
def _without(keys, expert, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """The keys, one expert of each token being taken."""
    rest = ()
    for c in tl.static_range(CHUNKS):
        taken = (c * CHUNK + tl.arange(0, CHUNK))[None, :] == expert[:, None]
        rest = rest + (tl.where(taken, LOWEST, keys[c]),)
    return rest


@triton.jit
def _put_choice(
    logits, ids, weights, chosen, found, token, T, scale, E: tl.constexpr, K: tl.constexpr, RENORMALIZE: tl.constexpr
):
    """Write the experts of each token, [tokens, lanes] with K lanes in use, their scores and their weights."""
    lane = tl.arange(0, found.shape[1])
    live = (token < T)[:, None] & (lane < K)[None, :]
    row = token.to(tl.int64)[:, None]
    score = _sigmoid(tl.load(logits + row * E + found, mask=live, other=0.0))
    score = tl.where(live, score, 0.0)
    weight = score
    if RENORMALIZE and K > 1:
        weight = score / (tl.sum(score, 1)[:, None] + 1e-20)
    at = row * K + lane[None, :]
    tl.store(ids + at, found.to(tl.int64), mask=live)
    tl.store(chosen + at, score, mask=live)
    tl.store(weights + at, weight * scale, mask=live)


@triton.jit
def _put_masks(keys, masks, counts, token, T, part, E: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """Write, for each expert, which of the tokens took it, as a part of a word; add their number to the counts."""
    ROWS: tl.constexpr = keys[0].shape[0]
    PARTS: tl.constexpr = WORD // ROWS
    tl.debug_barrier()  # what was counted before is in memory
    for c in tl.static_range(CHUNKS):
        expert = c * CHUNK + tl.arange(0, CHUNK)
        taken = (keys[c] == LOWEST) & (expert < E)[None, :] & (token < T)[:, None]
        bit = (tl.full([ROWS], 1, tl.int32) << tl.arange(0, ROWS))[:, None]
        word = tl.sum(tl.where(taken, bit, 0), 0)
        at = masks + (part // PARTS).to(tl.int64) * (E * PARTS) + expert * PARTS + part % PARTS
        tl.store(at, word.to(masks.dtype.element_ty), mask=(expert < E) & (part // PARTS * WORD < T))
        tl.store(counts + expert, tl.load(counts + expert, mask=expert < E) + _num_bits(word), mask=expert < E)


@triton.jit(do_not_specialize=["T", "blocks"])
def route_kernel(
    logits, bias, ids, weights, chosen, threshold, scores, masks, counts, T, blocks, scale,
    E: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):  # fmt: skip
    """Choose experts for `blocks` words of tokens; ROWS tokens at a time, experts in CHUNKS chunks.

    `masks` [words, E] holds 32 bits for each; it is written ROWS bits at a time, as integers of that size.
    """
    program = tl.program_id(0)
    PARTS: tl.constexpr = WORD // ROWS
    lane = tl.arange(0, CHUNK)
    counts += program * E
    for c in tl.static_range(CHUNKS):
        expert = c * CHUNK + lane
        tl.store(counts + expert, tl.zeros([CHUNK], tl.int32), mask=expert < E)
    for step in range(blocks * PARTS):
        part = program * (blocks * PARTS) + step
        token = part * ROWS + tl.arange(0, ROWS)
        keys = _keys(logits, bias, part * ROWS, T, E, ROWS, CHUNK, CHUNKS)
        found = tl.zeros([ROWS, CHUNK], tl.int32)
        for i in range(K):
            first = _first(keys, CHUNK, CHUNKS)
            found = tl.where((lane == i)[None, :], first[:, None], found)
            keys = _without(keys, first, CHUNK, CHUNKS)
        if K < E:
            top = _top(keys, CHUNKS)
            value = (top ^ ((top >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
            tl.store(threshold + token, value, mask=token < T)
        _put_choice(logits, ids, weights, chosen, found, token, T, scale, E, K, RENORMALIZE)
        _put_masks(keys, masks, counts, token, T, part, E, CHUNK, CHUNKS)
        if scores is not None:
            for chunk in range(CHUNKS):
                score, at, live = _scores(logits, part * ROWS, chunk * CHUNK + lane, T, E, ROWS)
                tl.store(scores + at, score, mask=live)


@triton.jit(do_not_specialize=["T", "blocks", "groups", "span"])
def sort_kernel(
    ids, masks, counts, row, slot, start, tile_expert, tile_row, tile_end, T, blocks, groups, span,
    E: tl.constexpr, EXPERTS: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, TILE: tl.constexpr,
    ENTRIES: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Rows of the token copies of `span` groups of words, and ENTRIES entries of the table of row tiles.

    An entry beyond the last tile names expert E. EXPERTS and SLOTS are E and 32 K, rounded up to powers of two.
    """
    program = tl.program_id(0)
    first = program * span
    expert = tl.arange(0, EXPERTS)
    total = tl.zeros([EXPERTS], tl.int32)
    before = tl.zeros([EXPERTS], tl.int32)
    for low in range(0, groups, GROUPS):
        group = low + tl.arange(0, GROUPS)
        live = (group < groups)[:, None] & (expert < E)[None, :]
        part = tl.load(counts + group[:, None] * E + expert[None, :], mask=live, other=0)
        total += tl.sum(part, 0)
        before += tl.sum(tl.where((group < first)[:, None], part, 0), 0)
    begin = tl.cumsum(total, 0) - total
    if program == 0:
        tl.store(start + expert, begin, mask=expert < E)
        tl.store(start + E, T * K)
    tiles = (total + TILE - 1) // TILE
    last = tl.cumsum(tiles, 0)
    entry = program * ENTRIES + tl.arange(0, ENTRIES)
    whose = tl.sum(((last[None, :] <= entry[:, None]) & (expert < E)[None, :]).to(tl.int32), 1)
    its = whose[:, None] == expert[None, :]
    shift = tl.where(its, (begin - (last - tiles) * TILE)[None, :], 0)
    tl.store(tile_expert + entry, whose)
    tl.store(tile_row + entry, tl.sum(shift, 1) + entry * TILE)
    tl.store(tile_end + entry, tl.sum(tl.where(its, (begin + total)[None, :], 0), 1))
    base = begin + before
    bit = tl.arange(0, SLOTS) // K
    stop = tl.minimum(tl.minimum(first + span, groups) * blocks, (T + WORD - 1) // WORD)
    for step in range(stop - first * blocks):
        n = first * blocks + step
        at = n * (WORD * K) + tl.arange(0, SLOTS)
        live = (bit < WORD) & (at < T * K)
        mine = tl.load(ids + at, mask=live, other=0).to(tl.int32)
        word = tl.load(masks + n.to(tl.int64) * E + mine, mask=live, other=0)
        below = word & ((tl.full([SLOTS], 1, tl.int32) << (bit & 31)) - 1)
        place = tl.gather(base, mine, 0) + _num_bits(below)
        tl.store(row + at, place, mask=live)
        tl.store(slot + place, at, mask=live)
        base += _num_bits(tl.load(masks + n.to(tl.int64) * E + expert, mask=expert < E, other=0))


@triton.jit(do_not_specialize=["T"])
def route_backward_kernel(
    d_weights, ids, chosen, d_logits, T, scale,
    E: tl.constexpr, EXPERTS: tl.constexpr, K: tl.constexpr, CHOICES: tl.constexpr, ROWS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):  # fmt: skip
    """d_logits [T, E] of the weights' gradient: zero but for the K experts of each token."""
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = token.to(tl.int64)[:, None]
    expert = tl.arange(0, EXPERTS)[None, :]
    zero = tl.zeros([ROWS, EXPERTS], d_logits.dtype.element_ty)
    tl.store(d_logits + row * E + expert, zero, mask=(token < T)[:, None] & (expert < E))
    choice = tl.arange(0, CHOICES)[None, :]
    live = (token < T)[:, None] & (choice < K)
    score = tl.load(chosen + row * K + choice, mask=live, other=0.0)
    grad = tl.load(d_weights + row * K + choice, mask=live, other=0.0) * scale
    if RENORMALIZE and K > 1:
        total = tl.sum(score, 1)[:, None] + 1e-20
        grad = (grad - tl.sum(grad * score, 1)[:, None] / total) / total
    mine = tl.load(ids + row * K + choice, mask=live, other=0)
    tl.debug_barrier()  # the zeros lie where these go
    tl.store(d_logits + row * E + mine, (grad * score * (1.0 - score)).to(d_logits.dtype.element_ty), mask=live)


def chunks(experts: int) -> tuple[int, int]:
    """(experts of a chunk, chunks): a warp holds four experts of a token in each lane at the most."""
    if experts >= 128:
        return 128, triton.cdiv(experts, 128)
    return max(16, triton.next_power_of_2(experts)), 1


def token_rows(experts: int) -> int:
    """Tokens that a program of `route_kernel` looks at together: at most some 64 values in each thread."""
    return 8 if experts > 256 else 16


def sort_settings(experts: int, k: int, tile: int) -> dict[str, int]:
    """Compile-time arguments of `sort_kernel`; enough experts share a warp to load 16 bytes a lane."""
    rounded = max(16, triton.next_power_of_2(experts))
    return {
        "E": experts,
        "EXPERTS": rounded,
        "K": k,
        "SLOTS": triton.next_power_of_2(32 * k),
        "TILE": tile,
        "ENTRIES": 16,
        "GROUPS": max(16, min(64, 8192 // rounded)),
    }


def backward_settings(experts: int, k: int) -> dict[str, int]:
    """Compile-time arguments of `route_backward_kernel`."""
    rounded = max(16, triton.next_power_of_2(experts))
    return {
        "E": experts,
        "EXPERTS": rounded,
        "K": k,
        "CHOICES": triton.next_power_of_2(k),
        "ROWS": max(1, 4096 // rounded),
    }


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """What the launchers compile for 896 experts, 16 a token, and for 128 experts, 8 a token; on every GPU the same."""
    cases = []
    for experts, k, tiles in ((896, 16, (64,)), (128, 8, (128, 64, 16))):
        chunk, count = chunks(experts)
        rows = token_rows(experts)
        known: dict[str, Any] = {"ids": "*i64", "masks": "*i32", "counts": "*i32", "scale": "fp32", "RENORMALIZE": True}
        known |= dict.fromkeys(("T", "blocks", "groups", "span"), "i32")
        known |= dict.fromkeys(("row", "slot", "start", "tile_expert", "tile_row", "tile_end"), "*i32") | {
            "d_logits": "*bf16"
        }
        choice = {"E": experts, "K": k, "ROWS": rows, "CHUNK": chunk, "CHUNKS": count, "masks": f"*i{rows}"}
        for kernel, own, warps in (
            (route_kernel, choice, ROUTE_WARPS),
            (route_kernel, choice | {"scores": None}, ROUTE_WARPS),
            *((sort_kernel, sort_settings(experts, k, tile), SORT_WARPS) for tile in tiles),
            (route_backward_kernel, backward_settings(experts, k), BACKWARD_WARPS),
        ):
            arguments = {name: (known | own).get(name, "*fp32") for name in kernel.arg_names}
            cases.append((kernel, arguments, {"num_warps": warps, "num_stages": 3}))
    return cases
