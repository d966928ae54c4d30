"""Traces: what is written is read again, bad lines are named, scaling keeps what prompts have in common."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from openk3.fleet.pass_costs import read_costs
from openk3.fleet.trace import Entry, TraceError, ceiling, read_trace, scaled, write_trace
from openk3.fleet.trace_mix import BURST, CHAT, CODING, Mix, make_trace

ENTRY = Entry(1.5, "a", 0, "chat", "s", 100, 0, 50, 10)
SMALL = Mix(seconds=300, coding_sessions=6, chats_per_second=0.5, bursts=2, burst_requests=3)


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Every field, in order; blank lines are nothing."""
    entries = make_trace(SMALL, seed=3)
    path = tmp_path / "trace.jsonl"
    write_trace(path, entries)
    assert read_trace(path) == entries
    path.write_text("\n" + path.read_text() + "\n\n")
    assert read_trace(path) == entries


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"new_tokens": 0}, "new_tokens: must be a whole number of at least 1, got 0"),
        ({"history_tokens": -1}, "history_tokens: must be a whole number of at least 0, got -1"),
        ({"system_tokens": 1.5}, "system_tokens: must be a whole number"),
        ({"turn": True}, "turn: must be a whole number"),
        ({"at": "soon"}, "at: must be a number"),
        ({"at": 0.5}, "at: 0.5 comes before the line above (1.5); sort the lines by `at`"),
        ({"session": "a"}, "turn: session 'a' is at turn 0 already, got 0"),
        ({"session": "a", "turn": 1, "system_tokens": 7}, "system: session 'a' has another system prompt"),
        ({"session": ""}, "session: must be a text"),
        ({"system": ""}, "system_tokens: there is no system prompt"),
        ({"prompt": 3}, "has unknown prompt"),
        ({"kind": None}, "kind: must be a text"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    """File, line, field."""
    path = tmp_path / "trace.jsonl"
    second = dataclasses.asdict(ENTRY) | {"session": "b"} | change
    path.write_text(json.dumps(dataclasses.asdict(ENTRY)) + "\n" + json.dumps(second) + "\n")
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:2: ") and message in str(caught.value)


@pytest.mark.parametrize("line", [b"{", b"[1]", b"\xff", b'{"at": 1}', b"[" * 100_000])
def test_what_is_no_object_is_named(tmp_path: Path, line: bytes) -> None:
    """Broken JSON, other JSON, other bytes, fields left out, JSON too deep to read."""
    path = tmp_path / "trace.jsonl"
    path.write_bytes(line)
    with pytest.raises(TraceError, match=r"trace\.jsonl:1: (is no JSON object|lacks )"):
        read_trace(path)


def test_an_empty_trace_says_what_lines_are(tmp_path: Path) -> None:
    """The fields are named."""
    path = tmp_path / "trace.jsonl"
    path.write_text("\n")
    with pytest.raises(TraceError, match="no requests in it; each line is one JSON object with at, session"):
        read_trace(path)


def test_a_mix_is_what_it_says() -> None:
    """Deterministic, in order, and each population of its length; agents' prompts are nearly all known before."""
    mix = Mix()
    entries = make_trace(mix, seed=1)
    assert entries == make_trace(mix, seed=1) != make_trace(mix, seed=2)
    assert [entry.at for entry in entries] == sorted(entry.at for entry in entries)
    mean = {
        kind: sum(e.prompt_tokens for e in entries if e.kind == kind) / sum(e.kind == kind for e in entries)
        for kind in (CODING, CHAT, BURST)
    }
    assert 300_000 < mean[CODING] < 600_000 and 1_000 < mean[CHAT] < 10_000 and 900_000 < mean[BURST] < 1_100_000
    assert sum(entry.kind == BURST for entry in entries) == mix.bursts * mix.burst_requests
    assert ceiling([entry for entry in entries if entry.kind == CODING]) > 0.9
    assert ceiling([entry for entry in entries if entry.kind == BURST]) == 0.0
    last = dict[str, Entry]()
    for entry in entries:
        before = last.get(entry.session)
        if before is not None:
            assert entry.turn == before.turn + 1 and entry.history_tokens == before.history_tokens + before.new_tokens
        last[entry.session] = entry


def test_the_ceiling_counts_whole_prefixes() -> None:
    """A system prompt is shared from its second use, a history from its session's second turn."""
    turns = [ENTRY, dataclasses.replace(ENTRY, session="b"), dataclasses.replace(ENTRY, turn=1, history_tokens=50)]
    assert ceiling(turns) == (0 + 100 + 150) / (150 + 150 + 200)


def test_scaling_keeps_what_turns_have_in_common() -> None:
    """Within a token, a scaled history ends where the scaled prompt before it did; nothing scales to nothing."""
    entries = make_trace(SMALL, seed=5)
    small = scaled(entries, tokens=1 / 300, seconds=0.1)
    assert [entry.at for entry in small] == [entry.at * 0.1 for entry in entries]
    ends = dict[str, int]()
    for entry, whole in zip(small, entries, strict=True):
        assert entry.new_tokens >= 1 and entry.answer_tokens >= 1
        assert abs(entry.prompt_tokens - whole.prompt_tokens / 300) <= 1.5
        end = ends.get(entry.session)
        assert end is None or abs(entry.system_tokens + entry.history_tokens - end) <= 1
        ends[entry.session] = entry.prompt_tokens
    for factor in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(TraceError, match="scale of tokens: must be positive"):
            scaled(entries, tokens=factor)


def test_a_mix_of_nothing_is_refused() -> None:
    """And so are numbers that are none."""
    with pytest.raises(TraceError, match="a mix of nothing"):
        make_trace(Mix(coding_sessions=0, chats_per_second=0.0, bursts=0))
    with pytest.raises(TraceError, match="chat_pause: must be positive"):
        Mix(chat_pause=0.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seconds", 1e300),
        ("seconds", float("nan")),
        ("chats_per_second", 1e12),
        ("coding_sessions", 10**400),
        ("coding_pause", 1e-300),
        ("chat_turns", 10**11),
        ("bursts", 10**11),
        ("coding_prefix", 2**41),
    ],
)
def test_a_mix_that_nobody_has_room_for_is_refused_at_once(field: str, value: float) -> None:
    """Before the first request is made, not when memory ends."""
    with pytest.raises(TraceError, match=f"{field}: |a mix of "):
        Mix(**{field: value})


