"""Tensor functions: the arithmetic of K3, each a plain PyTorch definition."""

from openk3.ops.kda.chunk import chunk_kda
from openk3.ops.kda.reference import KdaGate, recurrent_kda

__all__ = ["KdaGate", "chunk_kda", "recurrent_kda"]
