"""/v1/chat/completions: messages in, one assistant turn out, whole or streamed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any

from openk3.config.sampling import first
from openk3.engine.request import SamplingParams
from openk3.serve.answers import Answers, Usage
from openk3.serve.chunks import ChunkedCall, usage_object
from openk3.serve.keys import Caller
from openk3.serve.options import checked_choice, checked_tools
from openk3.serve.prompts import Options
from openk3.serve.schema import ChatRequest
from openk3.serve.service import Dialect, Service, new_id
from openk3.serve.turn_reader import Delta, TurnReader, chat_logprobs
from openk3.serve.turns import (
    TEMPERATURE,
    TOP_P,
    Ask,
    calls_of,
    effort_of,
    engine_seed,
    plan_turns,
    read_turns,
    text_of,
    turn_usage,
)


class ChatCall(ChunkedCall[ChatRequest, TurnReader]):
    """A conversation's call; the whole answer is what the readers' deltas join to."""

    CHUNK = "chat.completion.chunk"

    async def whole(self, answers: Answers) -> dict[str, Any]:
        """A chat.completion object."""
        parts: list[list[Delta]] = [[] for _ in self.readers]
        reasons: dict[int, str] = {}
        async for choice, deltas, reason in read_turns(self.readers, answers):
            parts[choice] += deltas
            reasons |= {} if reason is None else {choice: reason}
        choices = [
            {
                "index": index,
                "message": message_object(deltas),
                "finish_reason": reasons[index],
                "logprobs": self._logprobs(deltas),
            }
            for index, deltas in enumerate(parts)
        ]
        return {**self.head("chat.completion"), "choices": choices, "usage": usage_object(self.usage(answers))}

    async def choices(self, answers: Answers) -> AsyncGenerator[dict[str, Any]]:
        """The role of each, then its deltas, then why it ended."""
        for index in range(len(self.readers)):
            yield _choice(index, {"role": "assistant", "content": ""})
        async for index, deltas, reason in read_turns(self.readers, answers):
            for delta in deltas:
                choice = _choice(index, delta_object(delta))
                if delta.kind == "content":
                    choice["logprobs"] = self._logprobs([delta])
                yield choice
            if reason is not None:
                yield _choice(index, {}, reason)

    def usage(self, answers: Answers) -> Usage:
        """Tokens so far."""
        return turn_usage(self.readers, answers)

    def _logprobs(self, deltas: Iterable[Delta]) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        tokens = [token for delta in deltas for token in delta.logprobs]
        return {"content": chat_logprobs(self.tokenizer, tokens), "refusal": None}


def prepare(service: Service, body: ChatRequest, caller: Caller) -> ChatCall:
    """Check, render and tokenise. Raises ApiError naming the field at fault."""
    service.check_model(body.model)
    tools = checked_tools(body.tools)
    choice = checked_choice(body.tool_choice, tools, body.parallel_tool_calls)
    thinking = body.thinking is None or body.thinking.type == "enabled"
    options = Options(
        tools=tools or None,
        thinking=thinking,
        effort=effort_of(body.reasoning_effort, "reasoning_effort", thinking),
        tool_choice=None if body.tool_choice is None else choice.mode,
        response_format=None if body.response_format is None else body.response_format.model_dump(by_alias=True),
    )
    params = SamplingParams(
        max_tokens=body.max_completion_tokens or body.max_tokens,
        temperature=first(body.temperature, service.config.temperature, TEMPERATURE),
        top_p=first(body.top_p, service.config.top_p, TOP_P),
        top_k=body.top_k or 0,
        seed=engine_seed(body.seed),
        logprobs=(body.top_logprobs or 0) if body.logprobs else 0,
    )
    ask = Ask(body.messages, options, choice, params, body.stops, body.n or 1, keeps_logprobs=bool(body.logprobs))
    requests, readers = plan_turns(service, ask, caller)
    return ChatCall(new_id("chatcmpl-"), bool(body.stream), requests, readers, service.tokenizer, body)


def message_object(deltas: Sequence[Delta]) -> dict[str, Any]:
    """The assistant's message; a client may send it back as it is."""
    content, reasoning, calls = text_of(deltas, "content"), text_of(deltas, "reasoning"), calls_of(deltas)
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for call_id, name, arguments in calls
        ]
    return message


def delta_object(delta: Delta) -> dict[str, Any]:
    """A delta as chunks hold it; a call's id and name come first, its arguments in pieces."""
    if delta.kind == "content":
        return {"content": delta.text}
    if delta.kind == "reasoning":
        return {"reasoning_content": delta.text}
    if delta.kind == "call":
        function = {"name": delta.text, "arguments": ""}
        return {"tool_calls": [{"index": delta.index, "id": delta.call_id, "type": "function", "function": function}]}
    return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]}


def _choice(index: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "finish_reason": reason, "logprobs": None}


CHAT = Dialect("/v1/chat/completions", ChatRequest, prepare, "Answer a conversation")
