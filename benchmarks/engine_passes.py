"""Passes of an engine as a benchmark takes them: how long they are, by kind, and what the slowest one does."""

from __future__ import annotations

import cProfile
import io
import pstats
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from openk3.engine.engine import Engine
from openk3.engine.job import Work
from openk3.engine.runner import Results

BEGAN = time.perf_counter()
SPOKEN = 2.0  # seconds between lines of progress


def say(*words: object) -> None:
    """A line, at once."""
    print(*words, f"[{time.perf_counter() - BEGAN:.1f} s]", flush=True)


class Passes:
    """How the passes of one load go: what is printed of them, the slowest one, and when there were enough."""

    def __init__(self, engine: Engine, limit: float, profiled: bool) -> None:
        self._engine, self._limit, self._profiled = engine, limit, profiled
        self.began = self._spoken = time.perf_counter()
        self.count, self.tokens, self.slowest, self.where = 0, 0, 0.0, ""
        self.mixed, self.others = list[tuple[float, float, int]](), list[tuple[float, float, int]]()
        self._launched = 0.0
        self._run = type(engine._loop.runner).run.__get__(engine._loop.runner)
        engine._loop.runner.run = self._launch  # pyrefly: ignore

    def _launch(self, works: Sequence[Work]) -> Results:
        """A pass of the model; when all of it had been launched."""
        results = self._run(works)
        self._launched = time.perf_counter()
        return results

    def step(self) -> list[Any]:
        """One pass; its updates."""
        profile = cProfile.Profile() if self._profiled else None
        loop, began = self._engine._loop, time.perf_counter()
        before = loop.num_computed
        updates = self._engine.step() if profile is None else profile.runcall(self._engine.step)
        ended = time.perf_counter()
        self.count += 1
        tokens, computed = sum(len(update.tokens) for update in updates), loop.num_computed - before
        self.tokens += tokens
        kind = self.mixed if computed > tokens else self.others
        kind.append((ended - began, self._launched - began, computed))
        if ended - began > self.slowest:
            self.slowest = ended - began
            self.where = "" if profile is None else _lines(profile)
        if ended - self._spoken >= SPOKEN:
            self._spoken = ended
            stats = self._engine.stats()
            so_far = f"{self.count} passes, {self.tokens} tokens in {ended - self.began:.1f} s"
            say(f"  {so_far}; slowest {self.slowest * 1e3:.0f} ms; {stats.num_running} run, {stats.num_waiting} wait")
        return updates

    @property
    def is_over(self) -> bool:
        """Whether the load has had its time."""
        return time.perf_counter() - self.began > self._limit

    def row(self) -> dict[str, Any]:
        """Passes with prompts and those without: how many, medians of ms, of ms until all was launched, of tokens."""
        found: dict[str, Any] = {}
        for name, kind in (("with_prompts", self.mixed), ("decoding", self.others)):
            if kind:
                whole, launched, tokens = (median(column) for column in zip(*kind))
                found[name] = (
                    f"{len(kind)} x {whole * 1e3:.2f} ms, launched in {launched * 1e3:.2f}, {tokens:.0f} tokens"
                )
        return found


def _lines(profile: cProfile.Profile) -> str:
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(16)
    return "\n".join(line for line in text.getvalue().splitlines() if line.strip())
