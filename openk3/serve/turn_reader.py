"""TurnReader and TextReader: sampled tokens become what a client is told, piece by piece, with log-probabilities."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from openk3.engine.request import Token
from openk3.inputs.chat import Event, Parser
from openk3.inputs.tokenizer import Tokenizer
from openk3.serve.stops import StopMatcher


class Delta(NamedTuple):
    """More of an answer: `kind` is reasoning, content, call (text = the tool's name) or arguments.

    `index` numbers calls from 0, `call_id` is theirs. `logprobs` are of tokens whose text begins in a content delta.
    """

    kind: str
    text: str
    index: int = -1
    call_id: str = ""
    logprobs: tuple[Token, ...] = ()


class TurnReader:
    """One assistant turn. Broken markup is recovered by the rules of `inputs/chat_turn.py: Turn`.

    Stop texts apply to content alone, not to reasoning or arguments. A call without a name is dropped, for no client
    could answer it. Streamed or whole, the same deltas are joined: a whole answer is read by this reader too.
    """

    def __init__(
        self, tokenizer: Tokenizer, channel: str, stops: Sequence[str] = (), *, keeps_logprobs: bool = False
    ) -> None:
        self._parser = Parser(channel, tokenizer=tokenizer)
        self._special = frozenset(tokenizer.special.values())
        self._stops = StopMatcher(stops)
        self._keeps_logprobs = keeps_logprobs
        self._waiting: list[tuple[int, Token]] = []  # content tokens, with the place of their first character
        self._num_read = self._num_told = 0  # characters of content: parsed, and let through
        self._calls: list[str] = []  # ids
        self._is_named = False
        self._id = secrets.token_hex(10)
        self.num_tokens = self.num_reasoning = 0

    @property
    def is_over(self) -> bool:
        """Nothing more can come, whatever the model would still say."""
        return self._stops.found is not None or self._parser.turn.channel == "done"

    @property
    def stop(self) -> str | None:
        """The stop text that ended the answer."""
        return self._stops.found

    @property
    def has_calls(self) -> bool:
        """Whether a tool was called."""
        return bool(self._calls)

    def feed(self, tokens: Iterable[Token]) -> list[Delta]:
        """What became certain with more tokens."""
        deltas: list[Delta] = []
        for token in tokens:
            if self.is_over:
                break
            self.num_tokens += 1
            place = self._num_read
            for event in self._parser.feed_ids([token.id]):
                deltas += self._read(event)
            channel = "" if token.id in self._special or self._parser.turn.in_tag else self._parser.turn.channel
            self.num_reasoning += channel == "think"
            if self._keeps_logprobs and channel == "response":
                self._waiting.append((place, token))
        return self._told(deltas)

    def finish(self) -> list[Delta]:
        """The answer is over: what was held back, and the ends of open arguments."""
        deltas: list[Delta] = []
        for event in self._parser.finish():
            deltas += self._read(event)
        rest = self._stops.finish()
        return self._told(deltas + ([Delta("content", rest)] if rest else []))

    def finish_reason(self, reason: str) -> str:
        """OpenAI's word for how it ended, from the engine's."""
        if self.stop is not None:
            return "stop"
        if reason == "length" and not self.is_over:
            return "length"
        return "tool_calls" if self.has_calls else "stop"

    def _read(self, event: Event) -> list[Delta]:
        if event.kind == "content":
            self._num_read += len(event.text)
            text = self._stops.feed(event.text)
            return [Delta("content", text)] if text else []
        if self._stops.found is not None:
            return []
        if event.kind == "reasoning":
            return [Delta("reasoning", event.text)]
        if event.kind == "call":
            self._is_named = bool(event.text)
            if self._is_named:
                self._calls.append(f"call_{self._id}{len(self._calls):02d}")
        if not self._is_named:
            return []
        return [Delta(event.kind, event.text, len(self._calls) - 1, self._calls[-1])]

    def _told(self, deltas: list[Delta]) -> list[Delta]:
        """Give the content its tokens: each goes with its first character."""
        for n, delta in enumerate(deltas):
            if delta.kind == "content":
                self._num_told += len(delta.text)
                if self._waiting:
                    gone = [token for place, token in self._waiting if place < self._num_told]
                    del self._waiting[: len(gone)]
                    deltas[n] = delta._replace(logprobs=tuple(gone))
        return deltas


class TextReader:
    """A plain continuation: text without control tokens, up to a stop text.

    Control tokens have no text, but their log-probabilities are told: clients count on one row for each token.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._num_ranks = tokenizer.num_ranks
        self._decoder = tokenizer.decoder()
        self._stops = StopMatcher(stops)
        self._waiting: list[tuple[int, Token]] = []  # tokens, with the place of their first character
        self._num_read = self._num_told = 0  # characters
        self.num_tokens = 0

    @property
    def is_over(self) -> bool:
        """A stop text was found."""
        return self._stops.found is not None

    def feed(self, tokens: Iterable[Token]) -> Delta:
        """What became certain with more tokens."""
        text = ""
        for token in tokens:
            if self.is_over:
                break
            self.num_tokens += 1
            self._waiting.append((self._num_read, token))
            if token.id < self._num_ranks:
                piece = self._decoder.feed(token.id)
                self._num_read += len(piece)
                text += self._stops.feed(piece)
        return self._told(text)

    def finish(self) -> Delta:
        """The answer is over: what was held back."""
        delta = self._told(self._stops.feed(self._decoder.finish()) + self._stops.finish())
        rest = () if self.is_over else tuple(token for _, token in self._waiting)
        self._waiting.clear()
        return delta._replace(logprobs=delta.logprobs + rest)

    def finish_reason(self, reason: str) -> str:
        """OpenAI's word for how it ended, from the engine's."""
        return "length" if reason == "length" and not self.is_over else "stop"

    def _told(self, text: str) -> Delta:
        self._num_told += len(text)
        gone = [token for place, token in self._waiting if place < self._num_told]
        del self._waiting[: len(gone)]
        return Delta("content", text, logprobs=tuple(gone))


def describe(tokenizer: Tokenizer, token: int) -> tuple[str, list[int]]:
    """A token as text, with U+FFFD where it is no whole character, and its exact bytes."""
    data = tokenizer.decode_bytes([token])
    return data.decode("utf-8", errors="replace"), list(data)


def chat_logprobs(tokenizer: Tokenizer, tokens: Iterable[Token]) -> list[dict[str, Any]]:
    """`logprobs.content` of a chat answer."""
    rows = []
    for token in tokens:
        top = [_row(tokenizer, other, logprob) for other, logprob in token.top]
        rows.append({**_row(tokenizer, token.id, token.logprob), "top_logprobs": top})
    return rows


def _row(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    text, data = describe(tokenizer, token)
    return {"token": text, "logprob": finite(logprob), "bytes": data}


def finite(logprob: float) -> float:
    """JSON has no infinity: what can never come gets OpenAI's -9999."""
    return max(logprob, -9999.0)
