"""Gluon twin of the depth-mixing kernel for Hopper: rows of 16-bit sources stream through a ring in shared memory.

Each program takes every so many tokens and never stops asking for rows: while one group of rows is summed, the next
ones are on their way, those of later tokens too.
"""

from functools import lru_cache
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy


@gluon.constexpr_function
def _blocks(D, BLOCK):
    """Blocks of a row."""
    return (D + BLOCK - 1) // BLOCK


@gluon.constexpr_function
def _width(D):
    """Values of a row's place in the ring."""
    return 1 << (D - 1).bit_length()


@gluon.constexpr_function
def _layout(BLOCK, WARPS):
    """A thread has neighbouring values of a block."""
    return gl.BlockedLayout([BLOCK // (32 * WARPS)], [32], [WARPS], [0])


@gluon.jit
def _add_two(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@gluon.jit
def _add_four(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@gluon.jit
def _add_six(a0, a1, a2, a3, a4, a5, b0, b1, b2, b3, b4, b5):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5


@gluon.jit
def _sums(parts):
    """The sum of each [BLOCK] tensor; up to six share the barriers of one reduction."""
    COUNT: gl.constexpr = len(parts)
    if COUNT == 1:
        return (gl.sum(parts[0], 0),)
    elif COUNT == 2:
        return gl.reduce(parts, 0, _add_two)
    elif COUNT == 4:
        return gl.reduce(parts, 0, _add_four)
    elif COUNT == 6:
        return gl.reduce(parts, 0, _add_six)
    elif COUNT == 3:
        return _sums(parts[:2]) + _sums(parts[2:])
    elif COUNT == 5:
        return _sums(parts[:4]) + _sums(parts[4:])
    else:
        return _sums(parts[:6]) + _sums(parts[6:])


@gluon.jit
def _row(pointer, at, index, D: gl.constexpr):
    """A row of D values from offset `at` on, as blocks in their own format; zeros past the end."""
    BLOCK: gl.constexpr = index.shape[0]
    blocks = ()
    for start in gl.static_range(0, D, BLOCK):
        if start + BLOCK <= D:
            blocks = blocks + (gl.load(pointer + (at + start + index)),)
        else:
            blocks = blocks + (gl.load(pointer + (at + start + index), mask=start + index < D, other=0.0),)
    return blocks


@gluon.jit
def _store_row(pointer, at, blocks, index, D: gl.constexpr):
    """Write a row, rounded to the format there."""
    BLOCK: gl.constexpr = index.shape[0]
    for c in gl.static_range(len(blocks)):
        value = blocks[c].to(pointer.dtype.element_ty)
        if (c + 1) * BLOCK <= D:
            gl.store(pointer + (at + c * BLOCK + index), value)
        else:
            gl.store(pointer + (at + c * BLOCK + index), value, mask=c * BLOCK + index < D)


@gluon.jit
def _request(ring, slot, pointer, token, T, D: gl.constexpr, WARPS: gl.constexpr):
    """Ask for a token's row; past the last token for that one's again, which nobody looks at."""
    WIDTH: gl.constexpr = ring.shape[1]
    at = gl.minimum(token, T - 1).to(gl.int64) * D
    index = gl.arange(0, WIDTH, gl.BlockedLayout([8], [32], [WARPS], [0]))
    if D == WIDTH:
        async_copy.async_copy_global_to_shared(ring.index(slot), pointer + (at + index))
    else:
        async_copy.async_copy_global_to_shared(ring.index(slot), pointer + (at + index), mask=index < D)


@gluon.jit
def _arrived(ring, slot, D: gl.constexpr, BLOCK: gl.constexpr, WARPS: gl.constexpr):
    """A row of the ring in float32; past the end is anything."""
    row = ring.index(slot)
    blocks = ()
    for start in gl.static_range(0, D, BLOCK):
        blocks = blocks + (row.slice(start, BLOCK).load(_layout(BLOCK, WARPS)).to(gl.float32),)
    return blocks


@gluon.jit
def _wide(blocks):
    """The blocks in float32."""
    out = ()
    for c in gl.static_range(len(blocks)):
        out = out + (blocks[c].to(gl.float32),)
    return out


@gluon.jit
def _rounded(blocks, like):
    """The blocks in float32 as they would be after a detour through the format behind a pointer."""
    out = ()
    for c in gl.static_range(len(blocks)):
        out = out + (blocks[c].to(like.dtype.element_ty).to(gl.float32),)
    return out


@gluon.jit
def _dot(a, b):
    """Sum over blocks of a * b; [BLOCK], still to be summed."""
    total = a[0] * b[0]
    for c in gl.static_range(1, len(a)):
        total += a[c] * b[c]
    return total


@gluon.jit
def _product(a, b):
    out = ()
    for c in gl.static_range(len(a)):
        out = out + (a[c] * b[c],)
    return out


@gluon.jit
def _combined(a, x, b, y):
    """a * x + b * y; a and b are numbers."""
    out = ()
    for c in gl.static_range(len(x)):
        out = out + (a * x[c] + b * y[c],)
    return out


@gluon.jit
def _added(x, a, y):
    """x + a * y; a is a number."""
    out = ()
    for c in gl.static_range(len(x)):
        out = out + (x[c] + a * y[c],)
    return out


@gluon.jit
def _scaled(x, a):
    out = ()
    for c in gl.static_range(len(x)):
        out = out + (x[c] * a,)
    return out


@gluon.jit
def _zeros(index, COUNT: gl.constexpr):
    out = ()
    for _ in gl.static_range(COUNT):
        out = out + (index.to(gl.float32) * 0.0,)
    return out


@gluon.jit
def _vector(query, norm_weight, index, D: gl.constexpr):
    """norm weight * query, all that scores depend on."""
    return _product(_wide(_row(query, 0, index, D)), _wide(_row(norm_weight, 0, index, D)))


@gluon.jit
def _request_group(
    ring, stage, streams, token, T, FIRST: gl.constexpr, SHAPE: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """Ask for the streams of a group; with the last source comes what is added to it."""
    D: gl.constexpr = SHAPE[0]
    L: gl.constexpr = SHAPE[1]
    GROUP: gl.constexpr = SHAPE[2]
    ROWS: gl.constexpr = GROUP + (len(streams) - L)
    END: gl.constexpr = len(streams) if FIRST + GROUP >= L else FIRST + GROUP
    for i in gl.static_range(FIRST, END):
        _request(ring, stage * ROWS + i - FIRST, streams[i], token, T, D, WARPS)
    async_copy.commit_group()


@gluon.jit
def _summed(ring, slot, newest, at, index, D: gl.constexpr, WARPS: gl.constexpr):
    """The last source of a token and what is added to it, from the ring; the sum is written."""
    BLOCK: gl.constexpr = index.shape[0]
    total = _added(_arrived(ring, slot, D, BLOCK, WARPS), 1.0, _arrived(ring, slot + 1, D, BLOCK, WARPS))
    total = _rounded(total, newest)
    _store_row(newest, at, total, index, D)
    return total


@gluon.jit
def _mix_group(
    state, ring, slot, newest, vector, token, index, eps,
    FIRST: gl.constexpr, SHAPE: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Take a group of sources into the running softmax: (total, largest score, mixture, scores, reciprocal sizes)."""
    D: gl.constexpr = SHAPE[0]
    L: gl.constexpr = SHAPE[1]
    BLOCK: gl.constexpr = index.shape[0]
    COUNT: gl.constexpr = SHAPE[2] if FIRST + SHAPE[2] <= L else L - FIRST
    SUMMED: gl.constexpr = (newest is not None) and (FIRST + COUNT == L)
    total, top, mixture, found, inverses = state
    at = token.to(gl.int64) * D
    number = gl.arange(0, found.shape[0], found.type.layout)
    values = ()
    parts = ()
    for j in gl.static_range(COUNT):
        if SUMMED and j == COUNT - 1:
            values = values + (_summed(ring, slot + j, newest, at, index, D, WARPS),)
        else:
            values = values + (_arrived(ring, slot + j, D, BLOCK, WARPS),)
        parts = parts + (_dot(values[j], values[j]), _dot(values[j], vector))
    sums = _sums(parts)
    here = ()
    highest = top
    for j in gl.static_range(COUNT):
        inverse = gl.rsqrt(sums[2 * j] / D + eps)
        score = sums[2 * j + 1] * inverse
        found = gl.where(number == FIRST + j, score, found)
        inverses = gl.where(number == FIRST + j, inverse, inverses)
        highest = gl.maximum(highest, score)
        here = here + (score,)
    if FIRST > 0:
        shrink = gl.exp(top - highest)
        total *= shrink
        mixture = _scaled(mixture, shrink)
    for j in gl.static_range(COUNT):
        weight = gl.exp(here[j] - highest)
        total += weight
        mixture = _added(mixture, weight, values[j])
    return total, highest, mixture, found, inverses


@gluon.jit
def _write_mixture(mixture, mixed, normed, out_weight, like, at, index, norm_eps, D: gl.constexpr):
    """The mixture, its norm, or both."""
    if mixed is not None:
        _store_row(mixed, at, mixture, index, D)
    if normed is not None:
        weight = _row(out_weight, 0, index, D)
        mixture = _rounded(mixture, like)
        size = gl.sum(_dot(mixture, mixture), 0)
        normal = _rounded(_scaled(mixture, gl.rsqrt(size / D + norm_eps)), like)
        _store_row(normed, at, _product(normal, _wide(weight)), index, D)


@gluon.jit(do_not_specialize=["T"])
def mix_forward_kernel(
    sources, addend, query, norm_weight, out_weight, newest, mixed, normed, probs, scores, rrms, T, eps, norm_eps,
    D: gl.constexpr, BLOCK: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Mixture of a token's sources, the norm of it, or both; and its weights, scores and reciprocal sizes [T, L]."""
    L: gl.constexpr = len(sources)
    EXTRA: gl.constexpr = 0 if addend is None else 1
    SHAPE: gl.constexpr = (D, L, GROUP)
    GROUPS: gl.constexpr = (L + GROUP - 1) // GROUP
    ROWS: gl.constexpr = GROUP + EXTRA
    COUNT: gl.constexpr = _blocks(D, BLOCK)
    streams = sources
    if addend is not None:
        streams = sources + (addend,)
    index = gl.arange(0, BLOCK, _layout(BLOCK, WARPS))
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ring = gl.allocate_shared_memory(sources[0].dtype.element_ty, [STAGES * ROWS, _width(D)], flat)
    number = gl.arange(0, NUMBERS, gl.BlockedLayout([1], [32], [WARPS], [0]))
    token = gl.program_id(0)
    for n in gl.static_range(STAGES - 1):
        later = token + n // GROUPS * gl.num_programs(0)
        _request_group(ring, n, streams, later, T, n % GROUPS * GROUP, SHAPE, WARPS)
    vector = _vector(query, norm_weight, index, D)
    stage = 0
    while token < T:
        none = number.to(gl.float32) * 0.0
        state = (0.0, float("-inf"), _zeros(index, COUNT), none, none)
        for g in gl.static_range(GROUPS):
            async_copy.wait_group(STAGES - 2)
            later = token + (g + STAGES - 1) // GROUPS * gl.num_programs(0)
            before = gl.where(stage == 0, STAGES - 1, stage - 1)
            _request_group(ring, before, streams, later, T, (g + STAGES - 1) % GROUPS * GROUP, SHAPE, WARPS)
            state = _mix_group(
                state, ring, stage * ROWS, newest, vector, token, index, eps, g * GROUP, SHAPE, WARPS
            )  # fmt: skip
            stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        total, top, mixture, found, inverses = state
        row = token.to(gl.int64) * L + number
        gl.store(scores + row, found, mask=number < L)
        gl.store(rrms + row, inverses, mask=number < L)
        gl.store(probs + row, gl.div_rn(gl.exp(found - top), total), mask=number < L)
        mixture = _scaled(mixture, gl.div_rn(1.0, total))
        at = token.to(gl.int64) * D
        _write_mixture(mixture, mixed, normed, out_weight, sources[0], at, index, norm_eps, D)
        token += gl.num_programs(0)
    async_copy.wait_group(0)


class Settings(NamedTuple):
    """How a kernel is compiled and its work cut up."""

    block: int  # values of a row that the threads take at a time
    warps: int
    rows: int  # that the ring holds
    programs: int  # on one multiprocessor at a time

    def options(self) -> dict[str, int]:
        """Launch options: registers for as many programs as are meant to share a multiprocessor."""
        return {"num_warps": self.warps, "maxnreg": min(255, 2048 // (self.warps * self.programs))}


SHARED = 228 * 1024  # bytes of a multiprocessor; each program takes 1 KB by itself, and some for reductions
MOST_SOURCES, WIDTHS = 10, (256, 7168)
WIDEST = 8192  # the widest rows, with what fills them up
NUMBERS = gl.constexpr(16)  # places for a token's scores, one in each thread: registers are too short for tuples


def settings(D: int, warps: int, programs: int, near: int) -> Settings:
    """For the widest rows so many warps and programs on a multiprocessor, for others more programs of fewer warps.

    A thread takes `near` neighbouring values at a time. The ring has as many rows as shared memory holds.
    """
    width = _width(D)
    fewer = min(warps, WIDEST // width)
    warps, programs = warps // fewer, programs * fewer
    rows = min(16, (SHARED // programs - 1536) // (2 * width))
    return Settings(32 * near * warps, warps, rows, programs)


@lru_cache(maxsize=64)
def forward_constants(D: int, L: int, addend: bool) -> tuple[dict[str, int], Settings]:
    """Constants of the forward kernel, as measured for 2, 5 and 9 sources."""
    if L <= 2:
        how, group = settings(D, 8, 2, 4), L
    elif L <= 5 and not addend:
        how, group = settings(D, 8, 2, 4), 1
    else:
        how, group = settings(D, 8, 1, 4), 2 if L == 4 else 3
    stages = how.rows // (group + addend)
    return {"D": D, "BLOCK": how.block, "GROUP": group, "STAGES": stages, "WARPS": how.warps}, how


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """What the launcher compiles for rows of 7168 in bfloat16: normed with and without a sum, as layers read; bare."""
    added, bare = ("mixed",), ("addend", "newest", "out_weight", "normed")
    normed = ("mixed", "addend", "newest")
    return [_case(L, absent) for absent in (added, normed, bare) for L in (9, 2, 5)]


def _case(L: int, absent: tuple[str, ...]) -> tuple[Any, dict[str, Any], dict[str, int]]:
    """A case of `compile_cases`; arguments named in `absent` are not given."""
    constants, how = forward_constants(7168, L, "addend" not in absent)
    known: dict[str, Any] = constants | {"T": "i32", "eps": "fp32", "norm_eps": "fp32", "sources": ("*bf16",) * L}
    known |= dict.fromkeys(("probs", "scores", "rrms"), "*fp32")
    arguments = {x: None if x in absent else known.get(x, "*bf16") for x in mix_forward_kernel.arg_names}
    return mix_forward_kernel, arguments, how.options()
