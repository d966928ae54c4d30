"""Where packed sequences begin and end."""

from torch import Tensor


def sequence_bounds(cu_seqlens: Tensor | None, num_tokens: int) -> tuple[int, ...]:
    """Bounds of N packed sequences as N + 1 integers: sequence n is tokens [bounds[n], bounds[n + 1]).

    cu_seqlens [N + 1] integers from 0 up to num_tokens; equal neighbours are an empty sequence; None is one sequence.
    Raises ValueError if it is no such tensor or does not cover the tokens in order.
    """
    if cu_seqlens is None:
        return 0, num_tokens
    bounds = tuple(cu_seqlens.tolist()) if isinstance(cu_seqlens, Tensor) and cu_seqlens.ndim == 1 else ()
    rising = all(type(a) is int and a <= b for a, b in zip(bounds, bounds[1:]))
    if not bounds or bounds[0] != 0 or bounds[-1] != num_tokens or not rising:
        got = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise ValueError(f"cu_seqlens: a tensor that must rise from 0 to the number of tokens, {num_tokens}; got {got}")
    return bounds
