"""Gluon kernel of the routed experts' weight gradients for Hopper: sums over an expert's rows, added to float32 sums.

Four warps bring: token rows by copies of 16 bytes, rows of gradients or activations by the copy engine. Two warpgroups
multiply, 64 rows each of two blocks of 128 columns, and leave the sums in bfloat16 in shared memory, where four more
warps write them or add them to the optimizer's sums while the next block is multiplied. Blocks of an expert without
rows are zeros, or what was there.
"""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from openk3.ops.kda.gluon_launch import block_type

DEPTH, SIDE = 64, 128  # rows at a time; of a block


@gluon.jit
def _block(n, start, FORM: gl.constexpr):
    """(expert, its first row, its end, first row and column of the block) of the n-th block."""
    ACROSS: gl.constexpr = FORM[1] // FORM[4]
    PER: gl.constexpr = FORM[0] // 128 * ACROSS
    expert = gl.to_tensor(n // PER)
    inside = n % PER
    return (
        expert,
        gl.load(start + expert),
        gl.load(start + expert + 1),
        inside // ACROSS * 128,
        inside % ACROSS * FORM[4],
    )


@gluon.jit
def _tokens(slot, row, end, K: gl.constexpr):
    """Tokens of rows, 0 beyond the end."""
    return gl.load(slot + row, mask=row < end, other=0) // K


@gluon.jit
def _bring(x, slot, start, descriptors, buffers, bars, programs, FORM: gl.constexpr, COPY: gl.constexpr):
    """The copying warps: rows of tokens, zeros beyond an expert's last one, and of what goes with them."""
    E: gl.constexpr = FORM[2]
    K: gl.constexpr = FORM[3]
    PAIR: gl.constexpr = FORM[4] == 128
    TOTAL: gl.constexpr = E * (FORM[0] // 128) * (FORM[1] // FORM[4])
    WIDTH: gl.constexpr = FORM[1] if PAIR else FORM[0]
    first_d, second_d = descriptors
    x_s, first_s, second_s, staged_s = buffers
    full, empty, staged, free = bars
    STAGES: gl.constexpr = x_s.shape[0]
    DEPTH: gl.constexpr = x_s.shape[1]
    across = gl.arange(0, 128, layout=gl.SliceLayout(0, COPY))[None, :]
    side = gl.arange(0, DEPTH, layout=gl.SliceLayout(1, COPY))
    done = 0
    for n in range(gl.program_id(0), TOTAL, programs):
        expert, low, end, down, right = _block(n, start, FORM)
        column = right if PAIR else down
        token = _tokens(slot, low + side, end, K)
        for step in range((end - low + DEPTH - 1) // DEPTH):
            stage = done % STAGES
            bar = full.index(stage)
            row = low + step * DEPTH
            x_at = x + token.to(gl.int64)[:, None] * WIDTH + column + across
            token = _tokens(slot, row + DEPTH + side, end, K)
            mbarrier.wait(empty.index(stage), ((done // STAGES) & 1) ^ 1)
            mbarrier.expect(bar, 512 * DEPTH)
            if PAIR:
                tma.async_copy_global_to_shared(first_d, [row, down], bar, first_s.index(stage))
                tma.async_copy_global_to_shared(second_d, [row, down], bar, second_s.index(stage))
            else:
                tma.async_copy_global_to_shared(first_d, [row, right], bar, first_s.index(stage))
                tma.async_copy_global_to_shared(second_d, [row, right + 128], bar, second_s.index(stage))
            live = (row + side < end)[:, None] & (across >= 0)
            async_copy.async_copy_global_to_shared(x_s.index(stage), x_at, mask=live)
            async_copy.mbarrier_arrive(bar, increment_count=False)
            done += 1


@gluon.jit
def _multiply(start, buffers, bars, programs, FORM: gl.constexpr, PART: gl.constexpr):
    """A warpgroup: 64 rows of both blocks."""
    E: gl.constexpr = FORM[2]
    PAIR: gl.constexpr = FORM[4] == 128
    TOTAL: gl.constexpr = E * (FORM[0] // 128) * (FORM[1] // FORM[4])
    x_s, first_s, second_s, staged_s = buffers
    full, empty, staged, free = bars
    STAGES: gl.constexpr = x_s.shape[0]
    DEPTH: gl.constexpr = x_s.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    done = 0
    for n in range(gl.program_id(0), TOTAL, programs):
        expert, low, end, down, right = _block(n, start, FORM)
        count = (n - gl.program_id(0)) // programs
        first = gl.zeros([64, 128], gl.float32, layout=layout)
        second = gl.zeros([64, 128], gl.float32, layout=layout)
        for _ in range((end - low + DEPTH - 1) // DEPTH):
            stage = done % STAGES
            mbarrier.wait(full.index(stage), (done // STAGES) & 1)
            fence_async_shared()  # rows of tokens did not come by the copy engine
            if PAIR:
                left = first_s.index(stage).slice(PART * 64, 64, 1).permute((1, 0))
                other = second_s.index(stage).slice(PART * 64, 64, 1).permute((1, 0))
                first = warpgroup_mma(left, x_s.index(stage), first, is_async=True)
                second = warpgroup_mma(other, x_s.index(stage), second, is_async=True)
            else:
                left = x_s.index(stage).slice(PART * 64, 64, 1).permute((1, 0))
                first = warpgroup_mma(left, first_s.index(stage), first, is_async=True)
                second = warpgroup_mma(left, second_s.index(stage), second, is_async=True)
            first, second = warpgroup_mma_wait(0, (first, second))
            mbarrier.arrive(empty.index(stage), count=1)
            done += 1
        mbarrier.wait(free.index(PART), (count & 1) ^ 1)
        staged_s.index(2 * PART).store(first.to(gl.bfloat16))
        staged_s.index(2 * PART + 1).store(second.to(gl.bfloat16))
        mbarrier.arrive(staged.index(PART), count=1)


@gluon.jit
def _finish(start, first, second, buffers, bars, programs, FORM: gl.constexpr, ADD: gl.constexpr, FINISH: gl.constexpr):
    """The finishing warps: 32 rows of both blocks at a time."""
    E: gl.constexpr = FORM[2]
    PAIR: gl.constexpr = FORM[4] == 128
    ROWS: gl.constexpr = FORM[0]
    COLUMNS: gl.constexpr = FORM[1]
    TOTAL: gl.constexpr = E * (FORM[0] // 128) * (FORM[1] // FORM[4])
    x_s, first_s, second_s, staged_s = buffers
    full, empty, staged, free = bars
    side = gl.arange(0, 32, layout=gl.SliceLayout(1, FINISH))
    across = gl.arange(0, 128, layout=gl.SliceLayout(0, FINISH))
    inside = side[:, None] * COLUMNS + across[None, :]
    for n in range(gl.program_id(0), TOTAL, programs):
        expert, low, end, down, right = _block(n, start, FORM)
        count = (n - gl.program_id(0)) // programs
        for part in range(2):
            at = expert.to(gl.int64) * (ROWS * COLUMNS) + (down + part * 64) * COLUMNS + right
            first_at = first + at + inside
            second_at = second + at + inside if PAIR else first + at + 128 + inside
            mbarrier.wait(staged.index(part), count & 1)
            for piece in gl.static_range(0, 64, 32):
                one = staged_s.index(2 * part).slice(piece, 32, 0).load(FINISH)
                two = staged_s.index(2 * part + 1).slice(piece, 32, 0).load(FINISH)
                if ADD:
                    before = gl.load(first_at + piece * COLUMNS)
                    beside = gl.load(second_at + piece * COLUMNS)
                    gl.store(first_at + piece * COLUMNS, before + one.to(gl.float32))
                    gl.store(second_at + piece * COLUMNS, beside + two.to(gl.float32))
                else:
                    gl.store(first_at + piece * COLUMNS, one)
                    gl.store(second_at + piece * COLUMNS, two)
            mbarrier.arrive(free.index(part), count=1)


@gluon.jit(do_not_specialize=["programs"])
def weight_gradient_gluon(
    x, slot, start, first_d, second_d, first, second, programs,
    FORM: gl.constexpr, ADD: gl.constexpr, STAGES: gl.constexpr, COPY: gl.constexpr, FINISH: gl.constexpr,
):  # fmt: skip
    """FORM: (rows and columns of a matrix, experts, choices of a token, columns of a block).

    Blocks of 128 columns: first and second, stacks of their own, are the descriptors' rows^T times x's. Blocks of 256:
    first is x's rows^T times the descriptor's. ADD: to what is there. The descriptors' rows behind an expert's last one
    are multiplied by zeros.
    """
    io: gl.constexpr = gl.bfloat16
    x_s = gl.allocate_shared_memory(io, [STAGES, 64, 128], first_d.layout)
    first_s = gl.allocate_shared_memory(io, [STAGES, 64, 128], first_d.layout)
    second_s = gl.allocate_shared_memory(io, [STAGES, 64, 128], first_d.layout)
    staged_s = gl.allocate_shared_memory(io, [4, 64, 128], first_d.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    staged = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=129)  # the copy engine's bytes, and every thread of the copying warps
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(staged.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    fence_async_shared()
    buffers = (x_s, first_s, second_s, staged_s)
    bars = (full, empty, staged, free)
    gl.warp_specialize(
        [
            (_multiply, (start, buffers, bars, programs, FORM, 0)),
            (_multiply, (start, buffers, bars, programs, FORM, 1)),
            (_bring, (x, slot, start, (first_d, second_d), buffers, bars, programs, FORM, COPY)),
            (_finish, (start, first, second, buffers, bars, programs, FORM, ADD, FINISH)),
        ],
        [4, 4, 4],
        [160, 72, 120],
    )


def settings() -> tuple[dict[str, Any], dict[str, int]]:
    """Compile-time arguments that no shape changes, and launch options."""
    copy = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    return {"STAGES": 3, "COPY": copy, "FINISH": copy}, {"num_warps": 4, "maxnreg": 128}


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """What the launcher compiles for experts of 768 x 768: both kinds, gradients alone and added to sums."""
    fixed, options = settings()
    given: dict[str, Any] = {"x": "*bf16", "slot": "*i32", "start": "*i32", "programs": "i32", **fixed}
    given |= dict.fromkeys(("first_d", "second_d"), block_type((DEPTH, SIDE)))
    cases = []
    for wide in (128, 256):
        for kind, add in (("*bf16", False), ("*fp32", False), ("*fp32", True)):
            out = {"first": kind, "second": kind if wide == 128 else None}
            form = {"FORM": (768, 768, 80, 4, wide), "ADD": add}
            cases.append((weight_gradient_gluon, given | out | form, options))
    return cases
