"""Speculation where things go wrong, and the seam for drafts that read several depths of the backbone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from checked_engine import CheckedEngine, engine, greedy, verify
from engine_model import engine_config, engine_model, prompt
from scripted_draft import ScriptedDraft, take_script
from torch import Tensor

from openk3 import Packed
from openk3.config.model import ConfigError
from openk3.config.serve import CacheConfig, EngineConfig, SpeculationConfig
from openk3.engine.draft import Passed
from openk3.engine.engine import Engine
from openk3.engine.job import Status, Work
from openk3.engine.request import Request, SamplingParams
from openk3.engine.speculation import rows_version
from openk3.model.k3 import K3
from openk3.model.trace import Recorder

SCRIPT = SpeculationConfig("ngram", 4, adaptive=False)


@pytest.mark.parametrize("where", ["propose", "layer", "replay", "carry"])
@pytest.mark.parametrize("interrupt", [False, True])
def test_a_pass_that_fails_anywhere(where: str, interrupt: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """While guessing, between two layers, between the replays of two layers, behind all: everybody starts again with
    the tokens that are known, and whose answer had ended has ended once."""
    one = engine(speculation=SCRIPT, step_tokens=32)
    draft = take_script(one, [True])
    streams = [one.submit(greedy(prompt(6 + n, n), 5 + 7 * n)) for n in range(3)]
    for _ in range(3):
        one.step()
    states = one._loop.runner.cache.states
    owner: Any = {"propose": draft, "layer": states[1], "replay": states[1], "carry": one._loop.runner}[where]
    name = {"propose": "propose", "layer": "read", "replay": "replay", "carry": "settle"}[where]
    run, failed = getattr(owner, name), []

    def failing(*args: Any) -> Any:
        result = run(*args)
        if not failed:
            failed.append(1)
            raise KeyboardInterrupt if interrupt else RuntimeError("out of memory")
        return result

    monkeypatch.setattr(owner, name, failing)
    updates = []
    while any(stream.finish is None for stream in streams):
        try:
            updates += one.step()
        except KeyboardInterrupt:
            one.check()
    assert failed and one.stats().num_failed_passes == (0 if interrupt else 1)
    for stream in streams:
        verify(stream.result(), stream.job)
        assert stream.finish == ("length", None)
    ends = [update.stream for update in [*updates, *one.step()] if update.finish is not None]
    assert len(ends) == len(set(map(id, ends)))
    assert one.is_empty()


def test_a_draft_that_always_fails_ends_requests_one_by_one() -> None:
    """As a model would that fails; a request that nothing is guessed for goes on."""
    one = engine(speculation=SCRIPT)
    draft = take_script(one)

    def broken(works: Sequence[Work]) -> list[list[int]]:
        raise RuntimeError("no draft today")

    draft.propose = broken  # pyrefly: ignore
    streams = [one.submit(greedy(prompt(5, n), count)) for n, count in enumerate((6, 1, 6))]
    finishes = [stream.result().finish for stream in streams]
    assert finishes[1] == ("length", None) and one.is_empty()
    for finish in (finishes[0], finishes[2]):
        assert finish.reason in ("length", "error") and (finish.error is None or "no draft today" in str(finish.error))


def test_new_weights_while_guessing() -> None:
    """The MTP layer is the new model's from the next pass on; prefixes of before are not found."""
    one = engine(speculation=SpeculationConfig("mtp", 3, adaptive=False))
    first = one.submit(greedy(prompt(12), 9))
    for _ in range(3):
        one.step()
    one.load_weights(engine_model(seed=1))
    first.result()
    fresh = one.submit(greedy(prompt(12), 5))
    verify(fresh.result(), fresh.job, engine_model(seed=1))
    assert fresh.result().num_cached == 0 and one.is_empty()
    assert rows_version("7", one.config.speculation) != rows_version("7", SCRIPT) == rows_version("7", None) == "7"


def test_what_cannot_be_configured() -> None:
    """An unknown draft, no guesses at all, a model without an MTP layer: one line that names the field."""
    with pytest.raises(ConfigError, match="draft: must be one of mtp, ngram, got 'eagle'"):
        SpeculationConfig("eagle")
    with pytest.raises(ConfigError, match="most_drafts: must be a whole number of at least 1"):
        SpeculationConfig("mtp", 0)
    model = K3.build(engine_config(num_nextn_predict_layers=0), dtype=torch.float64)
    cache = CacheConfig.of(model.config, 1 << 20, value_bytes=8)
    with pytest.raises(ConfigError, match='draft: "mtp" needs a model with an MTP layer'):
        Engine(model, EngineConfig(cache, speculation=SpeculationConfig("mtp")))
    one = Engine(model, EngineConfig(cache, speculation=SpeculationConfig("ngram", 3)))
    assert len(one.generate([Request(prompt(5), SamplingParams(max_tokens=6))])[0].tokens) == 6


class Depths(ScriptedDraft):
    """What an EAGLE-3 head needs: it sees the backbone at several depths in the pass, and carries what it makes of
    them from each request's last token to its next guesses."""

    def __init__(self, one: CheckedEngine) -> None:
        super().__init__([True, False, True])
        self.trace = Recorder()  # pyrefly: ignore
        self.cache = one._loop.runner.cache
        self.carried: list[tuple[list[int], Tensor]] = []

    def observe(self, passed: Passed) -> Tensor:  # pyrefly: ignore
        """A vector of two depths and the last one."""
        depths = [self.trace.layer_outs[layer] for layer in (0, 2)]
        return sum(depths, passed.h_TD)

    def propose(self, works: Sequence[Work]) -> list[list[int]]:
        """Keep what was carried."""
        for work in works:
            assert work.job.cache is not None and self.cache.carries is not None
            page = work.job.cache.states[0]
            self.carried.append((work.job.token_ids[:-1], self.cache.memory.carries()[page].clone()))
        return super().propose(works)


def test_a_draft_may_read_several_depths() -> None:
    """What is carried is that of the last accepted token, behind hits, refused guesses and a preemption."""
    one = engine(60, speculation=SCRIPT)
    draft = take_script(one)
    depths = Depths(one)
    one._loop.speculation.draft = one._loop.runner.draft = depths  # pyrefly: ignore
    assert draft is not depths
    streams = [one.submit(greedy([*prompt(9), *prompt(3, n)], 9, turn_ends=[9])) for n in range(2)]
    for _ in range(4):
        one.step()
    running = [stream.job for stream in streams if stream.job.status is Status.RUNNING]
    one.scheduler.preempt(running[-1])
    for stream in streams:
        verify(stream.result(), stream.job)
    assert len(depths.carried) >= 6
    for ids, carry_D in depths.carried:
        trace = Recorder()
        with torch.no_grad():
            h_TD = engine_model().hidden(Packed.join([ids]), trace=trace)
        want_D = h_TD[-1] + trace.layer_outs[0][-1] + trace.layer_outs[2][-1]
        torch.testing.assert_close(carry_D, want_D, rtol=0, atol=1e-9)
    assert one.is_empty()
