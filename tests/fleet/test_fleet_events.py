"""Events are cut where they end and change no byte; what can be taken back is known from what cannot."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_server import parse_events

from openk3.fleet.events import LastWord, Splitter, is_lost_cause, is_preface, is_pulse, read_event
from openk3.serve.errors import ApiError
from openk3.serve.sse import event

LOST = ApiError(503, "lost", code="replica_lost")
TEXT = st.lists(st.sampled_from((b"data: 1", b"\n", b"\r\n", b": x", b"\n\n", b"\r\n\r\n", b"\x00\xff", b"event: e\n")))


@given(TEXT.map(b"".join), st.lists(st.integers(1, 9)), st.integers(1, 40))
def test_any_cut_gives_the_same_events(text: bytes, cuts: list[int], most: int) -> None:
    """Of bytes in any pieces; nothing is lost, added or turned round, and not much is kept."""

    def run(sizes: list[int], bound: int) -> list[bytes]:
        splitter, events, rest = Splitter(bound), [], text
        for size in [*sizes, len(text)]:
            events += splitter.add(rest[:size])
            rest = rest[size:]
        return [*events, splitter.rest()]

    whole = run([], 10**6)
    assert run(cuts, 10**6) == whole and b"".join(whole) == text
    assert b"".join(run(cuts, most)) == text
    for one in whole[:-1]:
        assert one.endswith((b"\n\n", b"\n\r\n")) and not one[:-3].count(b"\n\n")


def test_what_says_nothing_yet() -> None:
    """Roles and beginnings; anything that a client could show is no preface."""

    def chunk(**fields: Any) -> bytes:
        return event({"choices": [{"index": 0, "delta": {"role": "assistant"}, "finish_reason": None, **fields}]})

    prefaces = [
        *(chunk(), chunk(delta={"role": "assistant", "content": ""}), chunk(delta={})),
        *(
            event({"type": name}, name)
            for name in ("message_start", "ping", "response.created", "response.in_progress")
        ),
    ]
    others = [
        *(chunk(delta={"content": "x"}), chunk(delta={"tool_calls": [{}]}), chunk(finish_reason="stop")),
        *(chunk(text="", delta=None), event({"choices": []}), event({"choices": [{"text": "a"}]}), event("[DONE]")),
        *(event({"type": "content_block_start"}, "content_block_start"), event({"error": {}}), b"data: {\n\n", b"\n\n"),
        event({"choices": [{"delta": {}, "finish_reason": None}], "usage": {"prompt_tokens": 1}}),
    ]
    assert [is_preface(one) for one in prefaces] == [True] * len(prefaces)
    assert [is_preface(one) for one in others] == [False] * len(others)
    assert is_pulse(b": still here\n\n") and not is_pulse(event("x"))


def test_errors_that_another_replica_mends() -> None:
    """In all three forms; an error of the call itself is none."""
    for code, is_lost in (("engine_failed", True), ("draining", True), ("request_failed", False)):
        error = ApiError(503 if is_lost else 500, "m", code=code)
        assert is_lost_cause(event(error.openai())) == is_lost
        assert is_lost_cause(event(error.anthropic(), "error")) == is_lost
        failed = {"type": "response.failed", "response": {"error": {"code": code, "message": "m"}}}
        assert is_lost_cause(event(failed, "response.failed")) == is_lost
    assert (
        not is_lost_cause(event("[DONE]")) and not is_lost_cause(b"data: [[[\n\n") and read_event(b"data: 7\n\n") == {}
    )
    assert read_event(b"data: " + b"[" * 100_000 + b"\n\n") == {}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"])
def test_the_last_word_without_any_before_it(path: str) -> None:
    """A stream that only had pulses."""
    events = parse_events(LastWord(path).error(LOST).decode())
    text = json.dumps(events)
    assert "lost" in text and (events[-1] == "[DONE]") == path.endswith("completions")
    if path == "/v1/responses":
        assert events[0]["response"]["status"] == "failed" and events[0]["sequence_number"] == 0