@pytest.mark.parametrize("filler", [b"x", b" "])
def test_a_line_that_is_too_long_is_not_read(tmp_path: Path, filler: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is a device without lines; what comes behind it is not taken for a trace that ends there."""
    monkeypatch.setattr("openk3.fleet.trace.LONGEST_LINE", 1000)
    path = tmp_path / "trace.jsonl"
    write_trace(path, [ENTRY])
    path.write_bytes(path.read_bytes() + filler * 2000)
    with pytest.raises(TraceError, match=r"trace.jsonl:2: more than 1,000 bytes"):
        read_trace(path)
    with pytest.raises(TraceError, match=r"zero:1: more than 1,000 bytes"):
        read_trace(Path("/dev/zero"))


def test_scaled_beyond_what_a_trace_may_hold() -> None:
    """What would be written could not be read again."""
    for factors in ((1e11, 1.0), (1.0, 1e12)):
        with pytest.raises(TraceError, match="at most"):
            scaled([ENTRY], *factors)


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"pass_s": 1e308, "token_s": 1, "pair_s": 1, "row_s": 1}', "[]", '{"costs": 3}', " " * (2 << 20)],
)
def test_bad_costs_are_named(tmp_path: Path, text: str) -> None:
    """Too deep, too large for any sum, no object, too long."""
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(TraceError, match=r"costs.json: needs an object"):
        read_costs(path)
