"""Made-up traces of three populations in one fleet: coding agents, short chats, and bursts of very long requests."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from openk3.fleet.trace import MOST, MOST_REQUESTS, Entry, TraceError

CODING, CHAT, BURST = "coding", "chat", "burst"
_SPREAD = 0.35  # spread (sigma of the logarithm) of what is drawn around a mean


@dataclass(frozen=True)
class Mix:
    """How many of each population, and how long what they send is; all numbers are means, in tokens and seconds.

    Coding agents come with a prefix they have worked on before, and add to it in every turn. Bursts are several
    requests at once that share nothing with anything.
    """

    seconds: float = 1800.0  # in which requests come
    coding_sessions: int = 48  # agents at work, each in one conversation
    coding_prefix: int = 400_000  # tokens that an agent comes with
    coding_new: int = 4_000  # of a turn
    coding_answer: int = 500  # of an answer
    coding_pause: float = 60.0  # between the turns of a session
    chats_per_second: float = 2.0  # conversations that begin
    chat_turns: int = 3  # of a conversation
    chat_new: int = 800  # tokens of a turn
    chat_answer: int = 300  # of an answer
    chat_pause: float = 30.0  # between the turns of a conversation
    bursts: int = 3  # how many
    burst_requests: int = 6  # of each, within a second
    burst_tokens: int = 1_000_000  # of each request
    burst_answer: int = 300  # of an answer
    system_tokens: int = 6_000  # of coding agents; chats have a quarter of it

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            counts = ("coding_sessions", "chats_per_second", "bursts", "system_tokens")
            if not 0 <= value <= MOST or (not value and spec.name not in counts):
                raise TraceError(f"{spec.name}: must be positive and at most {MOST:,}, got {value}")
        chats = self.chats_per_second * self.seconds * self.chat_turns
        count = (
            self.coding_sessions * (1 + self.seconds / self.coding_pause) + chats + self.bursts * self.burst_requests
        )
        if count > MOST_REQUESTS:
            raise TraceError(f"a mix of {count:,.0f} requests; there can be {MOST_REQUESTS:,}")


def make_trace(mix: Mix, seed: int = 0) -> list[Entry]:
    """The requests of a mix in order of time; the same for the same seed on every machine."""
    draws = random.Random(seed)
    entries = [*_coding(mix, draws), *_chats(mix, draws), *_bursts(mix, draws)]
    if not entries:
        raise TraceError("a mix of nothing: give coding_sessions, chats_per_second or bursts")
    return sorted(entries, key=lambda entry: (entry.at, entry.session, entry.turn))


def _coding(mix: Mix, draws: random.Random) -> Iterator[Entry]:
    """Sessions begin all over the first third of the time, and go on to its end."""
    for number in range(mix.coding_sessions):
        history, at, turn = _about(draws, mix.coding_prefix), draws.uniform(0, mix.seconds / 3), 0
        session = f"{CODING}-{number}"
        while at < mix.seconds:
            new = _about(draws, mix.coding_new)
            answer = _about(draws, mix.coding_answer)
            yield Entry(round(at, 3), session, turn, CODING, CODING, mix.system_tokens, history, new, answer)
            history, turn = history + new, turn + 1
            at += draws.expovariate(1 / mix.coding_pause)


def _chats(mix: Mix, draws: random.Random) -> Iterator[Entry]:
    begin, number = 0.0, 0
    while mix.chats_per_second:
        begin += draws.expovariate(mix.chats_per_second)
        if begin >= mix.seconds:
            return
        history, at = 0, begin
        for turn in range(1 + _below(draws, 2 * mix.chat_turns - 1)):
            new, answer = _about(draws, mix.chat_new), _about(draws, mix.chat_answer)
            name, system = f"{CHAT}-{number}", mix.system_tokens // 4
            yield Entry(round(at, 3), name, turn, CHAT, CHAT if system else "", system, history, new, answer)
            history += new
            at += draws.expovariate(1 / mix.chat_pause)
        number += 1


def _bursts(mix: Mix, draws: random.Random) -> Iterator[Entry]:
    """Each in its own part of the time, its requests within a second."""
    for burst in range(mix.bursts):
        begin = mix.seconds * (burst + draws.uniform(0.2, 0.8)) / mix.bursts
        for number in range(mix.burst_requests):
            at = round(begin + draws.uniform(0, 1), 3)
            tokens, answer = _about(draws, mix.burst_tokens, 0.1), _about(draws, mix.burst_answer)
            yield Entry(at, f"{BURST}-{burst}-{number}", 0, BURST, "", 0, 0, tokens, answer)


def _about(draws: random.Random, mean: int, spread: float = _SPREAD) -> int:
    """Log-normal with that mean."""
    return max(1, round(mean * math.exp(draws.gauss(0, spread) - spread**2 / 2)))


def _below(draws: random.Random, count: int) -> int:
    return draws.randrange(max(1, count))
