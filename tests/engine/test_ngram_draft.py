"""NgramDraft: the continuation of the last earlier occurrence of the longest end of the text that occurs earlier."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from engine_model import prompt
from hypothesis import given, settings
from hypothesis import strategies as st

from openk3.engine import ngram_draft
from openk3.engine.job import Job, Prompt, Work
from openk3.engine.ngram_draft import LONGEST, SHORTEST, NgramDraft
from openk3.engine.prefix_keys import HashChain, Salt
from openk3.engine.request import Request


def job_of(ids: Sequence[int]) -> Job:
    """A request's tokens so far."""
    prompt = Prompt(list(ids), (), (), ())
    return Job(Request(list(ids)), prompt, 0, list(ids), HashChain(Salt("", "0"), 1, list(ids)))


def guesses(draft: NgramDraft, job: Job, count: int) -> list[int]:
    """Of one job."""
    return draft.propose([Work(job, job.num_tokens - 1, job.num_tokens + count, count)])[0]


def by_definition(ids: list[int], count: int) -> list[int]:
    """Place by place."""
    for length in range(LONGEST, SHORTEST - 1, -1):
        tail = ids[-length:]
        starts = [start for start in range(len(ids) - length) if ids[start : start + length] == tail]
        if len(ids) > length and starts:
            text = list(ids)
            for n in range(count):
                text.append(text[starts[-1] + length + n])
            return text[len(ids) :]
    return []


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.lists(st.integers(0, 2), max_size=4), st.integers(1, 9))
def test_by_definition(ids: list[int], more: list[int], count: int) -> None:
    """For texts of three words, and again when a few tokens have come; a loop goes on as a loop."""
    draft, job = NgramDraft(), job_of(ids)
    assert guesses(draft, job, count) == by_definition(ids, count)
    job.token_ids += more
    assert guesses(draft, job, count) == by_definition(ids + more, count)


def test_the_longest_match_and_of_those_the_last() -> None:
    """Four agreeing tokens far back count more than three nearby; nothing where the end is new."""
    ids = [1, 2, 3, 4, 50, 9, 2, 3, 4, 60, 8, 2, 3, 4, 70, 1, 2, 3, 4]
    assert guesses(NgramDraft(), job_of(ids), 3) == [50, 9, 2]
    assert guesses(NgramDraft(), job_of(ids[5:]), 2) == [70, 1]
    assert guesses(NgramDraft(), job_of([*prompt(30), 281, 282]), 4) == []
    assert guesses(NgramDraft(), job_of([5]), 4) == [] and guesses(NgramDraft(), job_of([5, 5, 5]), 4) == [5] * 4


def test_only_the_end_of_a_long_text_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a text of a million tokens costs no more."""
    monkeypatch.setattr(ngram_draft, "WINDOW", 16)
    rng = random.Random(0)
    ids = [7, 8, 9, 3, *(100 + rng.randrange(100) for _ in range(20)), 7, 8, 9]
    assert guesses(NgramDraft(), job_of(ids), 1) == []
    assert guesses(NgramDraft(), job_of([*ids[-16:], 3, 4, 7, 8, 9]), 2) == [3, 4]


def test_jobs_that_end_are_forgotten() -> None:
    """Nothing is kept of a request that nobody else keeps."""
    draft, job = NgramDraft(), job_of(prompt(50))
    guesses(draft, job, 1)
    assert len(draft._texts) == 1
    del job
    assert len(draft._texts) == 0
