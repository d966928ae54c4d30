"""A stretch of Kimi Delta Attention as an affine map of the state, so that stretches can be computed at once."""

from dataclasses import dataclass

import torch
from torch import Tensor

from openk3.ops.backend import pick
from openk3.ops.kda.chunk import chunk_kda
from openk3.ops.kda.reference import KdaGate, check_tokens
from openk3.ops.norm import at_full_precision, at_least_float32
from openk3.ops.sequences import sequence_bounds


@dataclass(frozen=True)
class Segment:
    """state leaving = transition @ state entering + written, per head (report eq. 17)."""

    transition_NHKK: Tensor
    written_NHKV: Tensor

    @at_full_precision
    def apply(self, state_NHKV: Tensor) -> Tensor:
        """State leaving each of the N segments when `state` enters it."""
        return self.transition_NHKK @ state_NHKV + self.written_NHKV


def segment_kda(
    k_THK: Tensor,
    v_THV: Tensor,
    decay_logit_THK: Tensor,
    beta_logit_TH: Tensor,
    gate: KdaGate,
    *,
    cu_seqlens: Tensor | None = None,
) -> Segment:
    """The maps of N packed segments, known before any state is; arguments as in `recurrent_kda`. Differentiable.

    One pass of `chunk_kda` over value columns [0, v] from the states [I, 0]: the recurrence works on every column by
    itself, so the first K columns end as the transition and the others as what the segment writes. Kernels, which take
    heads of certain widths, do the two in a pass each.
    """
    check_tokens(k_THK, k_THK, v_THV, decay_logit_THK, beta_logit_TH)
    num_segments = len(sequence_bounds(cu_seqlens, len(k_THK))) - 1
    (num_tokens, H, K), V = k_THK.shape, v_THV.shape[2]

    def leaving(values_THV: Tensor, state_NHKV: Tensor | None) -> Tensor:
        tokens = (k_THK, k_THK, values_THV, decay_logit_THK, beta_logit_TH)
        return chunk_kda(*tokens, gate, state_NHKV=state_NHKV, cu_seqlens=cu_seqlens)[1]

    v = at_least_float32(v_THV)
    start = torch.eye(K, K + V, dtype=v.dtype, device=v.device).expand(num_segments, H, -1, -1)
    if pick("kda", k_THK, name="k_THK", channels=(K, V), bounded=gate.lower_bound is not None) == "triton":
        return Segment(leaving(torch.zeros_like(k_THK), start[..., :K]), leaving(v_THV, None))
    columns = torch.cat([v.new_zeros(num_tokens, H, K), v], 2)
    return Segment(*leaving(columns, start).split([K, V], 3))


@at_full_precision
def compose(first: Segment, then: Segment) -> Segment:
    """The map of `first` followed by `then`."""
    return Segment(then.transition_NHKK @ first.transition_NHKK, then.apply(first.written_NHKV))


def entering_states(segments: Segment, state_HKV: Tensor) -> Tensor:
    """States entering each of N consecutive segments of one sequence [N, H, K, V], by a prefix scan of depth log2 N.

    `state_HKV` enters the first one.
    """
    count, reach, whole = len(segments.written_NHKV), 1, segments
    while reach < count:
        earlier = Segment(whole.transition_NHKK[:-reach], whole.written_NHKV[:-reach])
        later = Segment(whole.transition_NHKK[reach:], whole.written_NHKV[reach:])
        joined = compose(earlier, later)
        whole = Segment(
            torch.cat([whole.transition_NHKK[:reach], joined.transition_NHKK]),
            torch.cat([whole.written_NHKV[:reach], joined.written_NHKV]),
        )
        reach *= 2
    leaving_NHKV = whole.apply(state_HKV)
    return torch.cat([state_HKV[None], leaving_NHKV[:-1]])[:count]
