"""FewSteps: whole steps of one token by kernels that read depth themselves, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest
import torch
from tiny_model import tiny_config, tiny_model
from torch import Tensor

from openk3.model import few_step
from openk3.model.decoder import Decoder
from openk3.model.k3 import K3
from openk3.model.layer import Layer
from openk3.ops.few import attend_kernel


@pytest.fixture
def narrow() -> K3:
    """In float32, weights that are multiplied by one input behind one another."""
    wide = tiny_model(tiny_config(3, vision=False))
    model = K3.empty(wide.config).eval()
    model.load_state_dict(wide.state_dict())
    return model


def test_steps(narrow: K3, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of two steps are those of the definition, tokens that a slot has seen included."""
    ids = [[5], [9]]
    decoder = Decoder(narrow, slots=2, max_tokens=8)
    want = [decoder.step([1], step).clone() for step in ids]
    monkeypatch.setenv("OPENK3_BACKEND", "triton")
    monkeypatch.setattr(attend_kernel, "RUNS", 4)
    ran = []
    real = few_step.FewSteps.run
    monkeypatch.setattr(few_step.FewSteps, "run", lambda self, caches: (ran.append(1), real(self, caches))[1])
    decoder = Decoder(narrow, slots=2, max_tokens=8)
    for step, expected in zip(ids, want):
        torch.testing.assert_close(decoder.step([1], step), expected, rtol=1e-4, atol=1e-5)
    assert len(ran) == len(ids)


def test_whose_layers_are_taken(narrow: K3, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain ones; where somebody has hooked himself in or put another part in, modules are called as they are."""
    monkeypatch.setenv("OPENK3_BACKEND", "triton")
    cache, x_ND = Decoder(narrow, slots=1, max_tokens=8).cache, torch.zeros(1, 32)
    layers = [cast(Layer, layer) for layer in narrow.layers]

    def taken(x_ND: Tensor = x_ND, caches: Sequence[object] = cache.layers) -> bool:
        with torch.no_grad():
            return few_step.few_steps(x_ND, layers, 4, caches) is not None

    assert taken()
    assert not taken(torch.zeros(3, 32))
    assert not taken(caches=narrow.new_cache(1).layers)
    handle = layers[1].ffn.register_forward_hook(lambda *given: None)
    assert not taken()
    handle.remove()
    assert taken()
    layers[0].mixer.forward = layers[0].mixer.forward
    assert not taken()
