"""/v1/completions: texts or token ids in, their continuations out, with log-probabilities of the prompt if echoed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from openk3.config.sampling import first
from openk3.engine.request import Request, SamplingParams, Token
from openk3.inputs.tokenizer import Tokenizer
from openk3.inputs.xtml import END
from openk3.serve.answers import Answers, Piece, Usage
from openk3.serve.chunks import ChunkedCall, usage_object
from openk3.serve.errors import bad_request
from openk3.serve.keys import Caller
from openk3.serve.schema import CompletionRequest
from openk3.serve.service import Dialect, Service, new_id
from openk3.serve.turn_reader import Delta, TextReader, describe, finite
from openk3.serve.turns import check_choices, engine_seed

MAX_TOKENS = 16  # OpenAI's default
TEMPERATURE, TOP_P = 1.0, 1.0


@dataclass
class Echo:
    """The prompt of one choice as it is told again; `num_hidden` tokens before it were added here."""

    ids: Sequence[int]
    text: str
    num_hidden: int


@dataclass
class CompletionCall(ChunkedCall[CompletionRequest, TextReader]):
    """Texts continued: the choices of the first prompt, then those of the next."""

    CHUNK = "text_completion"

    echoes: list[Echo]

    async def whole(self, answers: Answers) -> dict[str, Any]:
        """A text_completion object."""
        writers = [_Writer(self, echo) for echo in self.echoes]
        choices: list[dict[str, Any]] = [{} for _ in writers]
        async for index, piece, delta, reason in self._read(answers):
            writers[index].add(piece.prompt_tokens, delta)
            if reason is not None:
                choices[index] = writers[index].choice(index, reason)
        return {**self.head(self.CHUNK), "choices": choices, "usage": usage_object(self.usage(answers))}

    async def choices(self, answers: Answers) -> AsyncGenerator[dict[str, Any]]:
        """What each has more to tell; the echo comes when the prompt is read."""
        writers = [_Writer(self, echo) for echo in self.echoes]
        async for index, piece, delta, reason in self._read(answers):
            writers[index].add(piece.prompt_tokens, delta)
            choice = writers[index].choice(index, reason) if piece.tokens or reason is not None else None
            if choice is not None and (choice["text"] or reason is not None):
                yield choice

    def usage(self, answers: Answers) -> Usage:
        """Tokens so far."""
        return Usage(*answers.prompt_usage(), sum(reader.num_tokens for reader in self.readers))

    async def _read(self, answers: Answers) -> AsyncGenerator[tuple[int, Piece, Delta, str | None]]:
        async for piece in answers.pieces():
            reader = self.readers[piece.choice]
            delta, reason = reader.feed(piece.tokens), None
            if reader.is_over or piece.finish is not None:
                answers.end(piece.choice)
                rest = reader.finish()
                delta = delta._replace(text=delta.text + rest.text, logprobs=delta.logprobs + rest.logprobs)
                reason = reader.finish_reason("stop" if piece.finish is None else piece.finish.reason)
            yield piece.choice, piece, delta, reason


class _Writer:
    """Text and log-probabilities of one choice that were not told yet, and how much was."""

    def __init__(self, call: CompletionCall, echo: Echo) -> None:
        self._call, self._echo = call, echo
        self._is_echo_due = bool(call.body.echo)
        self._text, self._tokens = "", list[Token]()
        self._scored: list[Token] = []
        self._decoder = call.tokenizer.decoder()
        self._offset = 0  # characters of the tokens that were told
        self._num_echoed = len(echo.text) if call.body.echo else 0

    def add(self, scored: Iterable[Token], delta: Delta) -> None:
        """News of the choice."""
        self._scored += scored
        self._text += delta.text
        self._tokens += delta.logprobs

    def choice(self, index: int, reason: str | None) -> dict[str, Any]:
        """What is to be told now."""
        text, tokens = self._text, list[Token | int](self._tokens)
        if self._is_echo_due:
            text, tokens = self._echo.text + text, [*self._echoed(), *tokens]
            self._is_echo_due = False
        self._text, self._tokens = "", []
        logprobs = None if self._call.body.logprobs is None else self._logprobs(tokens)
        return {"index": index, "text": text, "finish_reason": reason, "logprobs": logprobs}

    def _echoed(self) -> list[Token | int]:
        """Tokens of the prompt; the first has no log-probability unless something was put before it."""
        scored, hidden = self._scored, self._echo.num_hidden
        if self._call.body.logprobs is None:
            return []
        return list(scored) if hidden else [self._echo.ids[0], *scored]

    def _logprobs(self, tokens: Sequence[Token | int]) -> dict[str, Any]:
        tokenizer = self._call.tokenizer
        rows: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token in tokens:
            number = token if isinstance(token, int) else token.id
            rows["tokens"].append(describe(tokenizer, number)[0])
            rows["text_offset"].append(self._offset)
            if number < tokenizer.num_ranks or self._offset < self._num_echoed:
                self._offset += len(self._decoder.feed(number))
            rows["token_logprobs"].append(None if isinstance(token, int) else finite(token.logprob))
            top = None if isinstance(token, int) else {describe(tokenizer, i)[0]: finite(p) for i, p in token.top}
            rows["top_logprobs"].append(top)
        return rows


def prepare(service: Service, body: CompletionRequest, caller: Caller) -> CompletionCall:
    """Check and tokenise; text never becomes a control token. Raises ApiError naming the field at fault."""
    service.check_model(body.model)
    prompts = _prompts(body.prompt)
    num_choices = body.n or 1
    check_choices(service, len(prompts) * num_choices, "n" if num_choices > 1 else "prompt")
    special, is_scored = (
        service.tokenizer.special,
        bool(body.echo) and (body.logprobs is not None or body.max_tokens == 0),
    )
    params = SamplingParams(
        max_tokens=MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        temperature=first(body.temperature, service.config.temperature, TEMPERATURE),
        top_p=first(body.top_p, service.config.top_p, TOP_P),
        top_k=body.top_k or 0,
        stop_ids=frozenset((special["[EOS]"], special[END])),
        logprobs=body.logprobs or 0,
        prompt_logprobs=(body.logprobs or 0) if is_scored else None,
    )
    seed = engine_seed(body.seed)
    requests, echoes = [], []
    for prompt in prompts:
        echo = _echo(service.tokenizer, prompt, adds_bos=body.add_special_tokens)
        ids = [special["[BOS]"]] * echo.num_hidden + list(echo.ids)
        for index in range(num_choices):
            seeded = params if seed is None else replace(params, seed=(seed + index) % 2**64)
            requests.append(Request(ids, seeded, tenant=service.tenant(caller)))
            echoes.append(echo)
    readers = [TextReader(service.tokenizer, body.stops) for _ in requests]
    head = new_id("cmpl-"), bool(body.stream)
    return CompletionCall(*head, requests, readers, service.tokenizer, body, echoes)


def _prompts(prompt: Any) -> list[str | list[int]]:
    """One entry per text or list of ids."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(item, str) for item in prompt):
            return prompt
        if all(type(item) is int for item in prompt):
            return [prompt]
        if all(isinstance(item, list) and all(type(token) is int for token in item) for item in prompt):
            return prompt
    raise bad_request("prompt", "expected a text, a list of texts, a list of token ids or a list of such lists")


def _echo(tokenizer: Tokenizer, prompt: str | list[int], *, adds_bos: bool) -> Echo:
    if isinstance(prompt, str):
        return Echo(tokenizer.encode(prompt), prompt, int(adds_bos))
    if not all(0 <= token < tokenizer.vocab_size for token in prompt):
        raise bad_request("prompt", f"token ids must lie in 0..{tokenizer.vocab_size - 1}")
    return Echo(prompt, tokenizer.decode(prompt), 0)


COMPLETIONS = Dialect("/v1/completions", CompletionRequest, prepare, "Continue texts, and score them")
