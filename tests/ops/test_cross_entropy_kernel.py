"""Head and loss by kernels in Triton's interpreter, against the definition in float64."""

from __future__ import annotations

import math

import pytest
import torch
from op_checks import Watch, random
from torch import Tensor

from openk3.ops import cross_entropy_fused as fused
from openk3.ops.cross_entropy import IGNORED, linear_cross_entropy, token_logprobs


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The public calls run the kernels."""
    monkeypatch.setenv("OPENK3_BACKEND", "triton")


def inputs(tokens: int, vocab: int, dtype: torch.dtype, width: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """(hidden states, head weight, labels of which a third are ignored)."""
    labels_T = torch.randint(vocab, (tokens,), generator=torch.Generator().manual_seed(3))
    labels_T[1::3] = IGNORED
    return random(tokens, width, seed=1, dtype=dtype), random(vocab, width, seed=2, dtype=dtype), labels_T


def loss_and_gradients(h: Tensor, weight: Tensor, labels_T: Tensor, chunk: int | None) -> list[Tensor]:
    """Sum, and gradients of a tenth of it."""
    leaves = [x.clone().requires_grad_() for x in (h, weight)]
    loss_sum, count = linear_cross_entropy(*leaves, labels_T, chunk=chunk)
    assert count == (labels_T != IGNORED).sum()
    return [loss_sum.detach(), *torch.autograd.grad(loss_sum * 0.1, leaves)]


def logprobs_and_gradients(h: Tensor, weight: Tensor, ids_T: Tensor, chunk: int | None, used: str) -> list[Tensor]:
    """Log-probabilities and entropies, and gradients of a combination of those that are used."""
    leaves = [x.clone().requires_grad_() for x in (h, weight)]
    results = token_logprobs(*leaves, ids_T, chunk=chunk)
    factors = (random(len(ids_T), seed=seed).to(results[0]) for seed in (4, 5))
    loss = sum((x * factor).sum() for x, factor, name in zip(results, factors, ("p", "e")) if name in used)
    return [*(x.detach() for x in results), *torch.autograd.grad(loss, leaves)]


def definition(function: object, h: Tensor, weight: Tensor, *rest: object) -> list[Tensor]:
    """The same in float64 by the PyTorch path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENK3_BACKEND", "reference")
        return function(h.double(), weight.double(), *rest)  # type: ignore[operator]


