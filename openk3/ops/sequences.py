"""Where packed sequences begin and end."""

from torch import Tensor


def sequence_bounds(cu_seqlens: Tensor | None, num_tokens: int) -> tuple[int, ...]:
    """Bounds of N packed sequences as N + 1 integers: sequence n is tokens [bounds[n], bounds[n + 1]).

    cu_seqlens [N + 1] integers from 0 up to num_tokens; equal neighbours are an empty sequence; None is one sequence.
    Raises ValueError if they do not cover the tokens in order.
    """
    if cu_seqlens is None:
        return 0, num_tokens
    bounds = tuple(cu_seqlens.tolist())
    if not bounds or bounds[0] != 0 or bounds[-1] != num_tokens or any(b < a for a, b in zip(bounds, bounds[1:])):
        raise ValueError(f"cu_seqlens must rise from 0 to the number of tokens, {num_tokens}; got {list(bounds)}")
    return bounds
