"""verify keeps the distribution of answers: chi-square tests against the exact one, which tell a wrong rule at once."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from checked_engine import engine, greedy, plain_logits
from engine_model import prompt
from scripted_draft import take_script
from torch import Tensor

from openk3.config.serve import SpeculationConfig
from openk3.engine.draft import guess
from openk3.engine.job import Job, Prompt, Work
from openk3.engine.prefix_keys import HashChain, Salt
from openk3.engine.request import Request, SamplingParams, Token
from openk3.engine.sampler import uniform
from openk3.engine.verify import Outcome, verify

VOCAB, LENGTH, COUNT = 5, 3, 2500
PARAMS = (
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6, top_k=3),
    SamplingParams(temperature=1.4, top_p=0.7),
)
PREFIXES = [answer for length in range(LENGTH + 4) for answer in itertools.product(range(VOCAB), repeat=length)]
ROW = {answer: row for row, answer in enumerate(PREFIXES)}
MODEL, OTHER = (
    torch.randn(len(PREFIXES), VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for seed in (0, 1)
)
Answers = Counter[tuple[int, ...]]
Rule = Callable[[Tensor, Sequence[Work]], list[list[Outcome]]]


def probabilities(logits_V: Tensor, params: SamplingParams) -> list[float]:
    """What a draw from these logits gives, by the definition of temperature, top-k and top-p."""
    probs = (logits_V / params.temperature).softmax(-1).tolist()
    order = sorted(range(len(probs)), key=lambda token: -probs[token])
    kept = order[: params.top_k or None]
    total, reached, chosen = sum(probs[token] for token in kept), 0.0, list[int]()
    for token in kept:
        if reached < params.top_p or not chosen:
            chosen.append(token)
        reached += probs[token] / total
    total = sum(probs[token] for token in chosen)
    return [probs[token] / total if token in chosen else 0.0 for token in range(len(probs))]


def exact(params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Probability of every answer of LENGTH tokens."""
    found = {}
    for answer in itertools.product(range(VOCAB), repeat=LENGTH):
        found[answer] = 1.0
        for place, token in enumerate(answer):
            found[answer] *= probabilities(MODEL[ROW[answer[:place]]], params)[token]
    return found


def tail(statistic: float, freedom: int) -> float:
    """Probability that a chi-square variable with so many degrees of freedom is larger."""
    halves = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(*halves))


def chance(counts: Answers, wanted: dict[tuple[int, ...], float]) -> float:
    """Of counts at least so far from the wanted probabilities; answers that are expected seldom are one cell."""
    total = counts.total()
    assert all(wanted.get(answer, 0) > 0 for answer in counts), "an answer that cannot be"
    cells = [(counts[answer], total * share) for answer, share in wanted.items() if total * share >= 5]
    rest = total - sum(count for count, _ in cells), total - sum(share for _, share in cells)
    cells += [rest] if rest[1] >= 5 else []
    return tail(sum((count - want) ** 2 / want for count, want in cells), len(cells) - 1)


def chance_of_two(first: Answers, second: Answers) -> float:
    """Of two samples of one size at least so different, if they have one distribution."""
    common = [answer for answer in first | second if first[answer] + second[answer] >= 10]
    rest = [(sample.total() - sum(sample[answer] for answer in common)) for sample in (first, second)]
    cells = [(first[answer], second[answer]) for answer in common] + ([tuple(rest)] if sum(rest) >= 10 else [])
    return tail(sum((a - b) ** 2 / (a + b) for a, b in cells), len(cells) - 1)


def job_of(seed: int, params: SamplingParams) -> Job:
    """Behind a prompt of one token."""
    ids = [0]
    return Job(Request(ids, params), Prompt(ids, (), (), ()), seed, list(ids), HashChain(Salt("", "0"), 1, ids))


def answers(params: SamplingParams, rule: Rule, similar: float, first_seed: int = 0, most: int = 3) -> Answers:
    """Answers of many requests, with up to `most` guesses of a draft whose logits are the model's in part."""
    jobs, counts = [job_of(first_seed + n, params) for n in range(COUNT)], Answers()
    table = similar * MODEL + (1 - similar) * OTHER
    while jobs:
        works, rows = [], list[int]()
        for n, job in enumerate(jobs):
            job.drafts, wanted = [], (n + job.num_answer) % (most + 1)
            works.append(Work(job, job.num_tokens - 1, job.num_tokens + wanted, wanted))
        for depth in range(most):
            asked = [work.job for work in works if work.num_drafts > depth]
            behind = [ROW[tuple(job.token_ids[1:] + job.drafts)] for job in asked]
            for job, token in zip(asked, guess(table[behind], asked, [job.num_answer + depth for job in asked])):
                job.drafts.append(token)
        for work in works:
            rows += [ROW[tuple(work.job.token_ids[1:] + work.job.drafts[:i])] for i in range(work.num_drafts + 1)]
        for work, tokens in zip(works, rule(MODEL[rows], works)):
            work.job.token_ids += [token.id for token in tokens if isinstance(token, Token)]
        counts.update(tuple(job.token_ids[1 : 1 + LENGTH]) for job in jobs if job.num_answer >= LENGTH)
        jobs = [job for job in jobs if job.num_answer < LENGTH]
    return counts


