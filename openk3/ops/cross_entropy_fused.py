"""Head and loss by kernels around the library's matrix products: chunks of logits in one buffer, gradients in place."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from openk3.ops.backend import on_device
from openk3.ops.cross_entropy_kernel import logits_kernel, settings
from openk3.ops.launch import start

# Logits of a chunk where the caller names none (bfloat16: 1 GiB): each chunk reads and writes the weight's gradient.
CHUNK_LOGITS = 1 << 29
_MULTIPLE = 128  # of tokens, that matrix products take well
_NO_ID = -(1 << 31)  # ignored where every id is asked for


def chunk_tokens(tokens: int, vocab: int, chunk: int | None) -> int:
    """Tokens of a chunk: `chunk`, or equal parts of no more than CHUNK_LOGITS logits."""
    if chunk is not None:
        return chunk
    most = max(_MULTIPLE, CHUNK_LOGITS // vocab // _MULTIPLE * _MULTIPLE)
    parts = max(1, triton.cdiv(tokens, most))
    return max(1, triton.cdiv(triton.cdiv(tokens, parts), _MULTIPLE) * _MULTIPLE)


class Options(NamedTuple):
    """The ignored label, tokens of a chunk or None, and whose gradients are wanted."""

    ignored: int
    chunk: int | None
    need_h: bool
    need_weight: bool


class LinearCrossEntropy(torch.autograd.Function):
    """Sum of cross-entropies from hidden states, head weight and labels.

    Gradients of the sum are formed in the forward pass, in float32.
    """

    @staticmethod
    def forward(ctx: Any, h_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, options: Options) -> Tensor:
        ignored, chunk, need_h, need_weight = options
        h_TD, labels_T = h_TD.contiguous(), labels_T.contiguous()
        rows = _Rows(h_TD, weight_VD, labels_T, ignored, chunk)
        logprob_T = h_TD.new_empty(len(h_TD), dtype=torch.float32)
        grad_h = torch.empty_like(h_TD, dtype=torch.float32) if need_h else None
        grad_weight = _like_weight(weight_VD, rows) if need_weight else None
        for part in rows.parts():
            logits = rows.logits(part)
            rows.run(logits, part, logprob=logprob_T, gradient=need_h or need_weight)
            rows.add_gradients(logits, part, grad_h, grad_weight)
        ctx.save_for_backward(*(x for x in (grad_h, grad_weight) if x is not None))
        ctx.dtypes = h_TD.dtype if need_h else None, weight_VD.dtype if need_weight else None
        return -logprob_T.sum()

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override]  (the decorator hides the name of ctx)
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = iter(ctx.saved_tensors)
        scaled: list[Tensor | None] = []
        for dtype in ctx.dtypes:
            gradient = None if dtype is None else next(saved)
            # Scaled and rounded in one pass, without a float32 product of the head's size.
            out = None if gradient is None else torch.empty_like(gradient, dtype=dtype)
            scaled.append(out if gradient is None or out is None else torch.mul(gradient, grads[0], out=out))
        return *scaled, None, None


class TokenLogprobs(torch.autograd.Function):
    """(log-probability of each id, entropy) in float32; the backward pass computes the logits again."""

    @staticmethod
    def forward(ctx: Any, h_TD: Tensor, weight_VD: Tensor, ids_T: Tensor, chunk: int | None) -> tuple[Tensor, Tensor]:
        h_TD, ids_T = h_TD.contiguous(), ids_T.contiguous()
        rows = _Rows(h_TD, weight_VD, ids_T, _NO_ID, chunk)
        norm_T, logprob_T, entropy_T = (h_TD.new_empty(len(h_TD), dtype=torch.float32) for _ in range(3))
        for part in rows.parts():
            rows.run(rows.logits(part), part, log_norm=norm_T, logprob=logprob_T, entropy=entropy_T)
        ctx.save_for_backward(h_TD, weight_VD, ids_T, norm_T, entropy_T)
        ctx.chunk = chunk
        ctx.set_materialize_grads(False)
        return logprob_T, entropy_T

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override]  (the decorator hides the name of ctx)
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        h_TD, weight_VD, ids_T, norm_T, entropy_T = ctx.saved_tensors
        need_h, need_weight = ctx.needs_input_grad[:2]
        d_logprob_T, d_entropy_T = (None if grad is None else grad.contiguous() for grad in grads)
        if d_logprob_T is None:
            d_logprob_T = torch.zeros_like(norm_T)
        rows = _Rows(h_TD, weight_VD, ids_T, _NO_ID, ctx.chunk)
        grad_h = torch.empty_like(h_TD) if need_h else None
        grad_weight = _like_weight(weight_VD, rows) if need_weight else None
        known = {"log_norm": norm_T, "entropy": entropy_T, "d_logprob": d_logprob_T, "d_entropy": d_entropy_T}
        for part in rows.parts():
            logits = rows.logits(part)
            rows.run(logits, part, **known, statistics=False, gradient=True)
            rows.add_gradients(logits, part, grad_h, grad_weight)
        return grad_h, None if grad_weight is None else grad_weight.to(weight_VD.dtype), None, None


class _Rows:
    """Hidden states and tokens, cut in chunks, and one buffer for a chunk of logits."""

    def __init__(self, h_TD: Tensor, weight_VD: Tensor, ids_T: Tensor, ignored: int, chunk: int | None) -> None:
        self.h_TD, self.weight_VD, self.ids_T, self.ignored = h_TD, weight_VD, ids_T, ignored
        self.chunk = chunk_tokens(len(h_TD), len(weight_VD), chunk)
        self._buffer = h_TD.new_empty(min(self.chunk, len(h_TD)), len(weight_VD))

    def parts(self) -> list[slice]:
        """The chunks."""
        return [slice(start, min(start + self.chunk, len(self.h_TD))) for start in range(0, len(self.h_TD), self.chunk)]

    def logits(self, part: slice) -> Tensor:
        """Logits of a chunk, in the one buffer."""
        return torch.mm(self.h_TD[part], self.weight_VD.mT, out=self._buffer[: part.stop - part.start])

    def run(
        self, logits: Tensor, part: slice, *, statistics: bool = True, gradient: bool = False, **vectors: Tensor | None
    ) -> None:
        """The kernel over a chunk; `vectors` by its arguments' names, for all tokens."""
        V = logits.shape[1]
        lanes, vector, warps = settings(V, logits.element_size(), gradient)
        names = ("log_norm", "logprob", "entropy", "d_logprob", "d_entropy")
        given = (vectors.get(name) for name in names)
        with on_device(logits):
            start(logits_kernel, len(logits))(
                *(logits, self.ids_T[part], *(None if x is None else x[part] for x in given), V, self.ignored),
                *(lanes, vector, V % (lanes * vector) == 0, statistics, gradient),
                num_warps=warps,
            )

    def add_gradients(self, grad_logits: Tensor, part: slice, grad_h: Tensor | None, grad_w: Tensor | None) -> None:
        """A chunk's share of both gradients, from the gradient of its logits."""
        if grad_h is not None:
            _product(grad_h[part], grad_logits, self.weight_VD, keep=False)
        if grad_w is not None:
            _product(grad_w, grad_logits.mT, self.h_TD[part], keep=part.start > 0)


def _like_weight(weight_VD: Tensor, rows: _Rows) -> Tensor:
    """The float32 sum of the weight's gradients, which the first chunk writes; zeros if there is none."""
    make = torch.empty_like if rows.parts() else torch.zeros_like
    return make(weight_VD, dtype=torch.float32)


def _product(out: Tensor, left: Tensor, right: Tensor, *, keep: bool) -> None:
    """out = left @ right, or out += it if `keep`; added up in float32 where out is."""
    if out.dtype == left.dtype:
        torch.addmm(out, left, right, beta=int(keep), out=out)
    elif out.device.type == "cuda":
        torch.addmm(out, left, right, out_dtype=out.dtype, beta=int(keep), out=out)
    elif keep:
        out.add_(left.to(out.dtype) @ right.to(out.dtype))
    else:
        out.copy_(left.to(out.dtype) @ right.to(out.dtype))
