"""Triton kernels of attention over cached latents in pages: each latent is read once, as key and as value of all heads.

The keys of all requests, in blocks, are shared out evenly: a program takes a run of blocks, which may end one request
and begin the next. It walks through them with a running maximum, sum and context of some rows (a row is a head of a new
token). Where a request is spread over several programs, a second kernel puts their results together, always in the same
order. Scores are kept transposed, [keys, rows]: then few heads fill a tile of the tensor cores, too.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from openk3.ops.mla.attention_kernel import wide

AT_ONCE = tl.constexpr(16)  # parts of a request
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


class Settings(NamedTuple):
    """Rows and keys of a block, programs on a multiprocessor, and launch options."""

    rows: int
    keys: int
    programs: int
    warps: int
    stages: int

    def options(self) -> dict[str, int]:
        """What the compiler takes."""
        return {"num_warps": self.warps, "num_stages": self.stages}


def settings(rows: int, element_bytes: int, arch: int, latent: int = 512) -> Settings:
    """For up to so many rows of a request, and latents of so many values beside the shared part's up to 64.

    A block of keys is a chain of loads, products and a softmax; where latents are narrow there is room for two.
    """
    block = 16 if rows <= 16 else 32
    if element_bytes == 4:
        return Settings(16, 16, 1, 4, 1)
    keys = 32 if arch == 90 else 16  # elsewhere registers run out with 32
    programs = 2 if arch == 90 and latent <= 256 and block == 16 else 1
    return Settings(block, keys, programs, 8, {80: 3, 90: 4}.get(arch, 2))


@triton.jit(
    do_not_specialize=["N", "heads", "rows", "keys"],
    do_not_specialize_on_alignment=["length_ptr", "cu_ptr", "before_ptr"],
)
def plan_kernel(length_ptr, cu_ptr, before_ptr, N, heads, rows, keys, PADDED: tl.constexpr):
    """For one block of rows: how many blocks of keys lie before each request [N + 1]; none where it has no rows."""
    part = tl.program_id(0)
    n = tl.arange(0, PADDED)
    live = n < N
    length = tl.load(length_ptr + n, mask=live, other=0)
    new = tl.load(cu_ptr + n + 1, mask=live, other=0) - tl.load(cu_ptr + n, mask=live, other=0)
    blocks = tl.where(live & (new * heads > part * rows), (length + keys - 1) // keys, 0)
    tl.store(before_ptr + part * (N + 1) + 1 + n, tl.cumsum(blocks, 0), mask=live)
    tl.store(before_ptr + part * (N + 1) + n, n * 0, mask=n == 0)


@triton.jit
def _request_of(before_ptr, N, block):
    """The request that a block belongs to: the last n with before[n] <= block."""
    low = 0
    high = N
    while low + 1 < high:
        middle = (low + high) // 2
        after = tl.load(before_ptr + middle) > block
        low = tl.where(after, low, middle)
        high = tl.where(after, middle, high)
    return low


@triton.jit
def _page(at):
    """A page's number, read where it is needed: as a load of its own it would cost the loop a stage of its pipeline."""
    if INTERPRETED:
        page = tl.load(at)
    elif at.dtype.element_ty == tl.int64:
        page = tl.inline_asm_elementwise("ld.global.nc.s64 $0, [$1];", "=l,l", [at], tl.int64, True, 1)
    else:
        page = tl.inline_asm_elementwise("ld.global.nc.s32 $0, [$1];", "=r,l", [at], tl.int32, True, 1)
    return page.to(tl.int64)


@triton.jit
def _rows(pointer, at, live, width: tl.constexpr, padded: tl.constexpr):
    """Rows at offsets `at`; zeros where not live and beyond the true width."""
    channel = tl.arange(0, padded)
    mask = live[:, None]
    if width != padded:
        mask = mask & (channel < width)[None, :]
    return tl.load(pointer + at[:, None] + channel[None, :], mask=mask, other=0.0)


