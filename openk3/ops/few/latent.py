"""An MLA layer's step of few tokens, one of each sequence: queries, new latents, and values around the attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from openk3.ops.few.linear import blocks_of, linear, run, takes


@dataclass(frozen=True)
class LatentWeights:
    """Weights between a layer's first maps and its last, of one format, and the sizes of its H heads."""

    q_norm: tuple[Tensor, float]  # of the narrow queries
    q_OC: Tensor  # from them to [H, nope + shared]
    latent_norm: tuple[Tensor, float]
    up_OC: Tensor  # from a latent to [H, nope + value]
    heads: int
    nope: int
    value: int


# memory of latents [pages, tokens of a page, C+R]; page and row in it of each sequence's new latent, integers [N]
Places = tuple[Tensor, Tensor, Tensor]
# that memory; the pages of each sequence [N, P], int32; how many tokens it has [N], int32, the newest included
Latents = tuple[Tensor, Tensor, Tensor]
MOST_KEYS = 16384  # that `attend_alone` takes
Attend = Callable[[Tensor, Tensor], Tensor]


def steps_few(joint_NC: Tensor, weights: LatentWeights, places: Places) -> bool:
    """Whether `step_few` runs: for inference, few tokens, bfloat16 or float32 throughout."""
    memory = places[0]
    tensors = weights.q_norm[0], weights.q_OC, weights.latent_norm[0], weights.up_OC
    return (
        joint_NC.dtype in (torch.bfloat16, torch.float32)
        and all(x.dtype == joint_NC.dtype and x.is_contiguous() for x in tensors)
        and memory.dtype == joint_NC.dtype
        and memory.stride()[1:] == (joint_NC.shape[1], 1)
        and max(weights.q_OC.shape[1], weights.up_OC.shape[1]) <= 1024
        and takes(joint_NC, joint_NC.shape[1])
    )


def step_few(
    narrow_NC: Tensor,
    joint_NC: Tensor,
    gate_NC: Tensor | None,
    weights: LatentWeights,
    *,
    places: Places,
    attend: Attend,
) -> Tensor:
    """Gated outputs [N, H * V] of `model.mla.GatedMLA` before its last map, from what its first maps gave.

    Enters the new latents in memory. `attend` turns queries in latent space [N, H, C] and their shared parts [N, H, R]
    into contexts [N, H, C] in float32, over all latents, these included.
    """
    q_NC = linear(narrow_NC, weights.q_OC, weights.q_norm)
    q_latent_NHC = _absorb(q_NC, joint_NC, weights, places)
    q_shared_NHR = q_NC.unflatten(-1, (weights.heads, -1))[..., weights.nope :]
    return _values(attend(q_latent_NHC, q_shared_NHR), gate_NC, weights, joint_NC.dtype)


def attends_alone(q_latent_NHC: Tensor, latents: Latents) -> bool:
    """Whether `attend_alone` runs: one sequence, with room for no more tokens than few programs walk through."""
    memory, page_NP, _ = latents
    return (
        len(q_latent_NHC) == len(page_NP) == 1
        and memory.shape[1] * page_NP.shape[1] <= MOST_KEYS
        and memory.dtype == q_latent_NHC.dtype
    )


def attend_alone(q_latent_1HC: Tensor, q_shared_1HR: Tensor, latents: Latents, scale: float) -> Tensor:
    """Contexts [1, H, C] in float32 of the newest token of one sequence, whose latent is in memory already.

    As `ops.mla.latent_decode.latent_attention` does it, by two launches that start early.
    """
    from openk3.ops.few.attend_kernel import attend_kernel, attend_settings, join_kernel, join_settings
    from openk3.ops.mla.attention_views import LOG2E

    memory, page_NP, length_N = latents
    (_, H, C), shared = q_latent_1HC.shape, q_shared_1HR.shape[2]
    known, warps = attend_settings(H, C, shared, memory.element_size())
    runs = known["RUNS"]
    parts = torch.empty(runs, H, C, dtype=torch.float32, device=memory.device)
    logs, out = parts.new_empty(runs, H), parts.new_empty(1, H, C)
    page = memory.shape[1] if page_NP.shape[1] > 1 else 2**30
    known |= {"SHARED_STRIDE": q_shared_1HR.stride(1), "PAGE": page, "PRECISION": "tf32x3"}
    numbers = scale * LOG2E, *memory.stride()[:2]
    tensors = q_latent_1HC, q_shared_1HR, memory, page_NP, length_N, parts, logs, *numbers
    run(attend_kernel, runs, tensors, (known, warps), like=memory)
    known, warps = join_settings(H, C)
    run(join_kernel, H * blocks_of(C, known["B"]), (parts, logs, out), (known, warps), like=memory)
    return out


def _absorb(q_NC: Tensor, joint_NC: Tensor, weights: LatentWeights, places: Places) -> Tensor:
    """Queries in latent space; new latents are normed and written on the way."""
    from openk3.ops.few.latent_kernel import absorb_kernel, absorb_settings

    memory, page_N, row_N = places
    (N, H), C = (len(q_NC), weights.heads), weights.up_OC.shape[1]
    shared = joint_NC.shape[1] - C
    known, warps = absorb_settings(weights.nope, shared, C)
    known |= {"Q_STRIDE": q_NC.stride(0), "J_STRIDE": joint_NC.stride(0), "H": H, "VALUE": weights.value}
    norm, eps = weights.latent_norm
    q_latent_NHC = q_NC.new_empty(N, H, C)
    tensors = q_NC, weights.up_OC, joint_NC, norm, memory, page_N, row_N, q_latent_NHC
    numbers = N, eps, memory.stride(0)
    programs = H * blocks_of(C, known["B"]) + N
    run(absorb_kernel, programs, (*tensors, *numbers), (known, warps), like=q_NC)
    return q_latent_NHC


def _values(context_NHC: Tensor, gate_NC: Tensor | None, weights: LatentWeights, dtype: torch.dtype) -> Tensor:
    """Contexts, rounded to the weights' format, through the map to values, times open gates."""
    from openk3.ops.few.latent_kernel import value_kernel, value_settings

    (N, H, C), V = context_NHC.shape, weights.value
    known, warps = value_settings(C, H * V, N)
    stride = 0 if gate_NC is None else gate_NC.stride(0)
    known |= {"G_STRIDE": stride, "H": H, "NOPE": weights.nope, "VALUE": V}
    out_NC = context_NHC.new_empty(N, H * V, dtype=dtype)
    tensors = context_NHC.contiguous(), weights.up_OC, gate_NC, out_NC, N
    run(value_kernel, H * blocks_of(V, known["R"]), tensors, (known, warps), like=context_NHC)
    return out_NC
