"""Triton kernels of LatentMoE for few tokens: four launches from a layer's input to its output, without a sort.

The first multiplies the input by the router, the map to latents and the shared experts' first matrices. Each program of
the second chooses its token's experts anew, which takes less time than a launch, and computes some of one expert's
activations. The third multiplies them by w2 and sums up a token's experts; the fourth norms the sums, maps them up and
adds the shared experts.
"""

from typing import Any

import triton
import triton.language as tl

from openk3.ops.few.product_kernel import (
    CHUNK,
    dots,
    load_rows,
    shape_for,
    store_rows,
    tokens_for,
    wait_for_inputs,
)
from openk3.ops.latent_moe.route_kernel import LOWEST, _ordered, _sigmoid
from openk3.ops.situ_kernel import situ_value

TAKEN = tl.constexpr(-(2**63))  # below every key with its index


@triton.jit(do_not_specialize=["tokens"])
def project_kernel(
    x, router, down, gate, up, logits, latents, act, tokens,
    E: tl.constexpr, C: tl.constexpr, S: tl.constexpr, BETA: tl.constexpr, LINEAR: tl.constexpr,
    K: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, R: tl.constexpr,
    TOKENS: tl.constexpr, PASSES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Router logits in float32, latents, and SiTU-GLU of the shared experts, by different programs."""
    FIRST: tl.constexpr = (E + R - 1) // R
    SECOND: tl.constexpr = FIRST + (C + R - 1) // R
    program = tl.program_id(0)
    if program < SECOND:
        if program < FIRST:
            row = program * R + tl.arange(0, R)
            pieces = load_rows(router, row, E, K, CHUNKS, CHUNK)
        else:
            row = (program - FIRST) * R + tl.arange(0, R)
            pieces = load_rows(down, row, C, K, CHUNKS, CHUNK)
        wait_for_inputs(EARLY)
        for n in range(PASSES):
            token = n * TOKENS + tl.arange(0, TOKENS)
            value = dots(pieces, x, K, token, tokens, None, 0.0, K, CHUNKS, CHUNK, R)
            if program < FIRST:
                store_rows(logits, value, token, tokens, row, E)
            else:
                store_rows(latents, value, token, tokens, row, C)
    elif act is not None:
        row = (program - SECOND) * R + tl.arange(0, R)
        opened = load_rows(gate, row, S, K, CHUNKS, CHUNK)
        carried = load_rows(up, row, S, K, CHUNKS, CHUNK)
        wait_for_inputs(EARLY)
        KIND: tl.constexpr = act.dtype.element_ty
        for n in range(PASSES):
            token = n * TOKENS + tl.arange(0, TOKENS)
            g = dots(opened, x, K, token, tokens, None, 0.0, K, CHUNKS, CHUNK, R).to(KIND).to(tl.float32)
            u = dots(carried, x, K, token, tokens, None, 0.0, K, CHUNKS, CHUNK, R).to(KIND).to(tl.float32)
            store_rows(act, situ_value(g, u, BETA, LINEAR, tl.bfloat16 == KIND), token, tokens, row, S)


@triton.jit
def _choose(
    logits, bias, choice, E: tl.constexpr, CHOICES: tl.constexpr, EXPERTS: tl.constexpr, WARPS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """(expert of that choice, its score, the sum of all chosen scores) of a token, as `route_kernel` chooses.

    Every warp does all of it: nothing goes through shared memory until the end.
    """
    lane = tl.arange(0, EXPERTS)[None, :] + tl.zeros([WARPS, 1], tl.int32)
    there = lane < E
    shift = tl.load(bias + lane, mask=there, other=0.0)
    wait_for_inputs(EARLY)
    score = _sigmoid(tl.load(logits + lane, mask=there, other=0.0))
    key = tl.maximum(_ordered(score + shift), LOWEST + 1).to(tl.int64)
    # Of equal keys the lower index wins.
    both = tl.where(there, (key << 32) | (EXPERTS - 1 - lane).to(tl.int64), TAKEN)
    mine = tl.full([WARPS, 1], TAKEN, tl.int64)
    for i in range(CHOICES):
        top = tl.max(both, 1)[:, None]
        mine = tl.where(i == choice, top, mine)
        both = tl.where(both == top, TAKEN, both)
    expert = EXPERTS - 1 - (mine & 0xFFFFFFFF).to(tl.int32)
    own = tl.sum(tl.where(lane == expert, score, 0.0), 1)
    total = tl.sum(tl.where((both == TAKEN) & there, score, 0.0), 1)
    return tl.max(tl.max(expert, 1), 0), tl.max(own, 0), tl.max(total, 0)


@triton.jit(do_not_specialize=["scale"])
def choose_kernel(
    latents, logits, bias, w1, w3, ids, weights, act, scale,
    E: tl.constexpr, CHOICES: tl.constexpr, EXPERTS: tl.constexpr, RENORMALIZE: tl.constexpr,
    I: tl.constexpr, BETA: tl.constexpr, LINEAR: tl.constexpr,
    K: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, R: tl.constexpr, WARPS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """act [tokens * choices, I] = SiTU-GLU(w1 z, w3 z) of each token's experts; ids and weights of the choice."""
    BLOCKS: tl.constexpr = (I + R - 1) // R
    pair, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    token, choice = pair // CHOICES, pair % CHOICES
    expert, own, total = _choose(logits + token.to(tl.int64) * E, bias, choice, E, CHOICES, EXPERTS, WARPS, EARLY)
    if block == 0:
        weight = own
        if RENORMALIZE and CHOICES > 1:
            weight = own / (total + 1e-20)
        tl.store(weights + pair, weight * scale)
        tl.store(ids + pair, expert)
    row = block * R + tl.arange(0, R)
    begin = expert.to(tl.int64) * (I * K)
    opened = load_rows(w1 + begin, row, I, K, CHUNKS, CHUNK)
    carried = load_rows(w3 + begin, row, I, K, CHUNKS, CHUNK)
    one = tl.arange(0, 1)
    z = latents + token.to(tl.int64) * K
    SHORT: tl.constexpr = act.dtype.element_ty == tl.bfloat16
    g = dots(opened, z, K, one, 1, None, 0.0, K, CHUNKS, CHUNK, R)
    u = dots(carried, z, K, one, 1, None, 0.0, K, CHUNKS, CHUNK, R)
    store_rows(act + pair.to(tl.int64) * I, situ_value(g, u, BETA, LINEAR, SHORT), one, 1, row, I)


@triton.jit
def gather_kernel(
    act, w2, ids, weights, sums,
    C: tl.constexpr, CHOICES: tl.constexpr, MANY: tl.constexpr,
    K: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, R: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """sums [tokens, C]: each token's experts' outputs, rounded, times weights. MANY: choices, to a power of two."""
    BLOCKS: tl.constexpr = (C + R - 1) // R
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    row = tl.program_id(0) % BLOCKS * R + tl.arange(0, R)
    wait_for_inputs(EARLY)
    choice = tl.arange(0, MANY)
    pair = token * CHOICES + choice
    expert = tl.load(ids + pair, mask=choice < CHOICES, other=0).to(tl.int64)
    total = tl.zeros([R, MANY, CHUNK], tl.float32)
    for c in tl.static_range(CHUNKS):
        column = c * CHUNK + tl.arange(0, CHUNK)[None, None, :] + tl.zeros([R, 1, 1], tl.int32)
        live = (choice < CHOICES)[None, :, None] & (column < K)
        at = (expert[None, :, None] * C + row[:, None, None]) * K + column
        matrix = tl.load(w2 + at, mask=live & (row < C)[:, None, None], other=0.0)
        values = tl.load(act + pair[None, :, None] * K + column, mask=live, other=0.0)
        total += matrix.to(tl.float32) * values.to(tl.float32)
    y = tl.sum(total, 2).to(sums.dtype.element_ty).to(tl.float32)
    y *= tl.load(weights + pair, mask=choice < CHOICES, other=0.0)[None, :]
    tl.store(sums + token * C + row, tl.sum(y, 1).to(sums.dtype.element_ty), mask=row < C)


@triton.jit(do_not_specialize=["tokens", "eps"])
def finish_kernel(
    sums, norm, up, act, down, out, tokens, eps,
    ROWS: tl.constexpr, C: tl.constexpr, C_CHUNKS: tl.constexpr, S: tl.constexpr, S_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr, R: tl.constexpr, TOKENS: tl.constexpr, PASSES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out = RMSNorm(sums) up^T + what the shared experts give, act down^T rounded, if there are any."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    routed = load_rows(up, row, ROWS, C, C_CHUNKS, CHUNK)
    if act is not None:
        shared = load_rows(down, row, ROWS, S, S_CHUNKS, CHUNK)
    wait_for_inputs(EARLY)
    for n in range(PASSES):
        token = n * TOKENS + tl.arange(0, TOKENS)
        value = dots(routed, sums, C, token, tokens, norm, eps, C, C_CHUNKS, CHUNK, R)
        if act is not None:
            other = dots(shared, act, S, token, tokens, None, 0.0, S, S_CHUNKS, CHUNK, R)
            value += other.to(out.dtype.element_ty).to(tl.float32)
        store_rows(out, value, token, tokens, row, ROWS)


def project_settings(depth: int, tokens: int) -> tuple[dict[str, int], int]:
    """(constants, warps) of `project_kernel`."""
    how = shape_for(512, depth, 2)
    return {"K": depth} | how.constants | tokens_for(tokens, how), how.warps


def choose_settings(experts: int, depth: int, rows: int) -> tuple[dict[str, int], int]:
    """(constants, warps) of `choose_kernel`."""
    how = shape_for(min(rows, 2048), depth, 2)
    known = {"E": experts, "EXPERTS": max(32, triton.next_power_of_2(experts)), "WARPS": how.warps}
    return known | {"K": depth} | how.constants, how.warps


def gather_settings(choices: int, depth: int, rows: int) -> tuple[dict[str, int], int]:
    """(constants, warps) of `gather_kernel`."""
    how = shape_for(min(rows, 500), depth)
    return {"CHOICES": choices, "MANY": triton.next_power_of_2(choices), "K": depth} | how.constants, how.warps


def finish_settings(rows: int, latent: int, shared: int, tokens: int) -> tuple[dict[str, int], int]:
    """(constants, warps) of `finish_kernel`."""
    how = shape_for(min(rows, 2048), latent + shared)
    known = {"C_CHUNKS": triton.cdiv(latent, CHUNK), "S_CHUNKS": triton.cdiv(shared, CHUNK), "CHUNK": CHUNK}
    return {"ROWS": rows, "C": latent, "S": shared, "R": how.rows} | known | tokens_for(tokens, how), how.warps


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """What the launchers compile in bfloat16 for `small` and `medium`, and 16 choices of 896 experts."""
    cases = []
    early = {"launch_pdl": True} if arch >= 90 else {}
    for D, C, I, S, E, k, tokens in ((768, 384, 384, 384, 80, 4, 1), (768, 384, 384, 384, 80, 4, 8),
                                     (1536, 768, 768, 1536, 80, 4, 8), (2048, 1024, 512, 0, 896, 16, 2)):  # fmt: skip
        form = {"BETA": 4.0, "LINEAR": 25.0, "EARLY": arch >= 90}
        known: dict[str, Any] = dict.fromkeys(("logits", "bias", "weights"), "*fp32") | {"ids": "*i32"} | form
        known |= {"tokens": "i32", "scale": "fp32", "eps": "fp32"}
        for kernel, (own, warps) in (
            (project_kernel, project_settings(D, tokens)),
            (choose_kernel, choose_settings(E, C, I)),
            (gather_kernel, gather_settings(k, I, C)),
            (finish_kernel, finish_settings(D, C, S, tokens)),
        ):
            here = known | {"E": E, "C": C, "I": I, "S": S, "CHOICES": k, "RENORMALIZE": True} | own
            if kernel is project_kernel and not S:
                here |= {"gate": None, "up": None, "act": None}
            if kernel is finish_kernel and not S:
                here |= {"act": None, "down": None}
            arguments = {name: here.get(name, "*bf16") for name in kernel.arg_names}
            cases.append((kernel, arguments, {"num_warps": warps, "num_stages": 1} | early))
    return cases
