"""Triton kernel of the pass over rows of logits: log-probability, entropy and the gradient in the logits' place.

Every thread keeps maximum and sums of the columns it meets, a vector of neighbours at a time: a row's values are met
once for the sums and once for the gradient, and threads exchange nothing before the row's end.
"""

from typing import Any

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1.0e38)  # below every logit; differences to it stay finite


@triton.jit
def _columns(row, start, V, LANES: tl.constexpr, VECTOR: tl.constexpr, WHOLE: tl.constexpr):
    """Logits of LANES * VECTOR columns from `start` on in float32, a lane's side by side; LOWEST beyond the last."""
    column = start + tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    if WHOLE:
        return tl.load(row + column).to(tl.float32)
    else:
        inside = column < V
        return tl.where(inside, tl.load(row + column, mask=inside, other=0.0).to(tl.float32), LOWEST)


@triton.jit
def _moments(row, V, LANES: tl.constexpr, VECTOR: tl.constexpr, WHOLE: tl.constexpr, ENTROPY: tl.constexpr):
    """(maximum m, sum of e^(x - m), sum of e^(x - m) (x - m)) over a row; the last is 0 without ENTROPY."""
    top = tl.full([LANES], LOWEST, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    weighted = tl.zeros([LANES], tl.float32)
    for start in range(0, V, LANES * VECTOR):
        x = _columns(row, start, V, LANES, VECTOR, WHOLE)
        higher = tl.maximum(top, tl.max(x, 1))
        rise = top - higher
        kept = tl.exp2(rise * LOG2E)
        below = x - higher[:, None]
        power = tl.exp2(below * LOG2E)
        if not WHOLE:
            power = tl.where(x > LOWEST, power, 0.0)  # a lane may have no column at all
        if ENTROPY:
            weighted = (weighted + total * rise) * kept + tl.sum(power * below, 1)
        total = total * kept + tl.sum(power, 1)
        top = higher
    highest = tl.max(top, 0)
    rise = top - highest
    kept = tl.exp2(rise * LOG2E)
    return highest, tl.sum(total * kept, 0), tl.sum((weighted + total * rise) * kept, 0)


@triton.jit(do_not_specialize=["ignored"])
def logits_kernel(
    logits, ids, log_norm, logprob, entropy, d_logprob, d_entropy, V, ignored,
    LANES: tl.constexpr, VECTOR: tl.constexpr, WHOLE: tl.constexpr, STATISTICS: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    """A row of logits [rows, V] for each program, with the token whose log-probability is asked for.

    STATISTICS: writes log of the sum of exponentials (if log_norm), log-probability and (if entropy) entropy in nats;
    else reads log_norm and entropy. GRADIENT: puts d_logprob (onehot - p) - d_entropy p (log p + entropy) in the
    logits' place; d_logprob None is -1, d_entropy None is 0. Rows whose id is `ignored` have log-probability 0 and
    gradient 0. An id outside 0 .. V - 1 gives NaN everywhere.
    """
    index = tl.program_id(0)
    row = logits + index.to(tl.int64) * V
    token = tl.load(ids + index)
    counts = token != ignored
    valid = (token >= 0) & (token < V)
    norm = 0.0
    level = 0.0
    if STATISTICS:
        if counts:
            highest, total, weighted = _moments(row, V, LANES, VECTOR, WHOLE, entropy is not None)
            spread = tl.log2(total) / LOG2E
            norm = highest + spread
            level = spread - weighted / total
            value = tl.load(row + token, mask=valid, other=0.0).to(tl.float32)
            # In this order a label far ahead of the rest keeps its small loss.
            value = tl.where(valid, (value - highest) - spread, float("nan"))
            tl.store(logprob + index, value)
        else:
            tl.store(logprob + index, 0.0)
        if log_norm is not None:
            tl.store(log_norm + index, norm)
        if entropy is not None:
            tl.store(entropy + index, level)
    else:
        norm = tl.load(log_norm + index)
        if d_entropy is not None:
            level = tl.load(entropy + index)
    if GRADIENT:
        by_token = -1.0
        if d_logprob is not None:
            by_token = tl.load(d_logprob + index)
        by_token = tl.where(valid, by_token, float("nan"))
        tl.debug_barrier()  # the token's logit is read before it is replaced
        for start in range(0, V, LANES * VECTOR):
            column = start + tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
            gradient = tl.zeros([LANES, VECTOR], tl.float32)
            if counts:
                # Read again, from the second-level cache as a rule: all programs' rows together are smaller than it.
                below = _columns(row, start, V, LANES, VECTOR, WHOLE) - norm
                slope = by_token
                if d_entropy is not None:
                    slope += tl.load(d_entropy + index) * (below + level)
                gradient = tl.where(column == token, by_token, 0.0) - tl.exp2(below * LOG2E) * slope
            narrow = gradient.to(logits.dtype.element_ty)
            if WHOLE:
                tl.store(row + column, narrow)
            else:
                tl.store(row + column, narrow, mask=column < V)


def settings(V: int, bytes_per_value: int, gradient: bool) -> tuple[int, int, int]:
    """(lanes, values of a lane, warps): vectors of 16 bytes; few rows at once where they are read twice, else many."""
    vector = 16 // bytes_per_value
    lanes = min(2048 if gradient else 512, triton.next_power_of_2(triton.cdiv(V, vector)))
    return lanes, vector, max(1, lanes // 64)


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """What the launchers compile for a vocabulary of 163,840 in bfloat16, and for an odd one in float32; every arch."""
    tensors = {"logits": "*bf16", "ids": "*i64"}
    tensors |= dict.fromkeys(("log_norm", "logprob", "entropy", "d_logprob", "d_entropy"))
    common = tensors | {"V": "i32:16", "ignored": "i32", "WHOLE": True}
    loss = {"logprob": "*fp32", "STATISTICS": True, "GRADIENT": True}
    measure = {"log_norm": "*fp32", "logprob": "*fp32", "entropy": "*fp32", "STATISTICS": True, "GRADIENT": False}
    gradient = dict.fromkeys(("log_norm", "entropy", "d_logprob", "d_entropy"), "*fp32")
    gradient |= {"STATISTICS": False, "GRADIENT": True}
    odd = {"logits": "*fp32", "V": "i32", "WHOLE": False}
    kinds = (loss, loss | {"GRADIENT": False}, measure, gradient, gradient | {"d_entropy": None})
    cases = []
    for kind in (*kinds, loss | odd, gradient | odd):
        lanes, vector, warps = settings(163_840, 4 if "logits" in kind else 2, bool(kind["GRADIENT"]))
        arguments = common | {"LANES": lanes, "VECTOR": vector} | kind
        cases.append((logits_kernel, arguments, {"num_warps": warps, "num_stages": 3}))
    return cases
