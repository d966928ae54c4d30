"""Two computations beside each other on a GPU: the second on a stream of its own."""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

Work = Callable[[], Tensor]
# Beyond, each computation fills a GPU by itself, and two share its caches: a layer of experts takes 40 % longer at 8192
# rows, where it gains 10 to 20 % up to 1024 (one H200).
MOST_ROWS = 2048


def runs_beside(x: Tensor) -> bool:
    """Whether `side_by_side` takes a stream of its own for rows like x's."""
    return x.device.type == "cuda" and len(x) <= MOST_ROWS


def side_by_side(x: Tensor, first: Work, second: Work) -> tuple[Tensor, Tensor]:
    """(first(), second()), which read nothing of each other; on a GPU neither waits for the other.

    What follows on the current stream waits for both, and so does the backward pass, whose second half runs on the
    other stream too. Memory of the second's tensors is used anew only by a later second one, which waits for all that
    the current stream does before. May be captured as a CUDA graph. On other devices, and for more than MOST_ROWS rows
    of x, one runs after the other.
    """
    if not runs_beside(x):
        return first(), second()
    current = torch.cuda.current_stream(x.device)
    side = _side_of(x.device, current.stream_id)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        other = second()
    one = first()
    current.wait_stream(side)
    return one, other


@lru_cache(maxsize=32)
def _side_of(device: torch.device, stream_id: int) -> torch.cuda.Stream:
    """The stream that goes with another one: threads that work on streams of their own do not share it."""
    return torch.cuda.Stream(device)
