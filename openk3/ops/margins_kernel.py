"""Triton kernel that counts margins by expert and bin: integer atomics, whose sums have no order to depend on."""

from typing import Any

import triton
import triton.language as tl

ROWS, COLUMNS, WARPS = 32, 128, 8


@triton.jit(do_not_specialize=["T", "E", "bins"])
def margins_kernel(
    scores, threshold, low_width, counts, T, E, bins, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """counts[j, b] += 1 for ROWS tokens and COLUMNS experts."""
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    live = (token < T)[:, None] & (expert < E)[None, :]
    low = tl.load(low_width).to(tl.float32)
    width = tl.load(low_width + 1).to(tl.float32)
    alpha = tl.load(threshold + token, mask=token < T, other=0.0)[:, None]
    score = tl.load(scores + token.to(tl.int64)[:, None] * E + expert[None, :], mask=live, other=0.0)
    place = tl.div_rn(alpha - score - low, width)
    # Not a number goes to the first bin; beyond the last one nothing may be written.
    place = tl.where(place > 0, place, 0.0)
    place = tl.where(place < bins - 1, place, bins - 1).to(tl.int32)
    tl.atomic_add(counts + expert.to(tl.int64)[None, :] * bins + place, 1, mask=live, sem="relaxed")


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """What the launcher compiles; on every GPU the same."""
    arguments = {"scores": "*fp32", "threshold": "*fp32", "low_width": "*fp64", "counts": "*i64"}
    arguments |= dict.fromkeys(("T", "E", "bins"), "i32") | {"ROWS": ROWS, "COLUMNS": COLUMNS}
    return [(margins_kernel, arguments, {"num_warps": WARPS, "num_stages": 3})]
