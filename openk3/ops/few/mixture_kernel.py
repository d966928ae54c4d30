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
    wait_then_release,
)
from openk3.ops.latent_moe.route_kernel import LOWEST, _ordered, _sigmoid
from openk3.ops.situ_kernel import situ_value

MOST_PROGRAMS = 528  # that make choices at once: four a multiprocessor


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
    WAIT: tl.constexpr,
):  # fmt: skip
    """(experts of some choices of a token, their scores, the sum of all chosen ones), as `route_kernel` chooses.

    WAIT for the logits. Every warp does all of it: nothing goes through shared memory until the end. Integers of 32
    bits have their maximum over a warp by one instruction.
    """
    lane = tl.arange(0, EXPERTS)[None, :] + tl.zeros([WARPS, 1], tl.int32)
    there = lane < E
    shift = tl.load(bias + lane, mask=there, other=0.0)
    wait_then_release(WAIT)
    score = _sigmoid(tl.load(logits + lane, mask=there, other=0.0))
    key = tl.where(there, tl.maximum(_ordered(score + shift), LOWEST + 1), LOWEST)
    choice = choice[None, :] + tl.zeros([WARPS, 1], tl.int32)
    mine = tl.zeros_like(choice)
    own = tl.zeros(choice.shape, tl.float32)
    for i in tl.static_range(CHOICES):
        top = tl.max(key, 1)[:, None]
        # Of equal keys the lower index wins.
        first = tl.min(tl.where(key == top, lane, EXPERTS), 1)[:, None]
        chosen = lane == first
        mine = tl.where(choice == i, first, mine)
        own = tl.where(choice == i, tl.sum(tl.where(chosen, score, 0.0), 1)[:, None], own)
        key = tl.where(chosen, LOWEST, key)
    total = tl.sum(tl.where((key == LOWEST) & there, score, 0.0), 1)
    return tl.max(mine, 0), tl.max(own, 0), tl.max(total, 0)


