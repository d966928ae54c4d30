"""What Triton's interpreter does otherwise than a GPU, put right: bfloat16, and loops under NumPy 2.4."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np


def widen(bits: np.ndarray) -> np.ndarray:
    """float32 values of bfloat16 ones, which the interpreter keeps as uint16."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """The nearest bfloat16 values as uint16, ties to even, as GPUs round; a NaN stays one."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16).reshape(values.shape)


def repair() -> None:
    """Change the interpreter of this process; kernels may be defined before or after."""
    interpreter = import_module("triton.runtime.interpreter")
    tl = import_module("triton.language")
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    cast, dot, patch_tensor = builder.cast_impl, builder.create_dot, interpreter._patch_lang_tensor

    def cast_impl(self: Any, source: Any, kind: Any) -> Any:
        """Rounds to bfloat16, where the original cuts digits off."""
        match source.dtype.scalar, kind.scalar:
            case tl.bfloat16, tl.float32:
                return handle(widen(source.data), tl.float32)
            case tl.float32, tl.bfloat16:
                return handle(narrow(source.data), tl.bfloat16)
        return cast(self, source, kind)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        """Multiplies bfloat16 values, where the original multiplies the integers that hold them."""
        wide = [handle(widen(x.data), tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)]
        return dot(self, *wide, *rest)

    def patch(tensor: Any, scope: Any) -> None:
        """Takes a scalar, an array of one value, as a number of rounds; NumPy does so only without dimensions."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    builder.cast_impl, builder.create_dot, interpreter._patch_lang_tensor = cast_impl, create_dot, patch
