"""Turns: what a dialect asks about a conversation becomes engine requests and readers; the dialects share all of it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from openk3.engine.request import Request, SamplingParams
from openk3.inputs.tokenizer import Tokenizer
from openk3.inputs.xtml import END
from openk3.serve.answers import Answers, Usage
from openk3.serve.constraints import GrammarError
from openk3.serve.errors import bad_request
from openk3.serve.keys import Caller
from openk3.serve.options import Choice, turn_rules
from openk3.serve.prompts import Options, chat_prompt
from openk3.serve.schema import check_effort
from openk3.serve.service import Service
from openk3.serve.turn_reader import Delta, TurnReader

TEMPERATURE, TOP_P = 1.0, 0.95  # as the release is sampled


@dataclass(frozen=True)
class Ask:
    """A conversation to answer, in the terms of this server. `schema_field` is the dialect's name of the format."""

    messages: Sequence[dict[str, Any]]
    options: Options
    choice: Choice
    params: SamplingParams
    stops: Sequence[str] = ()
    num_choices: int = 1
    keeps_logprobs: bool = False
    schema_field: str = "response_format"


def plan_turns(service: Service, ask: Ask, caller: Caller) -> tuple[list[Request], list[TurnReader]]:
    """A request and a reader for each choice. Raises ApiError naming the field at fault."""
    check_choices(service, ask.num_choices, "n")
    rules = turn_rules(ask.options, ask.choice)
    try:
        constraints = [None if rules is None else service.constraints.follow(rules) for _ in range(ask.num_choices)]
    except GrammarError as error:
        has_format = rules is not None and rules.answer is not None
        raise bad_request(ask.schema_field if has_format else "tools", str(error), "invalid_schema") from None
    prompt = chat_prompt(service.tokenizer, service.sources, ask.messages, ask.options)
    requests = [
        Request(
            prompt.token_ids,
            _seeded(ask.params, index, turn_stops(service.tokenizer)),
            images=prompt.images,
            tenant=service.tenant(caller),
            turn_ends=prompt.turn_ends,
            constraint=constraint,
        )
        for index, constraint in enumerate(constraints)
    ]
    readers = [
        TurnReader(service.tokenizer, prompt.channel, ask.stops, keeps_logprobs=ask.keeps_logprobs) for _ in requests
    ]
    return requests, readers


async def read_turns(
    readers: Sequence[TurnReader], answers: Answers
) -> AsyncGenerator[tuple[int, list[Delta], str | None]]:
    """(choice, more of it, how it ended) until all have ended; a choice that is over is cancelled in the engine."""
    async for piece in answers.pieces():
        reader = readers[piece.choice]
        deltas = merged(reader.feed(piece.tokens))
        reason = None
        if reader.is_over or piece.finish is not None:
            answers.end(piece.choice)
            deltas = merged(deltas + reader.finish())
            reason = reader.finish_reason("stop" if piece.finish is None else piece.finish.reason)
        if deltas or reason is not None:
            yield piece.choice, deltas, reason


def merged(deltas: Sequence[Delta]) -> list[Delta]:
    """Neighbours of one kind and call joined."""
    out: list[Delta] = []
    for delta in deltas:
        last = out[-1] if out else None
        if last is not None and delta.kind != "call" and (last.kind, last.index) == (delta.kind, delta.index):
            out[-1] = last._replace(text=last.text + delta.text, logprobs=last.logprobs + delta.logprobs)
        else:
            out.append(delta)
    return out


def text_of(deltas: Sequence[Delta], kind: str) -> str:
    """All text of a kind."""
    return "".join(delta.text for delta in deltas if delta.kind == kind)


def calls_of(deltas: Sequence[Delta]) -> list[tuple[str, str, str]]:
    """(id, name, arguments) of each call, in order."""
    names = [(delta.call_id, delta.text) for delta in deltas if delta.kind == "call"]
    texts = [
        "".join(delta.text for delta in deltas if delta.kind == "arguments" and delta.index == n)
        for n in range(len(names))
    ]
    return [(call_id, name, text) for (call_id, name), text in zip(names, texts)]


def turn_usage(readers: Sequence[TurnReader], answers: Answers) -> Usage:
    """Tokens so far."""
    num_answer, num_reasoning = sum(r.num_tokens for r in readers), sum(r.num_reasoning for r in readers)
    return Usage(*answers.prompt_usage(), num_answer, num_reasoning)


def turn_stops(tokenizer: Tokenizer) -> frozenset[int]:
    """Tokens that end a turn."""
    return frozenset((tokenizer.special[END], tokenizer.special["[EOS]"]))


def effort_of(value: object, field: str, thinking: bool) -> str | None:
    """The effort that was asked for, None for the default (max). Raises ApiError for a value that is none of ours."""
    try:
        effort = check_effort(value, field)
    except ValueError as error:
        raise bad_request(field, str(error).removeprefix(f"{field}: "), "unsupported_effort") from None
    if effort is not None and not thinking:
        raise bad_request(field, "says nothing while thinking is disabled; leave one of them out")
    return effort


def check_choices(service: Service, count: int, field: str) -> None:
    """Raise ApiError if one call asks for more answers than the server gives."""
    if count > service.config.max_prompts:
        raise bad_request(
            field, f"{count} answers in one call, and this server gives at most {service.config.max_prompts}"
        )


def engine_seed(seed: int | None) -> int | None:
    """A client's seed, which may be negative, as the engine's."""
    return None if seed is None else seed % 2**64


def _seeded(params: SamplingParams, index: int, stop_ids: frozenset[int]) -> SamplingParams:
    """Choices of one call differ: the n-th has seed + n."""
    seed = None if params.seed is None else (params.seed + index) % 2**64
    return replace(params, seed=seed, stop_ids=stop_ids)
