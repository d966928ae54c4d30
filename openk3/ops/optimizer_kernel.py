"""Triton kernels of the optimizer's passes over values: sums of gradients, momentum before Newton-Schulz, and AdamW."""

from typing import Any

import triton
import triton.language as tl

VALUES = 4096  # that one program of the momentum pass takes
ADAMW_VALUES = 2048
RANGE = 40  # powers of two around 1 in which the largest value of a matrix may lie


@triton.jit
def pointer_at(table, row, blocks, block, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """The pointer at [row, block] of a table [4, blocks] of addresses; ALIGNED: all are multiples of 16 bytes."""
    address = tl.load(table + row * blocks + block).to(tl.pointer_type(KIND))
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    return address


@triton.jit(do_not_specialize=["blocks", "momentum", "clip"])
def momentum_kernel(
    table, x, peaks, blocks, size, momentum, clip, BLOCK: tl.constexpr, WHOLE: tl.constexpr, ALIGNED: tl.constexpr
):  # fmt: skip
    """m <- mu m + g and x = g + mu m in bfloat16, with g = clip * gradient; a program takes BLOCK values of a block.

    table [4, blocks] int64: addresses of each block's gradient, momentum, weight and narrow weight. peaks [2, blocks]
    int32, zero before: the bits of the largest |x| and of the largest |g|, which order as the values do, NaN last.
    """
    pieces = tl.cdiv(size, BLOCK)
    block = tl.program_id(0) // pieces
    offsets = tl.program_id(0) % pieces * BLOCK + tl.arange(0, BLOCK)
    inside = None if WHOLE else offsets < size
    gradients = pointer_at(table, 0, blocks, block, tl.float32, ALIGNED) + offsets
    momenta = pointer_at(table, 1, blocks, block, tl.float32, ALIGNED) + offsets
    gradient = tl.load(gradients, mask=inside) * clip
    mean = tl.load(momenta, mask=inside) * momentum + gradient
    direction = gradient + mean * momentum
    tl.store(momenta, mean, mask=inside)
    tl.store(x + block.to(tl.int64) * size + offsets, direction.to(tl.bfloat16), mask=inside)
    largest = direction.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    steepest = gradient.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if not WHOLE:
        largest = tl.where(inside, largest, 0)
        steepest = tl.where(inside, steepest, 0)
    # The largest of integers does not depend on their order.
    tl.atomic_max(peaks + block, tl.max(largest, 0))
    tl.atomic_max(peaks + blocks + block, tl.max(steepest, 0))


@triton.jit
def narrow_kernel(x, out, peaks, size, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """x in bfloat16, each matrix of `size` values times the power of two that brings its largest one, peaks, near 1."""
    pieces = tl.cdiv(size, BLOCK)
    block = tl.program_id(0) // pieces
    bits = tl.load(peaks + block).to(tl.int32, bitcast=True)
    exponent = tl.where(bits < 0x7F800000, (bits >> 23) - 127, 0)
    factor = tl.exp2(tl.minimum(tl.maximum(-exponent, -126), 126).to(tl.float32))
    offsets = tl.program_id(0) % pieces * BLOCK + tl.arange(0, BLOCK)
    inside = None if WHOLE else offsets < size
    at = block.to(tl.int64) * size + offsets
    tl.store(out + at, (tl.load(x + at, mask=inside).to(tl.float32) * factor).to(tl.bfloat16), mask=inside)


@triton.jit
def rescale_kernel(x, peaks, size, BLOCK: tl.constexpr, LIMIT: tl.constexpr):
    """Multiply blocks whose largest value lies outside 2^-LIMIT .. 2^LIMIT by a power of two: squares stay in range."""
    pieces = tl.cdiv(size, BLOCK)
    block = tl.program_id(0) // pieces
    bits = tl.load(peaks + block)
    exponent = (bits >> 23) - 127
    if (bits > 0) & (bits < 0x7F800000) & ((exponent > LIMIT) | (exponent < -LIMIT)):
        offsets = tl.program_id(0) % pieces * BLOCK + tl.arange(0, BLOCK)
        inside = offsets < size
        at = x + block.to(tl.int64) * size + offsets
        factor = tl.exp2(tl.minimum(tl.maximum(-exponent, -126), 126).to(tl.float32))
        value = tl.load(at, mask=inside, other=0.0).to(tl.float32) * factor
        tl.store(at, value.to(tl.bfloat16), mask=inside)


@triton.jit
def widen_kernel(gradient, total, size, BLOCK: tl.constexpr, ADD: tl.constexpr):
    """total (float32) <- gradient, or total + gradient if ADD; both [size], a program takes BLOCK values."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < size
    value = tl.load(gradient + offsets, mask=inside).to(tl.float32)
    if ADD:
        value += tl.load(total + offsets, mask=inside)
    tl.store(total + offsets, value, mask=inside)


@triton.jit(do_not_specialize=["tensors", "beta1", "beta2", "eps", "clip"])
def adamw_kernel(
    table, sizes, factors, tensor_of, piece_of, tensors, beta1, beta2, eps, clip, BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """One AdamW step of many tensors; a program takes piece piece_of[program] of tensor tensor_of[program].

    table [5, tensors] int64: addresses of each one's gradient, mean, square, weight and bfloat16 weight (0: none).
    sizes [tensors]; factors [3, tensors] float32: what is left of the weight after decay, the step over the mean's
    correction, and the reciprocal of the square's correction.
    """
    tensor = tl.load(tensor_of + tl.program_id(0))
    offsets = tl.load(piece_of + tl.program_id(0)).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < tl.load(sizes + tensor)
    gradients = pointer_at(table, 0, tensors, tensor, tl.float32, ALIGNED) + offsets
    means = pointer_at(table, 1, tensors, tensor, tl.float32, ALIGNED) + offsets
    squares = pointer_at(table, 2, tensors, tensor, tl.float32, ALIGNED) + offsets
    weights = pointer_at(table, 3, tensors, tensor, tl.float32, ALIGNED) + offsets
    narrow = pointer_at(table, 4, tensors, tensor, tl.bfloat16, ALIGNED)
    gradient = tl.load(gradients, mask=inside, other=0.0) * clip
    mean = tl.load(means, mask=inside, other=0.0)
    square = tl.load(squares, mask=inside, other=0.0)
    weight = tl.load(weights, mask=inside, other=0.0)
    mean += (gradient - mean) * (1 - beta1)
    square = square * beta2 + gradient * gradient * (1 - beta2)
    scale = tl.sqrt_rn(square * tl.load(factors + 2 * tensors + tensor)) + eps
    weight = weight * tl.load(factors + tensor) - tl.load(factors + tensors + tensor) * mean / scale
    tl.store(means, mean, mask=inside)
    tl.store(squares, square, mask=inside)
    tl.store(weights, weight, mask=inside)
    tl.store(narrow + offsets, weight.to(tl.bfloat16), mask=inside & (tl.load(table + 4 * tensors + tensor) != 0))


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """What the launchers compile, for every arch alike."""
    options = {"num_warps": 8, "num_stages": 3}
    values = {"x": "*bf16", "peaks": "*i32", "size": "i32:16", "BLOCK": VALUES}
    momentum = values | {"table": "*i64", "blocks": "i32", "momentum": "fp32", "clip": "fp32"}
    narrow = {"out": "*bf16", "peaks": "*fp32", "BLOCK": VALUES}
    widen = {"gradient": "*bf16", "total": "*fp32", "BLOCK": VALUES}
    odd = {"size": "i32", "WHOLE": False, "ALIGNED": False}
    given: dict[str, Any] = {
        "table": "*i64",
        "sizes": "*i64",
        "factors": "*fp32",
        "tensors": "i32",
        "BLOCK": ADAMW_VALUES,
    }
    given |= dict.fromkeys(("tensor_of", "piece_of"), "*i32") | dict.fromkeys(("beta1", "beta2", "eps", "clip"), "fp32")
    return [
        (momentum_kernel, momentum | {"WHOLE": True, "ALIGNED": True}, options),
        (momentum_kernel, momentum | odd, options),
        (rescale_kernel, values | {"LIMIT": RANGE}, options),
        (narrow_kernel, narrow | {"x": "*bf16", "size": "i32:16", "WHOLE": True}, options),
        (narrow_kernel, narrow | {"x": "*fp32", "size": "i32", "WHOLE": False}, options),
        *(
            (widen_kernel, widen | {"size": size, "ADD": add}, options)
            for size in ("i32:16", "i32")
            for add in (False, True)
        ),
        (adamw_kernel, given | {"ALIGNED": True}, options),
        (adamw_kernel, given | {"ALIGNED": False}, options),
    ]