def careless(logits_NV: Tensor, works: Sequence[Work]) -> list[list[Outcome]]:
    """A wrong rule: a guess is accepted with the model's probability of it; if not, the token is drawn as if there had
    been no guess, so that the guess has two chances."""
    found, row = list[list[Outcome]](), 0
    for work in works:
        job, tokens = work.job, list[Outcome]()
        for i in range(work.num_drafts + 1):
            probs = probabilities(logits_NV[row + i], job.request.params)
            place = job.num_answer + i
            if i < work.num_drafts and uniform(job.seed, place, b"accept") < probs[job.drafts[i]]:
                tokens.append(Token(job.drafts[i], 0.0))
                continue
            number, sums = uniform(job.seed, place, b"again"), list(itertools.accumulate(probs))
            tokens.append(Token(next(n for n, reached in enumerate(sums) if number < reached), 0.0))
            break
        found.append(tokens)
        row += work.num_drafts + 1
    return found


@pytest.mark.parametrize("params", PARAMS)
def test_the_distribution_is_the_models(params: SamplingParams) -> None:
    """Three tokens of five, by good and bad guesses: as the exact probabilities say, and as without guesses; a rule
    that favours guesses a little is told from it."""
    wanted = exact(params)
    assert sum(wanted.values()) == pytest.approx(1)
    plain = answers(params, verify, 0.5, first_seed=10**6, most=0)
    assert chance(plain, wanted) > 0.01
    for similar in (0.9, 0.3):
        guessed = answers(params, verify, similar)
        assert chance(guessed, wanted) > 0.01 and chance_of_two(guessed, plain) > 0.01
    wrong = answers(params, careless, 0.3)
    assert chance(wrong, wanted) < 1e-4


def test_answers_do_not_depend_on_guesses() -> None:
    """Request by request, whatever the draft and the number of its guesses."""
    params = PARAMS[0]
    samples = [answers(params, verify, similar, most=most) for similar, most in ((1.0, 3), (0.0, 2), (0.5, 0))]
    assert samples[0] == samples[1] == samples[2]


def test_a_draft_that_knows_the_model_is_always_right() -> None:
    """It draws with the request's own numbers: with the same logits, every guess is accepted, by temperature too."""
    for params in PARAMS:
        jobs = [job_of(n, params) for n in range(50)]
        for job in jobs:
            for place in range(3):
                job.drafts += guess(MODEL[[ROW[tuple(job.drafts)]]], [job], [place])
        works = [Work(job, 0, 4, 3) for job in jobs]
        rows = [ROW[tuple(job.drafts[:i])] for job in jobs for i in range(4)]
        for job, tokens in zip(jobs, verify(MODEL[rows], works)):
            assert [token.id for token in tokens if isinstance(token, Token)][:3] == job.drafts and len(tokens) == 4


def test_logits_that_are_no_numbers() -> None:
    """Behind a guess that is refused they do not matter; a guess from such logits is some token."""
    job = job_of(0, SamplingParams(temperature=0))
    right = int(MODEL[0].argmax())
    job.drafts = [(right + 1) % VOCAB]
    broken_V = torch.full((VOCAB,), float("nan"), dtype=torch.float64)
    (tokens,) = verify(torch.stack((MODEL[0], broken_V)), [Work(job, 0, 2, 1)])
    assert [token.id for token in tokens if isinstance(token, Token)] == [right]
    job.drafts = [right]
    (tokens,) = verify(torch.stack((MODEL[0], broken_V)), [Work(job, 0, 2, 1)])
    assert isinstance(tokens[1], ValueError) and "not finite" in str(tokens[1])
    assert guess(broken_V[None], [job], [0])[0] in range(VOCAB)


def test_sampling_by_the_engine() -> None:
    """Two tokens of 300 requests, with right and wrong guesses, by a real model: as its own probabilities say."""
    params = SamplingParams(max_tokens=3, temperature=0.7, top_k=3)
    one = engine(700, step_tokens=600, max_requests=128, speculation=SpeculationConfig("ngram", 2, adaptive=False))
    likely = engine().generate([greedy(prompt(4), 3)])[0].token_ids
    draft = take_script(one)
    draft._guesses = lambda job, count: likely[job.num_answer :][:count]  # pyrefly: ignore
    requests = [Request(prompt(4), SamplingParams(**{**vars(params), "seed": seed})) for seed in range(300)]
    streams = [one.submit(request) for request in requests]
    counts = Answers(tuple(stream.result().token_ids[:2]) for stream in streams)
    wanted, by_first = dict[tuple[int, ...], float](), {stream.tokens[0].id: stream for stream in streams}
    for first, stream in by_first.items():
        logits_TV = plain_logits(stream.job)[3:5]
        shares = [probabilities(row_V, params) for row_V in logits_TV]
        wanted |= {(first, token): shares[0][first] * share for token, share in enumerate(shares[1]) if share}
    assert len(wanted) == 9 and sum(wanted.values()) == pytest.approx(1)
    assert chance(counts, wanted) > 0.01
    stats = one.stats().drafts
    assert stats is not None and 0 < stats.num_accepted < stats.num_drafts