def apart(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm."""
    return float((got.double() - want).norm() / want.norm().clamp_min(1e-30))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "vocab", "chunk"), [(7, 9000, 3), (5, 64, None), (4, 33, 1), (1, 1, None)])
def test_equals_the_definition(tokens: int, vocab: int, chunk: int | None, dtype: torch.dtype) -> None:
    """Sum, log-probabilities, entropies and gradients; vocabularies that fit vectors and that do not; any chunk."""
    h, weight, labels_T = inputs(tokens, vocab, dtype)
    # Logits are rounded to the model's dtype: by 2^-9 of about 10 nats at most.
    limit = {torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    for function, rest in (
        (loss_and_gradients, (labels_T, chunk)),
        (logprobs_and_gradients, (labels_T.clamp_min(0), chunk, "pe")),
    ):
        for got, want in zip(function(h, weight, *rest), definition(function, h, weight, *rest)):
            assert got.dtype in (torch.float32, dtype)
            assert apart(got, want) < limit or (got - want).abs().max() < 1e-12


@pytest.mark.parametrize("used", ["p", "e"])
def test_one_result_alone(used: str) -> None:
    """A loss of the log-probabilities or of the entropies only."""
    h, weight, labels_T = inputs(6, 40, torch.float32)
    ids_T = labels_T.clamp_min(0)
    want = definition(logprobs_and_gradients, h, weight, ids_T, None, used)
    for got, exact in zip(logprobs_and_gradients(h, weight, ids_T, None, used), want):
        assert apart(got, exact) < 5e-6


def test_extreme_logits() -> None:
    """Far apart, equal, and with a label far ahead: no overflow, and the small loss of a sure label is kept."""
    weight = torch.tensor([[1.0], [0.0], [-1.0]])
    logprob_T, entropy_T = token_logprobs(
        torch.tensor([[2e4], [0.0], [2e4], [12.0]]), weight, torch.tensor([1, 2, 0, 0])
    )
    assert logprob_T[:3].tolist() == pytest.approx([-2e4, -math.log(3), 0], rel=1e-6)
    assert entropy_T[:3].tolist() == pytest.approx([0, math.log(3), 0], rel=1e-6)
    assert float(logprob_T[3]) == pytest.approx(-math.exp(-12), rel=1e-2)
    h, weight = random(3, 4, seed=1).float() * 300, random(50, 4, seed=2).float() * 300
    for got, want in zip(
        logprobs_and_gradients(h, weight, torch.tensor([0, 1, 2]), None, "pe"),
        definition(logprobs_and_gradients, h, weight, torch.tensor([0, 1, 2]), None, "pe"),
    ):
        assert apart(got, want) < 1e-5 or (got - want).abs().max() < 1e-5


@pytest.mark.parametrize("labels", [[], [IGNORED] * 5])
def test_nothing_to_predict(labels: list[int]) -> None:
    """No token, or every label ignored: sum 0, gradients zero and not NaN, in memory that held NaN."""
    h, weight, _ = inputs(len(labels), 9, torch.bfloat16)
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        got = loss_and_gradients(h, weight, torch.tensor(labels, dtype=torch.int64), None)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not any(x.any() for x in got)
    assert token_logprobs(h[:0], weight, torch.zeros(0, dtype=torch.int64))[0].shape == (0,)


def test_a_label_outside_the_vocabulary_is_seen() -> None:
    """Nothing waits for the device to refuse it, and nothing outside is read or written: sum and gradients are NaN."""
    h, weight, labels_T = inputs(5, 12, torch.float32)
    for bad in (12, -1, 2**40):
        labels_T[2] = bad
        loss, grad_h, grad_weight = loss_and_gradients(h, weight, labels_T, None)
        assert (
            loss.isnan() and grad_h[2].isnan().all() and grad_h[[0, 3]].isfinite().all() and grad_weight.isnan().all()
        )
        assert token_logprobs(h, weight, labels_T.clamp_min(-1))[0][2].isnan()


def test_logits_exist_in_one_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor is larger than a chunk of logits; chunks are equal parts; nothing is made that is not asked for."""
    monkeypatch.setattr(fused, "CHUNK_LOGITS", 256 * 40)
    assert fused.chunk_tokens(600, 40, None) == 256 and fused.chunk_tokens(300, 40, None) == 256
    assert fused.chunk_tokens(260, 40, None) == 256 and fused.chunk_tokens(100, 40, None) == 128
    monkeypatch.setattr(fused, "_MULTIPLE", 8)
    monkeypatch.setattr(fused, "CHUNK_LOGITS", 16 * 40)
    h, weight, labels_T = inputs(120, 40, torch.float32)
    with Watch() as watch:
        linear_cross_entropy(h.requires_grad_(), weight.requires_grad_(), labels_T)
    # The interpreter looks at memory as bytes, 4 for each value.
    assert watch.largest <= 4 * 16 * 40 < 120 * 40 and watch.calls["mm"] == 8
    names = [name for name in watch.calls if name.startswith("addmm")]
    assert sum(watch.calls[name] for name in names) == 16
    weight = weight.detach()
    with Watch() as watch, torch.no_grad():
        linear_cross_entropy(h, weight, labels_T)
    assert watch.calls["mm"] == 8 and not set(names) & set(watch.calls)
    with Watch() as watch:
        linear_cross_entropy(h, weight, labels_T)
    assert sum(watch.calls.get(name, 0) for name in names) == 8
    with pytest.raises(ValueError, match="chunk"):
        linear_cross_entropy(h, weight, labels_T, chunk=0)


def test_backward_twice_gives_the_same() -> None:
    """A kept graph may be walked again; chunks and neighbours change no row."""
    h, weight, labels_T = inputs(6, 40, torch.bfloat16)
    leaf = h.clone().requires_grad_()
    loss, _ = linear_cross_entropy(leaf, weight, labels_T)
    first, second = (torch.autograd.grad(loss * 0.5, leaf, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    alone = h[2:3].clone().requires_grad_()
    (grad,) = torch.autograd.grad(linear_cross_entropy(alone, weight, labels_T[2:3])[0] * 0.5, alone)
    assert torch.equal(grad[0], first[2])
