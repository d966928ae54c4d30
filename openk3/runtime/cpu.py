"""Settings of this process that make float32 training on a CPU about twice as fast, each checked before it is kept.

Matrix products: torch gives float32 products on a CPU to MKL, which uses 8-wide vectors on processors that are not
Intel's. oneDNN uses the widest there are, but torch only asks it for float32 products if lower precision is allowed.
Where the processor has no low-precision path for them, oneDNN then computes in full float32 all the same; where it has
one, the result is rounded. So the permission is given, a few products are compared with float64, and it is taken back
if they are not exact to float32.

Memory: training allocates and frees the same megabytes over and over. glibc returns them to the system each time, and
fetching them again costs a page fault per 4 KiB, which can be a third of the run time.
"""

import ctypes
import sys
from typing import Any

import torch

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


def tune_cpu() -> dict[str, bool]:
    """Apply the settings that help here; which ones hold: {"onednn_float32": ..., "keep_memory": ...}."""
    return {"onednn_float32": allow_onednn_float32(), "keep_memory": keep_memory()}


def allow_onednn_float32() -> bool:
    """Let oneDNN compute float32 matrix products if it is exact to float32 on this processor; whether it now does."""
    if not torch.backends.mkldnn.is_available():
        return False
    matmul: Any = torch.backends.mkldnn.matmul  # pyrefly: ignore[missing-attribute]  (made when the module loads)
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    if _products_are_float32():
        return True
    matmul.fp32_precision = before
    return False


def _products_are_float32() -> bool:
    """Whether products of several forms agree with float64 to float32 rounding; bfloat16's would be 2^-9 off."""
    generator = torch.Generator().manual_seed(0)
    for batch, rows, inner, columns in ((1, 256, 512, 256), (1, 2048, 64, 96), (8, 32, 64, 48), (64, 16, 128, 128)):
        a = torch.randn(batch, rows, inner, generator=generator)
        b = torch.randn(batch, inner, columns, generator=generator)
        exact, size = a.double() @ b.double(), a.double().abs() @ b.double().abs()
        flipped = b.mT.contiguous()
        plain = torch.stack([torch.nn.functional.linear(rows, columns) for rows, columns in zip(a, flipped)])
        for product in (torch.bmm(a, b), torch.bmm(a, flipped.mT), plain):
            if ((product.double() - exact).abs() > 2e-6 * size).any():
                return False
    return True


def keep_memory() -> bool:
    """Make glibc keep freed memory in the process; False where the C library has no such setting."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((_M_MMAP_THRESHOLD, 32 << 20), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 64 << 20))
    held = [mallopt(name, value) == 1 for name, value in settings]
    return all(held)
