"""Metrics: counts and times of calls, and the engine's numbers, in Prometheus' text format."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import accumulate

from openk3.engine.stats import Stats
from openk3.serve.answers import Usage

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_ENGINE = {
    "num_waiting": ("gauge", "requests_waiting", "Requests that wait for pages or their turn."),
    "num_running": ("gauge", "requests_running", "Requests that hold pages."),
    "num_pages": ("gauge", "pages", "Pages of the cache."),
    "num_pages_held": ("gauge", "pages_held", "Pages that requests hold."),
    "num_pages_cached": ("gauge", "pages_cached", "Pages that nobody holds, kept for whoever has the same prefix."),
    "num_evicted": ("counter", "evicted_pages_total", "Of those, pages that were given to somebody else."),
    "num_steps": ("counter", "steps_total", "Passes of the engine."),
    "num_failed_passes": ("counter", "failed_passes_total", "Passes that raised an error."),
    "num_computed": ("counter", "computed_tokens_total", "Tokens of prompts and answers that passes computed."),
    "num_asked": ("counter", "asked_tokens_total", "Tokens of requests when they were given pages."),
    "num_hit": ("counter", "hit_tokens_total", "Of those, tokens that came from the cache."),
    "num_preempted": ("counter", "preemptions_total", "Requests that gave way to others."),
    "num_swapped": ("counter", "swaps_total", "Of those, requests whose state was kept."),
}
_OUTER = {
    "memory_bytes": ("gauge", "outer_bytes", "Memory behind the pages that is in use."),
    "pinned_bytes": ("gauge", "outer_pinned_bytes", "Of those, bytes that requests, readers and writers hold."),
    "num_entries": ("gauge", "outer_entries", "Entries in that memory."),
    "num_kept": ("counter", "outer_kept_total", "Entries that were evicted from the pages."),
    "num_lost": ("counter", "outer_lost_total", "Of those, entries for which there was no room."),
    "num_loaded": ("counter", "outer_loaded_total", "Entries that were put back into pages."),
    "num_swapped": ("counter", "outer_swapped_total", "States of requests that gave way to others."),
    "num_read": ("counter", "outer_read_total", "Entries read from the store behind that memory."),
    "num_written": ("counter", "outer_written_total", "Entries written to the store."),
    "num_corrupt": ("counter", "outer_corrupt_total", "Entries of the store that were not what they should be."),
    "num_failed": ("counter", "outer_failed_total", "Calls of the store that failed, were refused or took too long."),
}
_DRAFTS = {
    "num_turns": ("counter", "draft_turns_total", "Parts of passes, one for each request, that had guesses."),
    "num_plain_turns": ("counter", "plain_turns_total", "Parts of passes with one token and no guess."),
    "length": ("gauge", "draft_length", "Guesses per decoding request in the newest pass with such requests."),
}
_PLACES = {
    "drafts_at": ("draft_tokens_total", "Guesses, by their place behind the last known token."),
    "accepted_at": ("accepted_draft_tokens_total", "Of those, guesses that were right behind none that was wrong."),
}


class Histogram:
    """Counts of seconds up to each of SECONDS, and their sum."""

    def __init__(self) -> None:
        self._counts = [0] * (len(SECONDS) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        """One more."""
        self._counts[bisect_left(SECONDS, seconds)] += 1
        self._sum += seconds

    def lines(self, name: str) -> Iterable[str]:
        """In Prometheus' form: each bucket counts those before it too."""
        totals = list(accumulate(self._counts))
        for edge, total in zip((*map(str, SECONDS), "+Inf"), totals):
            yield f'{name}_bucket{{le="{edge}"}} {total}'
        yield f"{name}_sum {self._sum:.6f}"
        yield f"{name}_count {totals[-1]}"


class Metrics:
    """Since the server's start; used in the event loop. Neither keys nor texts are in it."""

    def __init__(self) -> None:
        self._calls: Counter[tuple[str, int]] = Counter()
        self._tokens: Counter[str] = Counter()
        self._refused: Counter[tuple[str, int]] = Counter()
        self._seconds, self._first_token = Histogram(), Histogram()

    def ended(self, path: str, status: int, seconds: float, first_token: float | None, usage: Usage) -> None:
        """A call that was let in is over."""
        self._calls[path, status] += 1
        self._seconds.add(seconds)
        if first_token is not None:
            self._first_token.add(first_token)
        self._tokens.update(prompt=usage.num_prompt, cached=usage.num_cached, answer=usage.num_answer)

    def refused(self, path: str, status: int) -> None:
        """A call was not let in."""
        self._refused[path, status] += 1

    def text(self, stats: Stats | None, gauges: Mapping[str, tuple[str, float]]) -> str:
        """Everything; `gauges` maps further names to their help and value."""
        lines: list[str] = []
        for name, help_text, counts in (
            ("calls_total", "Calls that were let in, by route and status.", self._calls),
            ("refused_total", "Calls that were not let in, by route and status.", self._refused),
        ):
            lines += _head(name, "counter", help_text)
            for (path, status), count in sorted(counts.items()):
                lines.append(f'openk3_{name}{{route="{path}",status="{status}"}} {count}')
        lines += _head("tokens_total", "counter", "Tokens of ended calls: of prompts, from the cache, of answers.")
        for kind in ("prompt", "cached", "answer"):
            lines.append(f'openk3_tokens_total{{kind="{kind}"}} {self._tokens[kind]}')
        for name, help_text, histogram in (
            ("call_seconds", "From a call's admission to its end.", self._seconds),
            ("first_token_seconds", "From a call's admission to the first token of its answer.", self._first_token),
        ):
            lines += [*_head(name, "histogram", help_text), *histogram.lines(f"openk3_{name}")]
        for name, (help_text, value) in gauges.items():
            lines += [*_head(name, "counter" if name.endswith("_total") else "gauge", help_text)]
            lines.append(f"openk3_{name} {value:g}")
        return "\n".join([*lines, *([] if stats is None else _engine_lines(stats)), ""])


def _engine_lines(stats: Stats) -> Iterable[str]:
    """An engine's; its outer tier and its drafts only where it has them."""
    for part, table in ((stats, _ENGINE), (stats.outer, _OUTER), (stats.drafts, _DRAFTS)):
        for field, (kind, name, help_text) in table.items() if part is not None else ():
            yield from (*_head(name, kind, help_text), f"openk3_{name} {_number(getattr(part, field))}")
    for field, (name, help_text) in _PLACES.items() if stats.drafts is not None else ():
        yield from _head(name, "counter", help_text)
        for place, count in enumerate(getattr(stats.drafts, field), start=1):
            yield f'openk3_{name}{{place="{place}"}} {count}'


def _head(name: str, kind: str, help_text: str) -> list[str]:
    return [f"# HELP openk3_{name} {help_text}", f"# TYPE openk3_{name} {kind}"]


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"
