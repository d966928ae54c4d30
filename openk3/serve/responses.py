"""/v1/responses: the same turns as items of OpenAI's newer interface, whole or as typed events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from openk3.config.sampling import first
from openk3.engine.request import Request, SamplingParams
from openk3.inputs.tokenizer import Tokenizer
from openk3.serve.answers import Answers, Usage
from openk3.serve.errors import ApiError
from openk3.serve.keys import Caller
from openk3.serve.options import checked_choice, checked_tools
from openk3.serve.prompts import Options
from openk3.serve.responses_schema import LOGPROBS, Format, ResponsesRequest, conversation, nested_tools
from openk3.serve.segments import Change, Segment, Segments
from openk3.serve.service import Dialect, Service, new_id
from openk3.serve.sse import event
from openk3.serve.turn_reader import TurnReader, chat_logprobs
from openk3.serve.turns import TEMPERATURE, TOP_P, Ask, effort_of, plan_turns, read_turns, turn_usage

Event = dict[str, Any]
_PREFIXES = {"reasoning": "rs_", "content": "msg_", "call": "fc_"}
_NAMES = {"reasoning": "reasoning_text", "content": "output_text", "call": "function_call_arguments"}


@dataclass
class ResponsesCall:
    """One response on its way."""

    id: str
    is_stream: bool
    requests: Sequence[Request]
    readers: list[TurnReader]
    tokenizer: Tokenizer
    body: ResponsesRequest
    created: int = field(default_factory=lambda: int(time.time()))

    async def whole(self, answers: Answers) -> dict[str, Any]:
        """A response object."""
        segments, reason = Segments(), ""
        async for _, deltas, ended in read_turns(self.readers, answers):
            list(segments.add(deltas))
            reason = ended or reason
        return self._response(_status(reason), self._items(segments), answers)

    async def stream(self, answers: Answers) -> AsyncGenerator[bytes]:
        """Typed events with numbers; the last one holds the whole response."""
        number = 0

        def told(data: Event) -> bytes:
            nonlocal number
            number += 1
            return event({**data, "sequence_number": number - 1}, data["type"])

        segments = Segments()
        for kind in ("created", "in_progress"):
            yield told({"type": f"response.{kind}", "response": self._response("in_progress", [], None)})
        try:
            async for _, deltas, reason in read_turns(self.readers, answers):
                for change in segments.add(deltas):
                    for data in self._events(change):
                        yield told(data)
                if reason is not None:
                    status = _status(reason)
                    for change in segments.end():
                        for data in self._events(change, status):
                            yield told(data)
                    response = self._response(status, self._items(segments), answers)
                    yield told({"type": f"response.{status}", "response": response})
        except ApiError as error:
            failed = self._response("failed", self._items(segments), None)
            failed["error"] = {"code": error.code or "server_error", "message": error.message}
            yield told({"type": "response.failed", "response": failed})

    def usage(self, answers: Answers) -> Usage:
        """Tokens so far."""
        return turn_usage(self.readers, answers)

    def _response(self, status: str, items: list[dict[str, Any]], answers: Answers | None) -> dict[str, Any]:
        body = self.body
        form = Format(type="text") if body.text is None or body.text.format is None else body.text.format
        effort = None if body.reasoning is None else body.reasoning.effort
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": body.model,
            "output": items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": effort, "summary": None},
            "store": False,
            "temperature": self.requests[0].params.temperature,
            "text": {"format": form.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
            "tools": body.tools or [],
            "top_p": self.requests[0].params.top_p,
            "truncation": "disabled",
            "usage": None if answers is None else usage_object(self.usage(answers)),
        }

    def _items(self, segments: Segments) -> list[dict[str, Any]]:
        return [self._item(segment, "completed") for segment in segments.all]

    def _item(self, segment: Segment, status: str) -> dict[str, Any]:
        item = {"id": f"{_PREFIXES[segment.kind]}{self.id.removeprefix('resp_')}{segment.index:02d}", "status": status}
        is_empty = status == "in_progress"
        if segment.kind == "call":
            arguments = "" if is_empty else segment.text
            names = {"call_id": segment.call_id, "name": segment.name, "arguments": arguments}
            return {**item, "type": "function_call", **names}
        parts = [] if is_empty else [self._part(segment)]
        if segment.kind == "reasoning":
            return {**item, "type": "reasoning", "summary": [], "content": parts}
        return {**item, "type": "message", "role": "assistant", "content": parts}

    def _part(self, segment: Segment, *, is_empty: bool = False) -> dict[str, Any]:
        text = "" if is_empty else segment.text
        if segment.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        logprobs = [] if is_empty else self._logprobs(segment)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _logprobs(self, segment: Segment) -> list[dict[str, Any]]:
        return chat_logprobs(self.tokenizer, segment.logprobs)

    def _events(self, change: Change, status: str = "completed") -> Iterator[Event]:
        """A change of a segment as events of its item."""
        segment = change.segment
        item = self._item(segment, "in_progress")
        place = {"item_id": item["id"], "output_index": segment.index}
        name = {"reasoning": "reasoning_text", "content": "output_text", "call": "function_call_arguments"}[
            segment.kind
        ]
        inner = {} if segment.kind == "call" else {"content_index": 0}
        if change.what == "begin":
            yield {"type": "response.output_item.added", "output_index": segment.index, "item": item}
            if inner:
                part = self._part(segment, is_empty=True)
                yield {"type": "response.content_part.added", **place, **inner, "part": part}
        elif change.what == "more" and change.delta is not None:
            more = {"logprobs": chat_logprobs(self.tokenizer, change.delta.logprobs)} if name == "output_text" else {}
            yield {"type": f"response.{name}.delta", **place, **inner, "delta": change.delta.text, **more}
        else:
            text = (
                {"arguments": segment.text, "name": segment.name} if segment.kind == "call" else {"text": segment.text}
            )
            more = {"logprobs": self._logprobs(segment)} if name == "output_text" else {}
            yield {"type": f"response.{name}.done", **place, **inner, **text, **more}
            if inner:
                yield {"type": "response.content_part.done", **place, **inner, "part": self._part(segment)}
            done = self._item(segment, status)
            yield {"type": "response.output_item.done", "output_index": segment.index, "item": done}


def prepare(service: Service, body: ResponsesRequest, caller: Caller) -> ResponsesCall:
    """Check, render and tokenise. Raises ApiError naming the field at fault."""
    service.check_model(body.model)
    tools = checked_tools(nested_tools(body.tools))
    choice = checked_choice(body.tool_choice, tools, body.parallel_tool_calls)
    thinking = body.thinking is None or body.thinking.type == "enabled"
    form = None if body.text is None else body.text.format
    options = Options(
        tools=tools or None,
        thinking=thinking,
        effort=effort_of(None if body.reasoning is None else body.reasoning.effort, "reasoning.effort", thinking),
        tool_choice=None if body.tool_choice is None else choice.mode,
        response_format=_response_format(form),
    )
    keeps_logprobs = LOGPROBS in (body.include or ()) or bool(body.top_logprobs)
    params = SamplingParams(
        max_tokens=body.max_output_tokens,
        temperature=first(body.temperature, service.config.temperature, TEMPERATURE),
        top_p=first(body.top_p, service.config.top_p, TOP_P),
        logprobs=body.top_logprobs or 0,
    )
    ask = Ask(
        conversation(body), options, choice, params, keeps_logprobs=keeps_logprobs, schema_field="text.format.schema"
    )
    requests, readers = plan_turns(service, ask, caller)
    return ResponsesCall(new_id("resp_"), bool(body.stream), requests, readers, service.tokenizer, body)


def usage_object(usage: Usage) -> dict[str, Any]:
    """The newer interface's usage."""
    return {
        "input_tokens": usage.num_prompt,
        "input_tokens_details": {"cached_tokens": usage.num_cached},
        "output_tokens": usage.num_answer,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning},
        "total_tokens": usage.num_prompt + usage.num_answer,
    }


def _response_format(form: Format | None) -> dict[str, Any] | None:
    if form is None:
        return None
    if form.type == "json_schema" and form.schema_ is None:
        raise ApiError(400, "text.format.schema: missing; it must hold the JSON Schema", param="text.format.schema")
    return {"type": form.type, "json_schema": {"name": form.name, "schema": form.schema_}}


def _status(reason: str) -> str:
    return "incomplete" if reason == "length" else "completed"


RESPONSES = Dialect("/v1/responses", ResponsesRequest, prepare, "Answer items, in the form of the newer interface")
