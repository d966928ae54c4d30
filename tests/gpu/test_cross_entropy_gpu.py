"""Head and loss by kernels on a GPU: against float64, chunks, ignored labels, and more than 2^31 logits."""

from __future__ import annotations

import pytest
import torch
from kda_kernel_checks import poisoned_memory
from test_cross_entropy_kernel import apart, definition, logprobs_and_gradients, loss_and_gradients
from torch import Tensor

from openk3.ops.cross_entropy import IGNORED, linear_cross_entropy

pytestmark = pytest.mark.gpu


def draw(T: int, D: int, V: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, a head for logits of a standard deviation of 2, and labels of which a third are ignored."""
    generator = torch.Generator("cuda").manual_seed(T + V)
    h, weight = (torch.randn(n, D, generator=generator, device="cuda") for n in (T, V))
    labels_T = torch.randint(V, (T,), generator=generator, device="cuda")
    labels_T[1::3] = IGNORED
    return h.to(dtype), (weight * 2 * D**-0.5).to(dtype), labels_T


CASES = [(1000, 512, 163_840, 384), (1, 64, 32_768, None), (777, 256, 5001, 128), (64, 128, 7, None)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_float64(
    case: tuple[int, int, int, int | None], dtype: torch.dtype, measured: list[tuple[str, str, dict[str, float]]]
) -> None:
    """Loss, log-probabilities, entropies and gradients."""
    *shape, chunk = case
    h, weight, labels_T = draw(*shape, dtype)
    limit = 1e-2 if dtype == torch.bfloat16 else 2e-5
    for name, function, rest in (
        ("loss", loss_and_gradients, (labels_T, chunk)),
        ("rl", logprobs_and_gradients, (labels_T.clamp_min(0), chunk, "pe")),
    ):
        pairs = zip(function(h, weight, *rest), definition(function, h, weight, *rest))
        found = {str(n): apart(got, want) for n, (got, want) in enumerate(pairs)}
        measured.append(("head", f"{name} {case} {dtype}", found))
        assert max(found.values()) < limit, name


def test_same_bits_and_ignored_labels() -> None:
    """Every run, amid NaN; only ignored labels and no token at all give zeros."""
    h, weight, labels_T = draw(700, 256, 20_000)
    want = loss_and_gradients(h, weight, labels_T, 256)
    with poisoned_memory():
        assert all(torch.equal(a, b) for a, b in zip(loss_and_gradients(h, weight, labels_T, 256), want))
        nothing = loss_and_gradients(h, weight, torch.full_like(labels_T, IGNORED), None)
        nothing += loss_and_gradients(h[:0], weight, labels_T[:0], None)
    assert not any(x.any() for x in nothing) and not want[1][1::3].any()


def test_a_label_outside_the_vocabulary() -> None:
    """NaN, and no memory fault."""
    h, weight, labels_T = draw(100, 64, 1000)
    labels_T[50] = 1000
    loss, grad_h, grad_weight = loss_and_gradients(h, weight, labels_T, None)
    assert loss.isnan() and grad_h[50].isnan().all() and grad_h[:50].isfinite().all() and grad_weight.isnan().any()


def test_many_logits() -> None:
    """A chunk of more than 2^31 logits: its last tokens give what they give alone."""
    h, weight, labels_T = draw(14_000, 64, 163_840)
    leaf = h.clone().requires_grad_()
    loss, count = linear_cross_entropy(leaf, weight, labels_T, chunk=14_000)
    (grad,) = torch.autograd.grad(loss, leaf)
    part = h[-64:].clone().requires_grad_()
    alone, _ = linear_cross_entropy(part, weight, labels_T[-64:])
    (want,) = torch.autograd.grad(alone, part)
    assert loss.isfinite() and count == (labels_T != IGNORED).sum()
    assert apart(grad[-64:], want.double()) < 5e-3