@triton.jit
def choose_kernel(
    latents, logits, bias, w1, w3, act,
    E: tl.constexpr, CHOICES: tl.constexpr, EXPERTS: tl.constexpr,
    I: tl.constexpr, BETA: tl.constexpr, LINEAR: tl.constexpr,
    K: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, R: tl.constexpr, WARPS: tl.constexpr,
    TIMES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """act [tokens * choices, I] = SiTU-GLU(w1 z, w3 z) of each token's experts; a program makes TIMES R rows of it."""
    BLOCKS: tl.constexpr = (I + R * TIMES - 1) // (R * TIMES)
    pair, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    token = (pair // CHOICES).to(tl.int64)
    one = tl.arange(0, 1)
    experts, _, _ = _choose(logits + token * E, bias, one + pair % CHOICES, E, CHOICES, EXPERTS, WARPS, EARLY)
    expert = tl.max(experts, 0)
    begin = expert.to(tl.int64) * (I * K)
    z = latents + token * K
    SHORT: tl.constexpr = act.dtype.element_ty == tl.bfloat16
    opened, carried = (), ()
    for i in tl.static_range(TIMES):  # all of them before any is used
        row = (block * TIMES + i) * R + tl.arange(0, R)
        opened = opened + (load_rows(w1 + begin, row, I, K, CHUNKS, CHUNK),)
        carried = carried + (load_rows(w3 + begin, row, I, K, CHUNKS, CHUNK),)
    for i in tl.static_range(TIMES):
        row = (block * TIMES + i) * R + tl.arange(0, R)
        g = dots(opened[i], z, K, one, 1, None, 0.0, K, CHUNKS, CHUNK, R)
        u = dots(carried[i], z, K, one, 1, None, 0.0, K, CHUNKS, CHUNK, R)
        store_rows(act + pair.to(tl.int64) * I, situ_value(g, u, BETA, LINEAR, SHORT), one, 1, row, I)


@triton.jit
def _load_chosen(w2, expert, row, C: tl.constexpr, K: tl.constexpr, c, CHUNK: tl.constexpr):
    """Piece c of some rows of some experts' matrices [R, MANY, CHUNK]; experts below 0 are none."""
    column = c * CHUNK + tl.arange(0, CHUNK)[None, None, :]
    live = (row < C)[:, None, None] & (expert >= 0)[None, :, None] & (column < K)
    return tl.load(
        w2 + (expert.to(tl.int64)[None, :, None] * C + row[:, None, None]) * K + column, mask=live, other=0.0
    )


@triton.jit(do_not_specialize=["scale"])
def gather_kernel(
    act, w2, logits, bias, sums, scale,
    E: tl.constexpr, C: tl.constexpr, CHOICES: tl.constexpr, MANY: tl.constexpr, EXPERTS: tl.constexpr,
    WARPS: tl.constexpr, RENORMALIZE: tl.constexpr, AHEAD: tl.constexpr,
    K: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, R: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """sums [tokens, C]: each token's experts' outputs, rounded, times weights.

    The choice is made anew before the wait: its logits were there when the kernel in front began. AHEAD: all rows of
    w2 are read before the wait, too.
    """
    BLOCKS: tl.constexpr = (C + R - 1) // R
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    row = tl.program_id(0) % BLOCKS * R + tl.arange(0, R)
    choice = tl.arange(0, MANY)
    expert, weight, total = _choose(logits + token * E, bias, choice, E, CHOICES, EXPERTS, WARPS, False)
    expert = tl.where(choice < CHOICES, expert, -1)
    if RENORMALIZE and CHOICES > 1:
        weight = weight / (total + 1e-20)
    pieces = ()
    if AHEAD:
        for c in tl.static_range(CHUNKS):
            pieces = pieces + (_load_chosen(w2, expert, row, C, K, c, CHUNK),)
    wait_for_inputs(EARLY)
    found = tl.zeros([R, MANY, CHUNK], tl.float32)
    for c in tl.static_range(CHUNKS):
        column = c * CHUNK + tl.arange(0, CHUNK)[None, None, :] + tl.zeros([R, 1, 1], tl.int32)
        live = (choice < CHOICES)[None, :, None] & (column < K)
        values = tl.load(act + (token * CHOICES + choice)[None, :, None] * K + column, mask=live, other=0.0)
        matrix = pieces[c] if AHEAD else _load_chosen(w2, expert, row, C, K, c, CHUNK)
        found += matrix.to(tl.float32) * values.to(tl.float32)
    y = tl.sum(found, 2).to(sums.dtype.element_ty).to(tl.float32)
    y = tl.sum(tl.where(choice < CHOICES, weight * scale, 0.0)[None, :] * y, 1)
    tl.store(sums + token * C + row, y.to(sums.dtype.element_ty), mask=row < C)


@triton.jit(do_not_specialize=["tokens", "eps"])
def finish_kernel(
    sums, norm, up, act, down, before, out, tokens, eps,
    ROWS: tl.constexpr, C: tl.constexpr, C_CHUNKS: tl.constexpr, S: tl.constexpr, S_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr, R: tl.constexpr, TOKENS: tl.constexpr, PASSES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out = RMSNorm(sums) up^T + what the shared experts give, act down^T rounded, if there are any.

    Added to `before`, if given, which may be `out`.
    """
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
        store_rows(out, value, token, tokens, row, ROWS, before)


def project_settings(depth: int, tokens: int) -> tuple[dict[str, int], int]:
    """(constants, warps) of `project_kernel`."""
    how = shape_for(512, depth, 2)
    return {"K": depth} | how.constants | tokens_for(tokens, how), how.warps


def _choice(experts: int, choices: int, warps: int) -> dict[str, int]:
    """Constants of `_choose`."""
    power = triton.next_power_of_2
    return {
        "E": experts,
        "CHOICES": choices,
        "MANY": power(choices),
        "EXPERTS": max(32, power(experts)),
        "WARPS": warps,
    }


def choose_settings(experts: int, choices: int, depth: int, rows: int, tokens: int) -> tuple[dict[str, int], int]:
    """(constants, warps) of `choose_kernel`: few programs, each of which makes a choice, make many rows."""
    how = shape_for(min(rows, 2048), depth, 2)
    R = how.rows * (2 if tokens * choices > 4 and 4 * depth <= 3072 else 1)
    most = triton.cdiv(tokens * choices * rows, R * MOST_PROGRAMS)
    held = 2 * R // how.warps * how.constants["CHUNKS"] * CHUNK  # values of a warp
    times = min(triton.next_power_of_2(most), max(1, 8192 // held))
    known = {"K": depth} | how.constants | _choice(experts, choices, how.warps)
    return known | {"R": R, "TIMES": times}, how.warps


def gather_settings(experts: int, choices: int, depth: int, rows: int) -> tuple[dict[str, int], int]:
    """(constants, warps) of `gather_kernel`."""
    how = shape_for(min(rows, 500), depth)
    known = {"K": depth} | how.constants | _choice(experts, choices, how.warps)
    return known | {"AHEAD": known["MANY"] * known["CHUNKS"] <= 16}, how.warps


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
        known: dict[str, Any] = dict.fromkeys(("logits", "bias"), "*fp32") | form
        known |= {"tokens": "i32", "scale": "fp32", "eps": "fp32"}
        for kernel, (own, warps) in (
            (project_kernel, project_settings(D, tokens)),
            (choose_kernel, choose_settings(E, k, C, I, tokens)),
            (gather_kernel, gather_settings(E, k, I, C)),
            (finish_kernel, finish_settings(D, C, S, tokens)),
        ):
            here = known | {"E": E, "C": C, "I": I, "S": S, "RENORMALIZE": True} | own
            if kernel is project_kernel and not S:
                here |= {"gate": None, "up": None, "act": None}
            if kernel is finish_kernel and not S:
                here |= {"act": None, "down": None, "before": None}
            arguments = {name: here.get(name, "*bf16") for name in kernel.arg_names}
            cases.append((kernel, arguments, {"num_warps": warps, "num_stages": 1} | early))
    return cases
