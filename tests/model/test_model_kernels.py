"""A K3 whose KDA layers run the kernels, in Triton's interpreter, against the same model by definition."""

from __future__ import annotations

import pytest
import torch
from small_models import random_batch, small_model
from torch import Tensor

from openk3.inputs.packed import Packed
from openk3.model.k3 import K3
from openk3.ops.kda import decode, fused_backward


@pytest.fixture(scope="module")
def model() -> K3:
    """Float32, one KDA layer with two heads of 16."""
    return K3.build(small_model(), seed=1)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Every operation with kernels uses them."""
    monkeypatch.setenv("OPENK3_BACKEND", "triton")
    return monkeypatch


def close(got: Tensor, want: Tensor, tolerance: float) -> None:
    """Relative to the size of the whole."""
    assert float((got - want).norm()) <= tolerance * float(want.norm())


def by_definition(model: K3, packed: Packed) -> tuple[Tensor, list[Tensor]]:
    """Logits, and the gradients of the loss."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENK3_BACKEND", "reference")
        return logits_and_gradients(model, packed)


def logits_and_gradients(model: K3, packed: Packed) -> tuple[Tensor, list[Tensor]]:
    """Logits, and the gradients of the loss of every parameter that has one."""
    logits = model(packed).detach()
    model.zero_grad()
    model.loss(packed).total.backward()
    return logits, [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_logits_and_gradients(model: K3, kernels: pytest.MonkeyPatch) -> None:
    """Two packed sequences that end inside a tile: forward and backward through the kernels."""
    called = []
    run = fused_backward.fused_kda
    kernels.setattr(fused_backward, "fused_kda", lambda *a, **k: called.append(1) or run(*a, **k))
    packed = random_batch(0, (37, 3))
    want = by_definition(model, packed)
    assert not called
    got = logits_and_gradients(model, packed)
    assert called
    close(got[0], want[0], 1e-5)
    assert len(got[1]) == len(want[1]) > 20
    for a, b in zip(got[1], want[1]):
        close(a, b, 1e-4)


def test_cache_prefill_and_decode(model: K3, kernels: pytest.MonkeyPatch) -> None:
    """Prefill in pieces, then single tokens by the decode kernel; also from a snapshot, twice."""
    steps = []
    run = decode.decode_kda
    kernels.setattr("openk3.model.kda.decode_kda", lambda *a, **k: steps.append(1) or run(*a, **k))
    ids = [random_batch(3, (9, 7)).token_ids_T[:9], random_batch(4, (9, 7)).token_ids_T[9:]]
    whole = by_definition(model, Packed.join(ids))[0].split([9, 7])
    cache = model.new_cache(2)

    def feed(*spans: slice) -> tuple[Tensor, ...]:
        parts = [x[span] for x, span in zip(ids, spans)]
        return model(Packed.join(parts), cache).split([len(part) for part in parts])

    for first, second in ((slice(0, 5), slice(0, 4)), (slice(5, 7), slice(4, 4))):
        for got, want, span in zip(feed(first, second), whole, (first, second)):
            torch.testing.assert_close(got, want[span], rtol=1e-4, atol=1e-5)
    assert steps == []
    saved = cache.snapshot()
    for _ in range(2):
        cache.restore(saved)
        for step in range(2):
            spans = slice(7 + step, 8 + step), slice(4 + step, 5 + step)
            for got, want, span in zip(feed(*spans), whole, spans):
                torch.testing.assert_close(got, want[span], rtol=1e-4, atol=1e-5)
    assert len(steps) == 4


def test_a_step_that_fails_changes_nothing(model: K3, kernels: pytest.MonkeyPatch) -> None:
    """The decode kernel writes beside what is committed: after an error behind it the same token gives the same."""
    packed, token = random_batch(5, (6,)), Packed.join([torch.tensor([7])])
    cache, fresh = model.new_cache(1), model.new_cache(1)
    with kernels.context() as patch:
        patch.setenv("OPENK3_BACKEND", "reference")  # what comes before is not at stake
        for each in (cache, fresh):
            model(packed, each)
    with kernels.context() as patch:
        patch.setattr(type(model.layers[1].mixer), "forward", lambda *a, **k: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(token, cache)
    assert cache.lengths == [6]
    assert torch.equal(model(token, cache), model(token, fresh))