@triton.jit(
    do_not_specialize=["N", "heads", "page_row", "parts"],
    do_not_specialize_on_alignment=["length_ptr", "cu_ptr", "before_ptr", "page_ptr"],
)
def latent_kernel(
    q_latent_ptr, q_shared_ptr, latent_ptr, page_ptr, length_ptr, cu_ptr, before_ptr, out_ptr, part_ptr, log_ptr,
    scale, N, heads, page_row, parts, page_stride, token_stride,
    latent_along, latent_across, shared_along, shared_across,
    C: tl.constexpr, S: tl.constexpr, PC: tl.constexpr, PS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A run of key blocks for one block of rows: contexts of whole requests, or parts [parts, programs + N, ROWS, C].

    Programs: `parts` blocks of rows for each run. `scale` is that of the scores times log2 e. Pages have PAGE tokens.
    Queries lie `along` apart from token to token and `across` from head to head: numbers of the pass, not constants,
    because where heads come first they follow from how many tokens a pass has.
    """
    part = tl.program_id(0) % parts
    run, runs = tl.program_id(0) // parts, tl.num_programs(0) // parts
    before_ptr += part * (N + 1)
    total = tl.load(before_ptr + N).to(tl.int64)
    used = tl.maximum(tl.minimum(total, runs), 1)  # each of these has a block at least
    block = (tl.minimum(run, used) * total // used).to(tl.int32)
    last = (tl.minimum(run + 1, used) * total // used).to(tl.int32)
    n = _request_of(before_ptr, N, block)
    key = tl.arange(0, BLOCK)
    row = part * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, PC)
    while block < last:
        begin, end = tl.load(before_ptr + n), tl.load(before_ptr + n + 1)
        stop = tl.minimum(end, last)
        if stop > block:
            start = tl.load(cu_ptr + n)
            new = tl.load(cu_ptr + n + 1) - start
            length = tl.load(length_ptr + n)
            token, head = row // heads, row % heads
            live = token < new
            origin = (start + token).to(tl.int64)
            q_c = _rows(q_latent_ptr, origin * latent_along + wide(head) * latent_across, live, C, PC)
            q_s = _rows(q_shared_ptr, origin * shared_along + wide(head) * shared_across, live, S, PS)
            seen = length - new + 1 + tl.minimum(token, new - 1)  # keys of each row
            peak = tl.full([ROWS], float("-inf"), tl.float32)
            sums = tl.zeros([ROWS], tl.float32)
            context = tl.zeros([PC, ROWS], tl.float32)
            for j in tl.range((block - begin) * BLOCK, (stop - begin) * BLOCK, BLOCK):
                if PAGE % BLOCK == 0:
                    page = _page(page_ptr + n * page_row + j // PAGE)
                    at = page * page_stride + wide(j % PAGE + key) * token_stride
                else:
                    token_at = tl.minimum(j + key, length - 1)
                    page = _page(page_ptr + n * page_row + token_at // PAGE)
                    at = page * page_stride + wide(token_at % PAGE) * token_stride
                k_c = _rows(latent_ptr, at, j + key < length, C, PC)
                k_s = _rows(latent_ptr + C, at, j + key < length, S, PS)
                scores = tl.dot(k_c, tl.trans(q_c), input_precision=PRECISION)
                scores = tl.dot(k_s, tl.trans(q_s), scores, input_precision=PRECISION)
                scores = tl.where((j + key)[:, None] < seen[None, :], scores, float("-inf"))
                largest = tl.maximum(peak, tl.max(scores, 0))
                base = tl.where(largest == float("-inf"), 0.0, largest) * scale
                probs = tl.exp2(scores * scale - base[None, :])
                shrink = tl.exp2(peak * scale - base)
                sums = sums * shrink + tl.sum(probs, 0)
                context = context * shrink[None, :]
                context = tl.dot(tl.trans(k_c), probs.to(k_c.dtype), context, input_precision=PRECISION)
                peak = largest
            share = 1.0 / tl.where(sums == 0.0, 1.0, sums)
            inside = (channel < C)[:, None]
            if (begin == block) & (stop == end):
                to = origin * heads + head
                tl.store(
                    out_ptr + to[None, :] * C + channel[:, None], context * share[None, :],
                    mask=live[None, :] & inside,
                )  # fmt: skip
            else:
                slot = (part * (runs + N) + run + n).to(tl.int64) * ROWS + tl.arange(0, ROWS)
                tl.store(part_ptr + slot[None, :] * C + channel[:, None], context * share[None, :], mask=inside)
                tl.store(log_ptr + slot, tl.where(sums == 0.0, float("-inf"), peak * scale + tl.log2(1.0 / share)))
        block = stop
        n += 1


@triton.jit(do_not_specialize=["N", "heads", "runs", "rows"], do_not_specialize_on_alignment=["cu_ptr", "before_ptr"])
def combine_kernel(
    part_ptr, log_ptr, cu_ptr, before_ptr, out_ptr, N, heads, runs, rows, C: tl.constexpr, PC: tl.constexpr
):  # fmt: skip
    """One row: the parts of a request that several runs share, in their order; nothing to do for others."""
    token, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    n = _request_of(cu_ptr, N, token)
    row = (token - tl.load(cu_ptr + n)) * heads + head
    part = row // rows
    before_ptr += part * (N + 1)
    total = tl.load(before_ptr + N).to(tl.int64)
    used = tl.minimum(total, runs)
    first_block, last_block = tl.load(before_ptr + n).to(tl.int64), tl.load(before_ptr + n + 1).to(tl.int64) - 1
    first = ((first_block + 1) * used - 1) // total
    last = ((last_block + 1) * used - 1) // total
    if last > first:
        channel = tl.arange(0, PC)
        peak = float("-inf")
        sums = 0.0
        context = tl.zeros([PC], tl.float32)
        nth = tl.arange(0, AT_ONCE)
        for run in tl.range(first, last + 1, AT_ONCE):
            inside = run + nth <= last
            slot = (part * (runs + N) + run + nth + n).to(tl.int64) * rows + row % rows
            log = tl.load(log_ptr + slot, mask=inside, other=float("-inf"))
            live = inside[:, None] & (channel < C)[None, :]
            values = tl.load(part_ptr + slot[:, None] * C + channel[None, :], mask=live, other=0.0)
            largest = tl.maximum(peak, tl.max(log, 0))
            base = tl.where(largest == float("-inf"), 0.0, largest)
            shrink, weight = tl.exp2(peak - base), tl.exp2(log - base)
            context = context * shrink + tl.sum(values * weight[:, None], 0)
            sums = sums * shrink + tl.sum(weight, 0)
            peak = largest
        tl.store(out_ptr + tl.program_id(0).to(tl.int64) * C + channel, context / sums, mask=channel < C)


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """What the launchers compile for 8 to 96 heads over latents of 512 + 64 values in bfloat16, 6 over 256 + 64."""
    cases = []
    for heads, latent, page, stride in (
        (24, 512, "*i32:1", "i32:16"),
        (96, 512, "*i32:1", "i32:16"),
        (8, 512, "*i32:1", "i32:16"),
        (96, 512, "*i64:1", "i64:16"),
        (6, 256, "*i32:1", "i32:16"),
    ):
        found = settings(heads, 2, arch, latent)
        given: dict[str, Any] = {f"{name}_ptr": "*bf16" for name in ("q_latent", "q_shared", "latent")}
        given |= {f"{name}_ptr": "*i32:1" for name in ("length", "cu", "before")} | {"page_ptr": page}
        given |= {f"{name}_ptr": "*fp32" for name in ("out", "part", "log")} | {"scale": "fp32"}
        given |= dict.fromkeys(("N", "heads", "page_row", "parts"), "i32")
        given |= {"page_stride": stride, "token_stride": "i32:16"}
        given |= {f"{part}_{way}": "i32:16" for part in ("latent", "shared") for way in ("along", "across")}
        given |= {"C": latent, "S": 64, "PC": latent, "PS": 64}
        given |= {"ROWS": found.rows, "BLOCK": found.keys, "PAGE": 6144}
        cases.append((latent_kernel, given | {"PRECISION": "tf32x3"}, found.options()))
    plan: dict[str, Any] = dict.fromkeys(("length_ptr", "cu_ptr", "before_ptr"), "*i32:1") | {
        "N": "i32",
        "heads": "i32",
    }
    plan |= {"rows": "i32", "keys": "i32", "PADDED": 256}
    parts: dict[str, Any] = {"part_ptr": "*fp32", "log_ptr": "*fp32", "cu_ptr": "*i32:1", "before_ptr": "*i32:1"}
    parts |= {"out_ptr": "*fp32", "N": "i32", "heads": "i32", "runs": "i32", "rows": "i32", "C": 512, "PC": 512}
    return [*cases, (plan_kernel, plan, {"num_warps": 4}), (combine_kernel, parts, {"num_warps": 4})]
