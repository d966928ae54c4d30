"""cuDNN's causal attention by way of torch, on request: where it applies, and what it gives up."""

import os

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from openk3.config.model import ConfigError
from openk3.ops.mla.attention_views import Job


def applies(job: Job, q_THK: Tensor, *, return_max: bool) -> bool:
    """Whether cuDNN runs a call in place of the kernels: only with OPENK3_LIBRARY_ATTENTION=1.

    It takes one sequence with as many queries as keys, in 16 bits, on compute capability 9.0 or later, and gives no
    largest scores. Its output is rounded to the inputs' format, which the definition's is not; gradients are sums in an
    order of its own. Raises ConfigError for a value other than 0 and 1.
    """
    choice = os.environ.get("OPENK3_LIBRARY_ATTENTION", "0")
    if choice not in ("0", "1", ""):
        raise ConfigError(f"OPENK3_LIBRARY_ATTENTION={choice}: must be 0 or 1")
    bands = job.bands
    return (
        choice == "1"
        and not return_max
        and len(bands.queries) == 2
        and bands.queries == bands.keys
        and bands.queries[-1] > 0
        and q_THK.device.type == "cuda"
        and q_THK.dtype in (torch.bfloat16, torch.float16)
        and torch.cuda.get_device_capability(q_THK.device) >= (9, 0)
    )


def library_attention(q_THK: Tensor, k_THK: Tensor, v_THV: Tensor, scale: float) -> Tensor:
    """o [T, H, V] in float32, of values that were rounded; K up to 192, V up to 128."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_THK, k_THK, v_THV))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        o_1HTV = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    return o_1HTV.squeeze(0).transpose(0, 1).float()
