"""Triton kernels around attention over latents for few tokens: queries into latent space, values out of it.

The first launch also norms the new latents and enters them in memory.
"""

from typing import Any

import triton
import triton.language as tl

from openk3.ops.few.product_kernel import dots, load_rows, shape_for, tokens_for, wait_for_inputs


@triton.jit(do_not_specialize=["tokens", "eps", "row_stride"])
def absorb_kernel(
    q, weight, latents, norm, memory, rows, positions, q_latent, tokens, eps, row_stride,
    Q_STRIDE: tl.constexpr, J_STRIDE: tl.constexpr, H: tl.constexpr, NOPE: tl.constexpr, VALUE: tl.constexpr,
    SHARED: tl.constexpr, C: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, B: tl.constexpr, PADDED: tl.constexpr,
    PS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """q_latent [tokens, H, C] of some columns of a head; or one token's latent and shared key into memory.

    q [tokens, H, NOPE + SHARED]; weight [H, NOPE + VALUE, C]; latents [tokens, C + SHARED] before their norm.
    """
    BLOCKS: tl.constexpr = (C + B - 1) // B
    program = tl.program_id(0)
    if program < H * BLOCKS:
        head = program // BLOCKS
        column = program % BLOCKS * B + tl.arange(0, B)
        key = tl.arange(0, BN)
        here = (key < NOPE)[:, None] & (column < C)[None, :]
        at = weight + (head.to(tl.int64) * (NOPE + VALUE) + key)[:, None] * C + column[None, :]
        matrix = tl.load(at, mask=here, other=0.0)
        wait_for_inputs(EARLY)
        token = tl.arange(0, PADDED)
        live = (token < tokens)[:, None]
        begin = token.to(tl.int64)[:, None]
        query = tl.load(
            q + begin * Q_STRIDE + head * (NOPE + SHARED) + key[None, :], mask=live & (key < NOPE)[None, :], other=0.0
        )
        value = tl.dot(query, matrix, input_precision="ieee")
        at = q_latent + begin * (H * C) + head * C + column[None, :]
        tl.store(at, value.to(q_latent.dtype.element_ty), mask=live & (column < C)[None, :])
    else:
        one = program - H * BLOCKS
        channel = tl.arange(0, BC)
        part = tl.arange(0, PS)
        weights = tl.load(norm + channel, mask=channel < C, other=0.0).to(tl.float32)
        wait_for_inputs(EARLY)
        latents += one.to(tl.int64) * J_STRIDE
        latent = tl.load(latents + channel, mask=channel < C, other=0.0)
        shared = tl.load(latents + C + part, mask=part < SHARED, other=0.0)
        place = tl.load(rows + one).to(tl.int64) * row_stride
        place += tl.load(positions + one).to(tl.int64) * (C + SHARED)
        wide = latent.to(tl.float32)
        root = tl.rsqrt(tl.sum(wide * wide, 0) * (1.0 / C) + eps)
        unit = (wide * root).to(latent.dtype).to(tl.float32) * weights
        tl.store(memory + place + channel, unit.to(memory.dtype.element_ty), mask=channel < C)
        tl.store(memory + place + C + part, shared.to(memory.dtype.element_ty), mask=part < SHARED)


@triton.jit(do_not_specialize=["tokens"])
def value_kernel(
    context, weight, gate, out, tokens,
    G_STRIDE: tl.constexpr, H: tl.constexpr, NOPE: tl.constexpr, VALUE: tl.constexpr,
    K: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, R: tl.constexpr,
    TOKENS: tl.constexpr, PASSES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out [tokens, H * VALUE] = values of contexts [tokens, H, K] (rounded to the weight's format) times open gates."""
    BLOCKS: tl.constexpr = (VALUE + R - 1) // R
    head = tl.program_id(0) // BLOCKS
    row = tl.program_id(0) % BLOCKS * R + tl.arange(0, R)
    pieces = load_rows(weight + (head.to(tl.int64) * (NOPE + VALUE) + NOPE) * K, row, VALUE, K, CHUNKS, CHUNK)
    wait_for_inputs(EARLY)
    for n in range(PASSES):
        token = n * TOKENS + tl.arange(0, TOKENS)
        value = dots(pieces, context + head * K, H * K, token, tokens, None, 0.0, K, CHUNKS, CHUNK, R)
        at = token.to(tl.int64)[None, :]
        live = (token < tokens)[None, :] & (row < VALUE)[:, None]
        if gate is not None:
            z = tl.load(gate + at * G_STRIDE + (head * VALUE + row)[:, None], mask=live, other=0.0)
            value *= (1.0 / (1.0 + tl.exp(-z.to(tl.float32)))).to(z.dtype).to(tl.float32)
        tl.store(out + at * (H * VALUE) + (head * VALUE + row)[:, None], value.to(out.dtype.element_ty), mask=live)


def absorb_settings(nope: int, shared: int, latent: int) -> tuple[dict[str, int], int]:
    """(constants, warps) of `absorb_kernel`."""
    power = triton.next_power_of_2
    known = {"NOPE": nope, "SHARED": shared, "C": latent, "BN": max(16, power(nope)), "BC": max(16, power(latent))}
    return known | {"B": 32, "PADDED": 16, "PS": max(16, power(shared))}, 4


def value_settings(latent: int, rows: int, tokens: int) -> tuple[dict[str, int], int]:
    """(constants, warps) of `value_kernel`."""
    how = shape_for(min(rows, 2048), latent)
    return {"K": latent} | how.constants | tokens_for(tokens, how), how.warps


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """What the launchers compile in bfloat16 for `small`, `medium` and the released widths."""
    cases = []
    early = {"launch_pdl": True} if arch >= 90 else {}
    for H, C, tokens in ((6, 256, 1), (12, 512, 8), (96, 512, 1)):
        known: dict[str, Any] = dict.fromkeys(("tokens", "row_stride"), "i32") | {"rows": "*i64", "positions": "*i32"}
        known |= {"eps": "fp32", "context": "*fp32", "EARLY": arch >= 90, "H": H, "VALUE": 128}
        known |= {"Q_STRIDE": H * 192, "J_STRIDE": C + 64, "G_STRIDE": H * 128, "NOPE": 128}
        for kernel, (own, warps) in (
            (absorb_kernel, absorb_settings(128, 64, C)),
            (value_kernel, value_settings(C, H * 128, tokens)),
        ):
            arguments = {name: (known | own).get(name, "*bf16") for name in kernel.arg_names}
            cases.append((kernel, arguments, {"num_warps": warps, "num_stages": 1} | early))
    return cases
