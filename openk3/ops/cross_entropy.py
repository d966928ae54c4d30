"""Language-model head and loss in token chunks, so that logits for all tokens never exist at once."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from openk3.ops.backend import pick

IGNORED = -100
# Logits that exist at once when the caller names no chunk (float32: 8 MiB), but no fewer tokens than _CHUNK_TOKENS.
_CHUNK_LOGITS = 1 << 21
_CHUNK_TOKENS = 256


def linear_cross_entropy(
    h_TD: torch.Tensor, weight_VD: torch.Tensor, labels_T: torch.Tensor, *, chunk: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of cross-entropies, int64 count) of the labels that are not -100, logits being `h @ weight.T`.

    `labels_T` [T] int64 holds the label of position t itself (already shifted). Logits are computed in the model's
    dtype, `chunk` tokens at a time (default: as many as keep the logits at 2M values, at least 256), everything
    after them in at least float32, which is also the sum's dtype. Ignored positions are not computed at all. The
    gradients of the sum are formed during the forward pass, in at least float32; the backward pass scales them. No
    label left gives (0, 0) and zero gradients.

    On a GPU the pass over the logits is a kernel that leaves their gradient in their place, chunks are larger (1 GiB of
    logits), and nothing waits for the device: ignored positions are computed and count nothing, and a label outside
    the vocabulary makes sum and gradients NaN.

    Raises ValueError if shapes do not fit or (on a CPU) a label lies outside the vocabulary.
    """
    _check_shapes(h_TD, weight_VD, labels_T, chunk)
    need_h, need_weight = (torch.is_grad_enabled() and x.requires_grad for x in (h_TD, weight_VD))
    if _has_kernels(h_TD, weight_VD):
        from openk3.ops.cross_entropy_fused import LinearCrossEntropy, Options

        loss_sum = LinearCrossEntropy.apply(h_TD, weight_VD, labels_T, Options(IGNORED, chunk, need_h, need_weight))
        return loss_sum, (labels_T != IGNORED).sum()
    _check_ids(labels_T, weight_VD.shape[0], ignored=True)
    chunk = _chunk(chunk, weight_VD.shape[0])
    loss_sum = _LinearCrossEntropy.apply(h_TD, weight_VD, labels_T, _Options(chunk, need_h, need_weight))
    return loss_sum, (labels_T != IGNORED).sum()


