"""ChunkedCall: a call of one of OpenAI's older routes, whose answer is streamed in chunks of one choice each."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from openk3.engine.request import Request
from openk3.inputs.tokenizer import Tokenizer
from openk3.serve.answers import Answers, Usage
from openk3.serve.errors import ApiError
from openk3.serve.schema import ChatRequest, CompletionRequest
from openk3.serve.sse import event

Body = TypeVar("Body", ChatRequest, CompletionRequest)
Reader = TypeVar("Reader")


@dataclass
class ChunkedCall(ABC, Generic[Body, Reader]):
    """On its way; each choice has a reader. A subclass says what its choices are."""

    CHUNK: ClassVar[str]  # the `object` of a chunk

    id: str
    is_stream: bool
    requests: Sequence[Request]
    readers: list[Reader]
    tokenizer: Tokenizer
    body: Body
    created: int = field(default_factory=lambda: int(time.time()), kw_only=True)

    @abstractmethod
    def usage(self, answers: Answers) -> Usage:
        """Tokens so far."""

    @abstractmethod
    def choices(self, answers: Answers) -> AsyncGenerator[dict[str, Any]]:
        """Choices of chunks, in order. Raises ApiError."""

    async def stream(self, answers: Answers) -> AsyncGenerator[bytes]:
        """Chunks, then usage if it is asked for, then [DONE]; an error on the way is an event too, and the last one."""
        options = self.body.stream_options
        has_usage = options is not None and bool(options.include_usage)
        counts = options is not None and bool(options.continuous_usage_stats)
        head = {**self.head(self.CHUNK), **({"usage": None} if has_usage else {})}
        try:
            async for choice in self.choices(answers):
                if counts and (usage := self.usage(answers)).num_answer:
                    head["usage"] = usage_object(usage)
                yield event({**head, "choices": [choice]})
            if has_usage:
                yield event({**head, "choices": [], "usage": usage_object(self.usage(answers))})
        except ApiError as error:
            yield event(error.openai())
        yield event("[DONE]")

    def head(self, kind: str) -> dict[str, Any]:
        """What every object of an answer begins with."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.body.model}


def usage_object(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage."""
    return {
        "prompt_tokens": usage.num_prompt,
        "completion_tokens": usage.num_answer,
        "total_tokens": usage.num_prompt + usage.num_answer,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached},
        "completion_tokens_details": {"reasoning_tokens": usage.num_reasoning},
    }
