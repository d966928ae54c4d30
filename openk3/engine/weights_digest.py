"""weights_digest: a name for a model's weights that no other weights have, for prefixes that outlive a process."""

from __future__ import annotations

from hashlib import blake2b

import torch
from torch import nn

PIECE = 1 << 24  # bytes at a time, where weights are not in CPU memory


@torch.no_grad()
def weights_digest(model: nn.Module) -> str:
    """Of name, dtype, shape and every byte of each parameter and buffer: about a gigabyte a second.

    Two models have the same digest if and only if they compute the same.
    """
    digest = blake2b(digest_size=32, person=b"openk3 weights")
    for name, value in sorted([*model.named_parameters(), *model.named_buffers()]):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        flat_B = value.detach().contiguous().view(-1).view(torch.uint8)
        for piece_B in flat_B.split(PIECE):
            digest.update(piece_B.cpu().numpy().data)
    return digest.hexdigest()
