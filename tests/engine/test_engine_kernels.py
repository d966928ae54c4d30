"""An engine whose decoding steps run by kernels, in Triton's interpreter, on states that lie in pages."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from checked_engine import greedy
from engine_model import cache_config, engine_model, prompt

from openk3.config.serve import EngineConfig, PageShape
from openk3.engine.engine import Engine
from openk3.ops.kda import decode_kernel


def test_steps_by_kernel_beside_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities as by the definition; a step beside a prompt goes to the kernel too."""
    model, launched = engine_model(torch.float32), []
    shape = PageShape.of(model.config, page_tokens=8, hash_tokens=2, value_bytes=4)
    config = EngineConfig(dataclasses.replace(cache_config(40, checkpoint_pages=0), pages=shape), 16)

    def answers() -> list[float]:
        one = Engine(model, config)
        first = one.submit(greedy(prompt(2), 2))
        one.step()
        second = one.submit(greedy(prompt(3, 1), 1))
        return [*first.result().logprobs, *second.result().logprobs]

    want, sizes = answers(), decode_kernel.sizes
    with monkeypatch.context() as kernels:
        kernels.setenv("OPENK3_BACKEND", "triton")
        for other in ("openk3.ops.short_conv.pick", "openk3.ops.kda.chunk.pick"):  # slow in the interpreter
            kernels.setattr(other, lambda *args, **options: "reference")

        def watched(name: str, *args: Any) -> Any:
            launched.append(name)
            return sizes(name, *args)

        kernels.setattr(decode_kernel, "sizes", watched)
        got = answers()
    assert set(launched) == {"decode_kernel"} and len(launched) >= 3
    assert got == pytest.approx(want, abs=1e-4)
