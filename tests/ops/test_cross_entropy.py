"""The chunked head and loss against torch's cross-entropy on whole logits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import Watch, random
from torch import Tensor

from openk3.ops import cross_entropy
from openk3.ops.cross_entropy import IGNORED, linear_cross_entropy, token_logprobs

CHUNKS = (None, 1, 3, 7, 100)


def case(tokens: int, vocab: int, width: int = 6, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """(hidden states, head weight, labels of which a third are ignored)."""
    labels_T = torch.randint(vocab, (tokens,), generator=torch.Generator().manual_seed(3))
    labels_T[1::3] = IGNORED
    return (
        random(tokens, width, seed=1, dtype=dtype, grad=True),
        random(vocab, width, seed=2, dtype=dtype, grad=True),
        labels_T,
    )


@settings(max_examples=40)
@given(tokens=st.integers(0, 12), vocab=st.integers(1, 9), chunk=st.sampled_from(CHUNKS), keep=st.booleans())
def test_equals_whole_logits(tokens: int, vocab: int, chunk: int | None, keep: bool) -> None:
    """Sum, count and gradients, for any chunk, with and without ignored labels; label 0 is a label like others."""
    h_TD, weight_VD, labels_T = case(tokens, vocab)
    if keep:
        labels_T = labels_T.clamp_min(0)
    loss_sum, count = linear_cross_entropy(h_TD, weight_VD, labels_T, chunk=chunk)
    want = torch.nn.functional.cross_entropy(h_TD @ weight_VD.T, labels_T, reduction="sum")
    torch.testing.assert_close(loss_sum, want, rtol=1e-12, atol=1e-12)
    assert count.dtype == torch.int64 and count == (labels_T != IGNORED).sum()
    for got, exact in zip(*(torch.autograd.grad(x * 0.1, (h_TD, weight_VD)) for x in (loss_sum, want))):
        torch.testing.assert_close(got, exact, rtol=1e-11, atol=1e-12)


def test_gradcheck() -> None:
    """The hand-written gradients are the derivatives, those of log-probabilities and entropies too."""
    h_TD, weight_VD, labels_T = case(7, 11)
    ids_T = labels_T.clamp_min(0)
    inputs = (h_TD, weight_VD)
    assert torch.autograd.gradcheck(lambda h, w: linear_cross_entropy(h, w, labels_T, chunk=2)[0], inputs)
    assert torch.autograd.gradcheck(lambda h, w: token_logprobs(h, w, ids_T, chunk=2), inputs)
    for index in (0, 1):
        assert torch.autograd.gradcheck(lambda h, w, i=index: token_logprobs(h, w, ids_T)[i], inputs)


@pytest.mark.parametrize("labels", [[], [IGNORED] * 5])
def test_nothing_to_predict(labels: list[int]) -> None:
    """No token, or every label ignored: sum 0, count 0, gradients zero and not NaN."""
    h_TD, weight_VD = random(len(labels), 4, seed=1, grad=True), random(9, 4, seed=2, grad=True)
    loss_sum, count = linear_cross_entropy(h_TD, weight_VD, torch.tensor(labels, dtype=torch.int64))
    assert loss_sum == 0 and count == 0
    loss_sum.backward()
    for x in (h_TD, weight_VD):
        assert x.grad is not None and (x.grad == 0).all()


@pytest.mark.parametrize("chunk", [10, None])
def test_logits_never_exist_whole(chunk: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of the forward or backward pass is larger than one chunk of logits or the hidden states."""
    monkeypatch.setattr(cross_entropy, "_CHUNK_LOGITS", 64 * 20)
    monkeypatch.setattr(cross_entropy, "_CHUNK_TOKENS", 5)
    h_TD, weight_VD, labels_T = case(200, 64, width=8)
    ids_T = labels_T.clamp_min(0)
    with Watch() as watch:
        linear_cross_entropy(h_TD, weight_VD, labels_T, chunk=chunk)[0].backward()
        sum(x.sum() for x in token_logprobs(h_TD, weight_VD, ids_T, chunk=chunk)).backward()
    assert watch.largest == 200 * 8


def test_ignored_positions_are_not_computed() -> None:
    """With 4 of 400 labels left there is one product over 4 rows, and its two gradients."""
    h_TD, weight_VD, labels_T = case(400, 16)
    labels_T[4:] = IGNORED
    with Watch() as watch:
        linear_cross_entropy(h_TD, weight_VD, labels_T, chunk=2)
    assert watch.calls["mm"] + watch.calls.get("addmm_", 0) == 2 * 3


