"""/v1/messages: the same turns in Anthropic's form, as blocks and named events."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from openk3.config.json_file import parse_json
from openk3.config.sampling import first
from openk3.engine.request import Request, SamplingParams
from openk3.serve.answers import Answers, Usage
from openk3.serve.errors import ApiError
from openk3.serve.keys import Caller
from openk3.serve.messages_schema import (
    CountRequest,
    MessagesRequest,
    conversation,
    openai_choice,
    openai_tools,
)
from openk3.serve.options import checked_choice, checked_tools
from openk3.serve.prompts import Options
from openk3.serve.segments import Change, Segment, Segments
from openk3.serve.service import Dialect, Service, new_id
from openk3.serve.sse import event
from openk3.serve.turn_reader import TurnReader
from openk3.serve.turns import TEMPERATURE, TOP_P, Ask, effort_of, plan_turns, read_turns, turn_usage

SIGNATURE = "openk3"  # of reasoning: clients want one to send it back, nobody here asks for it
RAW = "raw_arguments"  # the key under which arguments come that are no JSON object
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


@dataclass
class MessagesCall:
    """One message on its way."""

    id: str
    is_stream: bool
    requests: Sequence[Request]
    readers: list[TurnReader]
    model: str

    async def whole(self, answers: Answers) -> dict[str, Any]:
        """A message object."""
        segments, reason = Segments(), ""
        async for _, deltas, ended in read_turns(self.readers, answers):
            list(segments.add(deltas))
            reason = ended or reason
        usage = usage_object(self.usage(answers))
        content = [block_object(segment) for segment in segments.all]
        return {**self._head(usage), "content": content, **self._stop(reason)}

    async def stream(self, answers: Answers) -> AsyncGenerator[bytes]:
        """Named events; the first one comes with the first token, for it says how much of the prompt was cached."""
        segments, has_begun = Segments(), False
        try:
            async for _, deltas, reason in read_turns(self.readers, answers):
                if not has_begun:
                    has_begun = True
                    start = {"type": "message_start", "message": self._head(usage_object(self.usage(answers)))}
                    yield event(start, "message_start")
                for change in segments.add(deltas):
                    for data in _events(change):
                        yield event(data, data["type"])
                if reason is not None:
                    for change in segments.end():
                        for data in _events(change):
                            yield event(data, data["type"])
                    usage = usage_object(self.usage(answers))
                    yield event({"type": "message_delta", "delta": self._stop(reason), "usage": usage}, "message_delta")
                    yield event({"type": "message_stop"}, "message_stop")
        except ApiError as error:
            yield event(error.anthropic(), "error")

    def usage(self, answers: Answers) -> Usage:
        """Tokens so far."""
        return turn_usage(self.readers, answers)

    def _head(self, usage: dict[str, Any]) -> dict[str, Any]:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": []}
        return {**head, "stop_reason": None, "stop_sequence": None, "usage": usage}

    def _stop(self, reason: str) -> dict[str, Any]:
        stop = self.readers[0].stop
        name = "stop_sequence" if stop is not None else _STOP_REASONS.get(reason, "end_turn")
        return {"stop_reason": name, "stop_sequence": stop}


def prepare(service: Service, body: MessagesRequest, caller: Caller) -> MessagesCall:
    """Check, render and tokenise. Raises ApiError naming the field at fault."""
    params = SamplingParams(
        max_tokens=body.max_tokens,
        temperature=first(body.temperature, service.config.temperature, TEMPERATURE),
        top_p=first(body.top_p, service.config.top_p, TOP_P),
        top_k=body.top_k or 0,
    )
    requests, readers = plan_turns(service, _ask(service, body, params, body.stop_sequences or ()), caller)
    return MessagesCall(new_id("msg_"), bool(body.stream), requests, readers, body.model)


def count_tokens(service: Service, body: CountRequest, caller: Caller) -> dict[str, Any]:
    """How many tokens the prompt would have, images expanded."""
    requests, _ = plan_turns(service, _ask(service, body, SamplingParams()), caller)
    images = sum(grid[1] * grid[2] // 4 - 1 for _, grid in requests[0].images)
    return {"input_tokens": len(requests[0].prompt) + images}


def block_object(segment: Segment) -> dict[str, Any]:
    """A whole block."""
    if segment.kind == "reasoning":
        return {"type": "thinking", "thinking": segment.text, "signature": SIGNATURE}
    if segment.kind == "content":
        return {"type": "text", "text": segment.text}
    given = _parsed(_object_text(segment.text))
    return {"type": "tool_use", "id": segment.call_id, "name": segment.name, "input": given}


def usage_object(usage: Usage) -> dict[str, int]:
    """Anthropic counts cached tokens apart."""
    return {
        "input_tokens": usage.num_prompt - usage.num_cached,
        "cache_read_input_tokens": usage.num_cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.num_answer,
    }


def _ask(service: Service, body: CountRequest, params: SamplingParams, stops: Sequence[str] = ()) -> Ask:
    service.check_model(body.model)
    tools = checked_tools(openai_tools(body.tools))
    serial = body.tool_choice is not None and body.tool_choice.disable_parallel_tool_use
    choice = checked_choice(openai_choice(body.tool_choice), tools, not serial)
    thinking = body.thinking is None or body.thinking.type != "disabled"
    output = body.output_config
    effort = effort_of(None if output is None else output.effort, "output_config.effort", thinking)
    schema = None if output is None or output.format is None else output.format.schema_
    options = Options(
        tools=tools or None,
        thinking=thinking,
        effort=effort or (None if body.thinking is None else body.thinking.effort),
        tool_choice=None if body.tool_choice is None else choice.mode,
        response_format=None if schema is None else {"type": "json_schema", "json_schema": {"schema": schema}},
    )
    return Ask(conversation(body), options, choice, params, stops, schema_field="output_config.format.schema")


def _events(change: Change) -> Iterator[dict[str, Any]]:
    """A change of a segment as events of its block."""
    segment, place = change.segment, {"index": change.segment.index}
    if change.what == "begin":
        empty = {
            "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
            "content": {"type": "text", "text": ""},
            "call": {"type": "tool_use", "id": segment.call_id, "name": segment.name, "input": {}},
        }
        yield {"type": "content_block_start", **place, "content_block": empty[segment.kind]}
        return
    if change.what == "more" and change.delta is not None:
        text = change.delta.text
        delta = {
            "reasoning": {"type": "thinking_delta", "thinking": text},
            "content": {"type": "text_delta", "text": text},
            "call": {"type": "input_json_delta", "partial_json": _object_text(text, segment.text)},
        }
        yield {"type": "content_block_delta", **place, "delta": delta[segment.kind]}
        return
    if segment.kind == "reasoning":
        yield {"type": "content_block_delta", **place, "delta": {"type": "signature_delta", "signature": SIGNATURE}}
    yield {"type": "content_block_stop", **place}


def _parsed(text: str) -> dict[str, Any]:
    """Arguments as JSON can say them again: no infinite numbers, no half characters; else their text under a key."""
    try:
        value = parse_json(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:  # JsonError too
        value = None
    return value if isinstance(value, dict) else {RAW: text}


def _object_text(text: str, so_far: str = "") -> str:
    """Arguments as an object: those that were no object come in one piece, and do not begin like one."""
    is_raw = (so_far or text) == text and not text.lstrip().startswith("{")
    return json.dumps({RAW: text}, ensure_ascii=False) if is_raw else text


MESSAGES = Dialect("/v1/messages", MessagesRequest, prepare, "Answer a conversation, in Anthropic's form")
COUNT = Dialect("/v1/messages/count_tokens", CountRequest, count_tokens, "Count the tokens of a conversation")
