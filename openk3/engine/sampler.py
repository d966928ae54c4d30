"""Choose the next token of each job of a pass: constraints, sampling by the job's own numbers, log-probabilities."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from openk3.engine.job import Job
from openk3.engine.request import Token
from openk3.model.generate import BrokenModelError
from openk3.ops.device_tables import sent
from openk3.ops.norm import at_least_float32
from openk3.ops.sampling import sample_rows

NOT_FINITE = "the model's logits are not finite: a damaged model, or a damaged request"
Top = tuple[tuple[int, float], ...]


def uniform(seed: int, place: int, purpose: bytes = b"token") -> float:
    """The random number of a request at one place of its answer, in [0, 1) with 53 bits.

    It follows from its arguments alone: the same in any batch, after a preemption, in another process.
    """
    digest = blake2b(struct.pack("<Qq", seed, place), digest_size=8, person=purpose)
    return (int.from_bytes(digest.digest(), "little") >> 11) / 2**53


def choose(logits_NV: Tensor, jobs: Sequence[Job], places: Sequence[int]) -> list[Token | Exception]:
    """For each row the token of its job at that place of the answer, or what went wrong with that job alone.

    Places may lie behind the answer's tokens so far, among drafts of the job that are taken for right.
    Log-probabilities are those of the logits themselves. Errors: what a constraint raises, ValueError where it allows
    no token, BrokenModelError where logits are not finite.
    """
    wide_NV = at_least_float32(logits_NV)
    results: list[Token | Exception | None] = [None] * len(jobs)
    choices_NV = _constrained(wide_NV, jobs, places, results)
    if jobs:
        ids_N = draw(choices_NV, jobs, places)
        for n, token in enumerate(_tokens(wide_NV, ids_N, jobs)):
            results[n] = results[n] or token or BrokenModelError(NOT_FINITE)
    return [result for result in results if result is not None]


def best(logits_NV: Tensor, count: int) -> list[Top]:
    """The `count` most likely ids of each row with their log-probabilities, the best first."""
    values, ids = at_least_float32(logits_NV).log_softmax(-1).topk(count)
    return [tuple(zip(*row)) for row in zip(ids.tolist(), values.tolist())]


def _constrained(
    wide_NV: Tensor, jobs: Sequence[Job], places: Sequence[int], results: list[Token | Exception | None]
) -> Tensor:
    """Logits with -inf where constraints forbid a token; a job whose constraint fails has its error in `results`."""
    choices_NV = wide_NV
    for n, job in enumerate(jobs):
        if job.request.constraint is None:
            continue
        try:
            answer = job.token_ids[job.num_prompt :] + job.drafts
            allowed_V = job.request.constraint.allowed(answer[: places[n]])
            if allowed_V is None:
                continue
            allowed_V = allowed_V.to(wide_NV.device, torch.bool)
            if allowed_V.shape != wide_NV.shape[1:] or not allowed_V.any():
                raise ValueError(f"constraint: no token is allowed, or not one answer for each of {wide_NV.shape[1]}")
        except Exception as error:  # foreign code: it ends its own request, and no other
            results[n] = error
            continue
        choices_NV = wide_NV.clone() if choices_NV is wide_NV else choices_NV
        choices_NV[n].masked_fill_(~allowed_V, float("-inf"))
    return choices_NV


def draw(logits_NV: Tensor, jobs: Sequence[Job], places: Sequence[int]) -> Tensor:
    """Ids [N] by each job's parameters and its own number for that place of its answer; logits in at least float32.

    A GPU is not waited for. Logits that are not finite give some id.
    """
    params, dtype = [job.request.params for job in jobs], logits_NV.dtype
    if all(p.temperature == 0 for p in params):
        return logits_NV.max(-1).indices
    numbers = [uniform(job.seed, place) for job, place in zip(jobs, places)]
    columns = [[p.temperature for p in params], [p.top_k for p in params], [p.top_p for p in params], numbers]
    columns_4N1 = sent(torch.tensor(columns, dtype=torch.float64), logits_NV.device).unsqueeze(-1)
    temperature_N1, top_k_N1, top_p_N1 = columns_4N1[:3].to(dtype)
    cut = [n for n, p in enumerate(params) if p.temperature and (p.top_k or p.top_p < 1)]
    cuts = sent(torch.tensor(cut, dtype=torch.int64), logits_NV.device)
    return sample_rows(logits_NV, temperature_N1, top_k_N1, top_p_N1, columns_4N1[3], cuts=cuts)


def _tokens(wide_NV: Tensor, ids_N: Tensor, jobs: Sequence[Job]) -> list[Token | None]:
    """The tokens of these ids with what was asked for of each, None where logits are not finite; one wait in all,
    and another one for alternatives."""
    params = [job.request.params for job in jobs]
    chosen_N = wide_NV.gather(1, ids_N[:, None]).squeeze(1)
    found = chosen_N - wide_NV.logsumexp(-1), wide_NV.amax(-1).isfinite(), ids_N
    logprobs, finite, ids = torch.stack([x.double() for x in found]).tolist()
    most = max(p.logprobs for p in params)
    tops = [row[: p.logprobs] for row, p in zip(best(wide_NV, most), params)] if most else [()] * len(jobs)
    return [
        Token(int(id), logprob, top) if good else None for id, logprob, good, top in zip(ids, logprobs, finite, tops)
    ]