def test_no_gradient_work_without_gradients() -> None:
    """Evaluation computes logits only."""
    h_TD, weight_VD, labels_T = case(6, 16)
    with torch.no_grad(), Watch() as watch:
        linear_cross_entropy(h_TD, weight_VD, labels_T)
    assert watch.calls["mm"] == 1 and "addmm_" not in watch.calls
    with Watch() as watch:
        linear_cross_entropy(h_TD, weight_VD.detach(), labels_T)[0].backward()
    assert watch.calls["mm"] == 2 and "addmm_" not in watch.calls


def test_dtypes() -> None:
    """float32 sums for bfloat16 models, close to float64; gradients in the inputs' dtypes."""
    narrow = case(50, 40, width=32, dtype=torch.bfloat16)
    loss_sum, _ = linear_cross_entropy(*narrow, chunk=9)
    logprob_T, entropy_T = token_logprobs(narrow[0], narrow[1], narrow[2].clamp_min(0))
    assert loss_sum.dtype == logprob_T.dtype == entropy_T.dtype == torch.float32
    grads = torch.autograd.grad(loss_sum, narrow[:2])
    wide = [x.detach().double().requires_grad_() for x in narrow[:2]]
    exact, _ = linear_cross_entropy(*wide, narrow[2])
    assert exact.dtype == torch.float64
    torch.testing.assert_close(loss_sum.double(), exact, rtol=1e-2, atol=0)
    for got, want in zip(grads, torch.autograd.grad(exact, wide)):
        assert got.dtype == torch.bfloat16
        assert (got.double() - want).norm() < 2e-2 * want.norm()


def test_backward_twice() -> None:
    """The stored gradients survive a backward pass and scale with what comes from above."""
    h_TD, weight_VD, labels_T = case(8, 5)
    loss_sum, _ = linear_cross_entropy(h_TD, weight_VD, labels_T)
    first = torch.autograd.grad(loss_sum, h_TD, retain_graph=True)[0]
    second = torch.autograd.grad(loss_sum * 3, h_TD)[0]
    torch.testing.assert_close(second, 3 * first)


def test_extreme_logits() -> None:
    """A label far below the largest logit costs its distance, finite; a sure label costs nothing."""
    h_TD = torch.tensor([[1e4], [1e4], [-1e4]], requires_grad=True)
    weight_VD = torch.tensor([[1.0], [-1.0], [0.0]])
    loss_sum, _ = linear_cross_entropy(h_TD, weight_VD, torch.tensor([1, 0, 1]))
    assert loss_sum == 2e4
    loss_sum.backward()
    assert h_TD.grad is not None and h_TD.grad.tolist() == [[2.0], [0.0], [0.0]]
    logprob_T, entropy_T = token_logprobs(h_TD, weight_VD, torch.tensor([1, 0, 1]))
    assert logprob_T.tolist() == [-2e4, 0, 0] and entropy_T.tolist() == [0, 0, 0]


def test_logprobs_by_definition() -> None:
    """log softmax at the id; entropy in nats, that of the uniform distribution being log V."""
    h_TD, weight_VD, labels_T = case(9, 7)
    ids_T = labels_T.clamp_min(0)
    logprob_T, entropy_T = token_logprobs(h_TD, weight_VD, ids_T, chunk=4)
    log_probs_TV = torch.log_softmax(h_TD @ weight_VD.T, -1)
    torch.testing.assert_close(logprob_T, log_probs_TV.gather(1, ids_T.unsqueeze(1)).squeeze(1))
    torch.testing.assert_close(entropy_T, -(log_probs_TV.exp() * log_probs_TV).sum(-1))
    torch.testing.assert_close(-logprob_T.sum(), linear_cross_entropy(h_TD, weight_VD, ids_T)[0])
    uniform_T = token_logprobs(torch.zeros(2, 6), torch.ones(7, 6), torch.tensor([0, 6]))[1]
    torch.testing.assert_close(uniform_T, torch.full((2,), 7.0).log())
    assert token_logprobs(h_TD[:0], weight_VD, ids_T[:0])[0].shape == (0,)


def test_refuses_labels_outside_the_vocabulary() -> None:
    """One line with the label and the vocabulary's size; -100 is no id of a token."""
    h_TD, weight_VD, _ = case(3, 5)
    for bad in (5, -1):
        with pytest.raises(ValueError, match=f"label {bad} lies outside the vocabulary of 5"):
            linear_cross_entropy(h_TD, weight_VD, torch.tensor([0, bad, 1]))
    with pytest.raises(ValueError, match="-100"):
        token_logprobs(h_TD, weight_VD, torch.tensor([0, IGNORED, 1]))
    with pytest.raises(ValueError, match="do not fit"):
        linear_cross_entropy(h_TD, weight_VD, torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="chunk"):
        linear_cross_entropy(h_TD, weight_VD, torch.tensor([0, 1, 2]), chunk=0)
