"""What became of a trace's requests, simulated or live, and the figures that follow: TTFT, hit rate, refusals."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from openk3.fleet.trace import Entry

QUANTILES = (50, 90, 99)


@dataclass
class Outcome:
    """One request from its sending to its end. Times are seconds since the trace began."""

    entry: Entry
    sent: float
    replica: str | None = None  # that answered
    routed: float | None = None  # when the router let it go on to one
    first: float | None = None  # token
    ended: float | None = None
    cached: int = 0  # tokens of the prompt
    prompt: int = 0  # tokens, as the replica counts them
    answered: int = 0  # tokens of the answer; a live model may end before it has to
    fate: str = ""  # "done", "refused" by the router or a replica, "failed" in the middle
    why: str = ""  # if not "done", as far as it is known
    tries: int = 0

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token, waiting included."""
        return None if self.first is None else self.first - self.sent

    @property
    def token_s(self) -> float | None:
        """Seconds between two tokens of a whole answer, on average."""
        if self.fate != "done" or self.first is None or self.ended is None or self.answered < 2:
            return None
        return (self.ended - self.first) / (self.answered - 1)


def quantile(values: Sequence[float], percent: float) -> float | None:
    """The smallest value that so many percent of the values do not exceed; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def figures(outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """Of any set of requests: counts, quantiles of TTFT and of waiting at the router, hit rate in tokens."""
    found = list(outcomes)
    firsts = [outcome for outcome in found if outcome.ttft is not None]
    waits = [outcome.routed - outcome.sent for outcome in found if outcome.routed is not None]
    prompt = sum(outcome.prompt for outcome in firsts)
    times = [outcome.ttft for outcome in firsts if outcome.ttft is not None]
    gaps = [outcome.token_s for outcome in found if outcome.token_s is not None]
    return {
        "requests": len(found),
        **{fate: sum(outcome.fate == fate for outcome in found) for fate in ("done", "refused", "failed")},
        "ttft_s": {f"p{percent}": quantile(times, percent) for percent in QUANTILES},
        "ttft_mean_s": sum(times) / len(times) if times else None,
        "token_s": {f"p{percent}": quantile(gaps, percent) for percent in QUANTILES},
        "router_wait_s": {f"p{percent}": quantile(waits, percent) for percent in QUANTILES},
        "prompt_tokens": prompt,
        "hit_rate": sum(outcome.cached for outcome in firsts) / prompt if prompt else None,
    }


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Figures of all and of each kind, and how much was done in how much time."""
    kinds = list(dict.fromkeys(sorted(outcome.entry.kind for outcome in outcomes)))
    ends = [outcome.ended for outcome in outcomes if outcome.ended is not None]
    seconds = max(ends, default=0.0)
    done = [outcome for outcome in outcomes if outcome.fate == "done"]
    tokens = sum(outcome.prompt + outcome.answered for outcome in done)
    return {
        "all": figures(outcomes),
        "kinds": {kind: figures(o for o in outcomes if o.entry.kind == kind) for kind in kinds},
        "seconds": seconds,
        "tokens_per_s": tokens / seconds if seconds else 0.0,
        "requests_by_replica": _counts(outcome.replica for outcome in outcomes if outcome.replica is not None),
        "retried": sum(outcome.tries > 1 for outcome in outcomes),
    }


def table(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Summaries by the name of their policy, for a reader."""
    lines = [
        f"  {'policy':<20} {'kind':<8} {'requests':>8} {'refused':>7} {'failed':>6}"
        f" {'TTFT p50':>10} {'p90':>10} {'p99':>10} {'a token p90':>11} {'hits':>7} {'wait p99':>10}"
    ]
    for name, row in rows.items():
        for kind, found in {"all": row["all"], **row["kinds"]}.items():
            times = " ".join(f"{_shown(found['ttft_s'][f'p{percent}']):>10}" for percent in QUANTILES)
            gap = _shown(found["token_s"]["p90"])
            hits = "-" if found["hit_rate"] is None else f"{found['hit_rate']:.1%}"
            lines.append(
                f"  {name if kind == 'all' else '':<20} {kind:<8} {found['requests']:>8,} {found['refused']:>7,}"
                f" {found['failed']:>6,} {times} {gap:>11} {hits:>7} {_shown(found['router_wait_s']['p99']):>10}"
            )
    return lines


def bars(rows: dict[str, dict[str, Any]], percent: int = 90, width: int = 40) -> list[str]:
    """TTFT of each kind under each policy as bars on a logarithmic scale."""
    kinds = list(dict.fromkeys(kind for row in rows.values() for kind in row["kinds"]))
    values = {
        (kind, name): row["kinds"][kind]["ttft_s"][f"p{percent}"]
        for kind in kinds
        for name, row in rows.items()
        if kind in row["kinds"] and row["kinds"][kind]["ttft_s"][f"p{percent}"]
    }
    if not values:
        return []
    low, high = math.log10(min(values.values())) - 0.2, math.log10(max(values.values()))
    lines = [f"  TTFT p{percent}, logarithmic"]
    for (kind, name), value in values.items():
        length = max(1, round(width * (math.log10(value) - low) / max(high - low, 1e-9)))
        lines.append(f"  {kind:<8} {name:<20} {'#' * length} {_shown(value)}")
    return lines


def entry_record(outcome: Outcome) -> dict[str, Any]:
    """One JSON line about one request."""
    return dataclasses.asdict(outcome)


def _counts(names: Iterable[str]) -> dict[str, int]:
    counts = dict[str, int]()
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return dict(sorted(counts.items()))


def _shown(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 0.0005:
        return "0 ms"
    return f"{seconds * 1e3:,.0f} ms" if seconds < 1 else f"{seconds:,.1f} s"
