"""The costs of a live replica's passes, from what its requests take: prompts of several lengths, prefixes, answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from openk3.fleet.outcomes import Outcome
from openk3.fleet.pass_costs import PassCosts
from openk3.fleet.replay import Replay
from openk3.fleet.simulated_replica import ReplicaShape
from openk3.fleet.trace import Entry, TraceError

FITTED = ("pass_s", "token_s", "pair_s", "row_s", "request_s", "parse_s")


@dataclass(frozen=True)
class Sample:
    """Seconds that something took, and how often each of FITTED is in it."""

    what: str
    counts: tuple[float, ...]
    seconds: float


def first_token_counts(prompt: int, cached: int, shape: ReplicaShape) -> tuple[float, ...]:
    """Of a request alone, up to its first token."""
    new = prompt - cached
    return (shape.num_passes(prompt, cached), new, new * cached + new * (new + 1) / 2, 0, 1, prompt)


def decode_counts(prompt: int, answer: int, at_once: int) -> tuple[float, ...]:
    """From the first token of an answer to its last, while so many decode alike."""
    passes = answer - 1
    return (passes, passes * at_once, 0, at_once * sum(prompt + n for n in range(passes)), 0, 0)


def fit(samples: Sequence[Sample]) -> PassCosts:
    """Least squares of relative errors, with no constant below zero: the most negative one is left out, and again."""
    rows = np.array([sample.counts for sample in samples], dtype=float)
    seconds = np.array([sample.seconds for sample in samples])
    weighed = rows / seconds[:, None]
    kept = [index for index in range(len(FITTED)) if np.any(weighed[:, index])]
    while True:
        scale = np.abs(weighed[:, kept]).max(axis=0)
        values = np.linalg.lstsq(weighed[:, kept] / scale, np.ones(len(samples)), rcond=None)[0] / scale
        if values.min() >= 0:
            break
        kept.pop(int((values * scale).argmin()))
    found = dict.fromkeys(FITTED, 0.0)
    found.update({FITTED[index]: float(value) for index, value in zip(kept, values, strict=True)})
    return PassCosts(**found)


def errors(costs: PassCosts, samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """What was measured beside what the costs say."""
    values = np.array([getattr(costs, name) for name in FITTED])
    return [
        {"what": one.what, "seconds": one.seconds, "fitted_s": float(np.dot(values, one.counts))} for one in samples
    ]


def probe(
    address: str,
    lengths: Sequence[int],
    shape: ReplicaShape,
    *,
    key: str | None = None,
    rounds: int = 3,
    progress: Callable[[str], None] | None = None,
) -> list[Sample]:
    """Ask a replica that has nothing else to do. Each length cold, then a little behind it, then answers of 1 and 4.

    Raises TraceError for a server that does not answer, or refuses.
    """
    samples, answer = list[Sample](), 32
    for length in lengths:
        colds, warms = list[Outcome](), list[Outcome]()
        for number in range(rounds):
            name = f"probe-{length}-{number}"
            cold = Entry(0.0, name, 0, "probe", "", 0, 0, length, 1)
            warm = Entry(0.0, name, 1, "probe", "", 0, length, max(1, length // 16), 1)
            found = _ask(address, [cold, warm], key)
            colds.append(found[0])
            warms.append(found[1])
        samples += [_first_sample(colds, shape), _first_sample(warms, shape)]
        if progress is not None:
            progress(samples[-2].what)
    for at_once in (1, 4):
        for length in (lengths[0], lengths[-1]):
            found = [
                _ask(address, [_decoding(length, n, at_once, answer) for n in range(at_once)], key)
                for _ in range(rounds)
            ]
            seconds = median(_decode_s(row) for row in found)
            counts = decode_counts(length, answer, at_once)
            samples.append(Sample(f"{answer} tokens of {at_once} answers behind {length}", counts, seconds))
            if progress is not None:
                progress(samples[-1].what)
    return samples


def _decoding(length: int, number: int, at_once: int, answer: int) -> Entry:
    return Entry(0.0, f"probe-decode-{length}-{at_once}-{number}", 0, "probe", "", 0, 0, length, answer)


def _first_sample(outcomes: Sequence[Outcome], shape: ReplicaShape) -> Sample:
    cached = round(median(outcome.cached for outcome in outcomes))
    prompt = outcomes[0].prompt
    seconds = median(outcome.ttft for outcome in outcomes if outcome.ttft is not None)
    return Sample(f"{prompt} tokens, {cached} cached", first_token_counts(prompt, cached, shape), seconds)


def _decode_s(outcomes: Sequence[Outcome]) -> float:
    """While all of them decoded, as if that had been the whole of their answers."""
    firsts = [outcome.first for outcome in outcomes if outcome.first is not None]
    ends = [outcome.ended for outcome in outcomes if outcome.ended is not None]
    return median(ends) - max(firsts)


def _ask(address: str, entries: Sequence[Entry], key: str | None) -> list[Outcome]:
    found = asyncio.run(Replay(entries, {"server": address}, key=key).run())
    failed = next((outcome for outcome in found if outcome.fate != "done"), None)
    if failed is not None:
        asked = f"a prompt of {failed.prompt:,} tokens and {failed.entry.answer_tokens} of answer"
        verb = "refused" if failed.fate == "refused" else "did not answer"
        raise TraceError(f"{address} {verb} {asked} (--lengths): {failed.why}")
    return sorted(found, key=lambda outcome: (outcome.entry.session, outcome.entry.turn))
