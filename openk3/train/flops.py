"""Model FLOPs of a training step, and what share of a GPU's peak they were: the figures of the log lines."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from openk3.inputs.packed import Packed
from openk3.model.accounting import Account
from openk3.runtime.device import peak_flops


def model_flops(books: Account, batches: Sequence[Packed]) -> float:
    """Forward and backward of every token of `batches`, as `openk3 plan` counts them, attention over each sequence's
    own length included; images by their patches. Image tokens count as text tokens besides.
    """
    short, long = (books.training_flops(length).total for length in (1, 3))
    by_token, by_context = 2 * short - long, long - short  # a token's FLOPs are linear in its mean context
    total = 0.0
    for packed in batches:
        lengths = packed.cu_seqlens.to(torch.float64).diff()
        total += float((lengths * (by_token + by_context * (lengths + 1) / 2)).sum())
        total += sum(3 * books.image_flops(t * h * w) for _, (t, h, w) in packed.images)
    return total


def utilisation(flops: float, seconds: float, device: torch.device) -> dict[str, float]:
    """{"mfu": flops over what the device's peak allows in that time, "peak_gb": most memory that tensors have held};
    empty on a CPU, and without "mfu" on a GPU whose peak is not known.
    """
    if device.type != "cuda":
        return {}
    peak = peak_flops(device)
    found = {} if peak is None else {"mfu": flops / (seconds * peak)}
    return found | {"peak_gb": torch.cuda.max_memory_allocated(device) / 1e9}