def token_logprobs(
    h_TD: torch.Tensor, weight_VD: torch.Tensor, ids_T: torch.Tensor, *, chunk: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probability of each token's id [T], entropy of its distribution in nats [T]), both differentiable.

    Logits as in `linear_cross_entropy`; results in at least float32. The backward pass computes the logits again.
    Raises ValueError if shapes do not fit or (on a CPU) an id lies outside the vocabulary; a GPU makes its results NaN.
    """
    _check_shapes(h_TD, weight_VD, ids_T, chunk)
    if _has_kernels(h_TD, weight_VD):
        from openk3.ops.cross_entropy_fused import TokenLogprobs

        return TokenLogprobs.apply(h_TD, weight_VD, ids_T, chunk)
    _check_ids(ids_T, weight_VD.shape[0], ignored=False)
    return _TokenLogprobs.apply(h_TD, weight_VD, ids_T, _chunk(chunk, weight_VD.shape[0]))


class _Options(NamedTuple):
    chunk: int
    need_h: bool
    need_weight: bool


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h_TD: torch.Tensor, weight_VD: torch.Tensor, labels_T: torch.Tensor, options: _Options
    ) -> torch.Tensor:
        counted = (labels_T != IGNORED).nonzero().squeeze(1)
        everything = counted.shape[0] == labels_T.shape[0]
        h, labels = (h_TD, labels_T) if everything else (h_TD[counted], labels_T[counted])
        wide = torch.promote_types(h_TD.dtype, torch.float32)
        grad_h = torch.zeros_like(h_TD, dtype=wide) if options.need_h else None
        grad_weight = torch.zeros_like(weight_VD, dtype=wide) if options.need_weight else None
        total = torch.zeros((), dtype=wide, device=h_TD.device)
        for start in range(0, h.shape[0], options.chunk):
            rows = slice(start, start + options.chunk)
            probs, log_probs = _distribution(h[rows], weight_VD)
            label = labels[rows].unsqueeze(1)
            total -= log_probs.gather(1, label).sum()
            if grad_h is None and grad_weight is None:
                continue
            probs.scatter_add_(1, label, probs.new_full(label.shape, -1))
            grad_logits = probs.to(h_TD.dtype)
            if grad_h is not None:
                grad_h[rows if everything else counted[rows]] = (grad_logits @ weight_VD).to(wide)
            if grad_weight is not None:
                _add_product(grad_weight, grad_logits, h[rows])
        ctx.save_for_backward(*(x for x in (grad_h, grad_weight) if x is not None))
        ctx.dtypes = h_TD.dtype if options.need_h else None, weight_VD.dtype if options.need_weight else None
        return total

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override]  (the decorator hides the name of ctx)
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved = iter(ctx.saved_tensors)
        scaled = [None if dtype is None else (next(saved) * grads[0]).to(dtype) for dtype in ctx.dtypes]
        return *scaled, None, None


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h_TD: torch.Tensor, weight_VD: torch.Tensor, ids_T: torch.Tensor, chunk: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide = torch.promote_types(h_TD.dtype, torch.float32)
        logprob_T, entropy_T = (h_TD.new_empty(ids_T.shape, dtype=wide) for _ in range(2))
        for start in range(0, h_TD.shape[0], chunk):
            rows = slice(start, start + chunk)
            probs, log_probs = _distribution(h_TD[rows], weight_VD)
            logprob_T[rows] = log_probs.gather(1, ids_T[rows].unsqueeze(1)).squeeze(1)
            entropy_T[rows] = -torch.linalg.vecdot(probs, log_probs)
        ctx.save_for_backward(h_TD, weight_VD, ids_T, entropy_T)
        ctx.chunk = chunk
        ctx.set_materialize_grads(False)
        return logprob_T, entropy_T

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override]  (the decorator hides the name of ctx)
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        grad_logprob_T, grad_entropy_T = grads
        h_TD, weight_VD, ids_T, entropy_T = ctx.saved_tensors
        need_h, need_weight = ctx.needs_input_grad[:2]
        if grad_logprob_T is None:
            grad_logprob_T = torch.zeros_like(entropy_T)
        grad_h = torch.empty_like(h_TD) if need_h else None
        grad_weight = torch.zeros_like(weight_VD, dtype=entropy_T.dtype) if need_weight else None
        for start in range(0, h_TD.shape[0], ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            probs, log_probs = _distribution(h_TD[rows], weight_VD)
            by_logprob = grad_logprob_T[rows].unsqueeze(1)
            # d logprob = onehot - p;  d entropy = -p * (log p + entropy)
            if grad_entropy_T is None:
                probs.mul_(-by_logprob)
            else:
                log_probs.add_(entropy_T[rows].unsqueeze(1)).mul_(grad_entropy_T[rows].unsqueeze(1)).add_(by_logprob)
                probs.mul_(log_probs).neg_()
            grad_logits = probs.scatter_add_(1, ids_T[rows].unsqueeze(1), by_logprob).to(h_TD.dtype)
            if grad_h is not None:
                grad_h[rows] = grad_logits @ weight_VD
            if grad_weight is not None:
                _add_product(grad_weight, grad_logits, h_TD[rows])
        return grad_h, None if grad_weight is None else grad_weight.to(weight_VD.dtype), None, None


def _distribution(h_CD: torch.Tensor, weight_VD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(probabilities, log-probabilities) [C, V] in at least float32."""
    logits = (h_CD @ weight_VD.T).to(torch.promote_types(h_CD.dtype, torch.float32))
    probs = logits.softmax(-1)
    # The largest probability is exp(largest logit - log of the sum), so one fused softmax gives both results.
    log_norm = logits.amax(-1, keepdim=True) - probs.amax(-1, keepdim=True).log()
    return probs, logits.sub_(log_norm)


def _add_product(grad_weight: torch.Tensor, grad_logits: torch.Tensor, h_CD: torch.Tensor) -> None:
    if grad_logits.dtype == grad_weight.dtype:
        grad_weight.addmm_(grad_logits.T, h_CD)
    else:
        grad_weight.add_(grad_logits.T @ h_CD)


def _has_kernels(h_TD: torch.Tensor, weight_VD: torch.Tensor) -> bool:
    return h_TD.dtype == weight_VD.dtype and pick("cross_entropy", h_TD) == "triton"


def _chunk(chunk: int | None, vocab: int) -> int:
    return chunk or max(_CHUNK_TOKENS, _CHUNK_LOGITS // vocab)


def _check_shapes(h_TD: torch.Tensor, weight_VD: torch.Tensor, ids_T: torch.Tensor, chunk: int | None) -> None:
    if h_TD.dim() != 2 or ids_T.shape != h_TD.shape[:1] or weight_VD.shape[1:] != h_TD.shape[1:]:
        shapes = ", ".join(str(tuple(x.shape)) for x in (h_TD, weight_VD, ids_T))
        raise ValueError(f"hidden states, head weight, ids: shapes {shapes} do not fit")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk: must be at least 1 token, got {chunk}")


def _check_ids(ids_T: torch.Tensor, vocab: int, *, ignored: bool) -> None:
    outside = (ids_T < 0) | (ids_T >= vocab)
    if ignored:
        outside &= ids_T != IGNORED
    if outside.any():
        raise ValueError(f"label {int(ids_T[outside][0])} lies outside the vocabulary of {vocab}")
