"""An engine whose decoding steps run by kernels, in Triton's interpreter, on states and latents that lie in pages."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from checked_engine import greedy
from engine_model import cache_config, engine_model, prompt

from openk3.config.serve import EngineConfig, PageShape
from openk3.engine.engine import Engine
from openk3.model.mla import GatedMLA
from openk3.ops.kda import decode_kernel
from openk3.ops.mla import latent_decode


def test_steps_by_kernel_beside_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities as by the definition: over two pages, and with a prompt in the same pass."""
    model, launched = engine_model(torch.float32), []
    shape = PageShape.of(model.config, page_tokens=4, hash_tokens=2, value_bytes=4)
    config = EngineConfig(dataclasses.replace(cache_config(40, checkpoint_pages=0), pages=shape), 16)

    def answers() -> list[float]:
        one = Engine(model, config)
        first = one.submit(greedy(prompt(6), 2))
        while not first.tokens:
            one.step()
        second = one.submit(greedy(prompt(4, 1), 1))
        return [*first.result().logprobs, *second.result().logprobs]

    def watch(kernels: pytest.MonkeyPatch, module: Any, name: str) -> None:
        run = getattr(module, name)
        kernels.setattr(module, name, lambda *args, **options: launched.append(name) or run(*args, **options))

    want = answers()
    with monkeypatch.context() as kernels:
        for where in ("engine.host_step", "model.kda", "ops.kda.decode", "ops.mla.reference"):
            kernels.setattr(f"openk3.{where}.pick", lambda *args, **options: "triton")
        kernels.setattr(GatedMLA, "expanded", expanded_by_definition(GatedMLA.expanded))
        watch(kernels, decode_kernel, "sizes")
        watch(kernels, latent_decode.LatentPages, "of_pages")
        got = answers()
    assert launched.count("sizes") == 3  # of three KDA layers, for the one step
    assert launched.count("of_pages") >= 2  # and for pieces of prompts that are short beside their past
    assert got == pytest.approx(want, abs=1e-4)


def expanded_by_definition(expanded: Any) -> Any:
    """Prompts of an MLA layer without kernels, which take long here."""

    def run(*args: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("openk3.ops.mla.reference.pick", lambda *a, **k: "reference")
            return expanded(*args)

    return run
