"""A session's key stays while the conversation grows, differs between sessions and tenants, and nothing breaks it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openk3.config.fleet import FleetConfig
from openk3.fleet.affinity import estimate_tokens, read_features

CONFIG = FleetConfig()
CHAT, TEXT, ITEMS, BLOCKS = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
FIRST = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
MORE = [{"role": "assistant", "content": "hi"}, {"role": "user", "content": "go on"}]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
FIELDS = ("messages", "prompt", "input", "tools", "system", "user", "metadata", "n", "max_tokens", "prompt_cache_key")


def key(path: str, body: dict[str, Any], tenant: str = "") -> bytes:
    """Of a body."""
    return read_features(path, body, tenant, CONFIG).key


@pytest.mark.parametrize(
    "path,first,later",
    [
        (CHAT, {"messages": FIRST}, {"messages": FIRST + MORE, "temperature": 0}),
        (BLOCKS, {"system": "s", "messages": FIRST[1:]}, {"messages": FIRST[1:] + MORE, "system": "s", "stream": True}),
        (ITEMS, {"input": FIRST}, {"input": FIRST + MORE, "max_output_tokens": 5}),
        (TEXT, {"prompt": "ab" * 512}, {"prompt": "ab" * 512 + "more"}),
        (TEXT, {"prompt": list(range(300))}, {"prompt": [list(range(400))]}),
        (CHAT, {"messages": FIRST, "prompt_cache_key": "k"}, {"messages": MORE, "prompt_cache_key": "k"}),
    ],
)
def test_a_conversation_keeps_its_key(path: str, first: dict[str, Any], later: dict[str, Any]) -> None:
    """While it grows, and whatever else is asked for."""
    assert key(path, first) == key(path, later) != b""
    assert key(path, first) != key(path, first, "another tenant")


@pytest.mark.parametrize(
    "change",
    [
        {"messages": [FIRST[0], {"role": "user", "content": "hello!"}]},
        {"messages": [{"role": "system", "content": "be long"}, FIRST[1]]},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"user": "somebody"},
        {"metadata": {"user_id": "somebody"}},
        {"prompt_cache_key": "k"},
    ],
)
def test_other_beginnings_are_other_sessions(change: dict[str, Any]) -> None:
    """Another first turn, system prompt, tools, user or name."""
    assert key(CHAT, {"messages": FIRST, **change}) != key(CHAT, {"messages": FIRST})


def test_routes_without_answers_have_no_session() -> None:
    """They cost their prompt."""
    for path in ("/tokenize", "/detokenize", "/v1/messages/count_tokens"):
        features = read_features(path, {"messages": FIRST, "max_tokens": 9}, "t", CONFIG)
        assert features.key == b"" and features.num_answer == 0 and features.num_prompt > 0


def test_costs_are_estimated() -> None:
    """Texts by bytes, ids one by one, pictures whole; answers by their limit, if that is below what is usual."""
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 10_000_000}}
    block = {"type": "image", "source": {"type": "base64", "data": "A" * 10_000_000}}
    assert estimate_tokens({"prompt": "x" * 4000}, CONFIG) == 1000
    assert estimate_tokens({"prompt": "é" * 4000}, CONFIG) == 2000
    assert estimate_tokens({"prompt": [7] * 5000}, CONFIG) == 5000
    for body in (picture, block):
        assert 1024 <= estimate_tokens({"messages": [{"content": [body]}]}, CONFIG) < 1100

    def answer(path: str = CHAT, **fields: Any) -> int:
        return read_features(path, fields, "", CONFIG).num_answer

    assert answer() == answer(max_tokens=10**6) == 1024
    assert answer(max_tokens=10, n=3) == 30 and answer(ITEMS, max_output_tokens=5) == 5
    assert answer(TEXT, prompt=["a", "b"], max_tokens=10, n=2) == 40


@given(st.sampled_from((CHAT, TEXT, ITEMS, BLOCKS, "/tokenize")), st.dictionaries(st.sampled_from(FIELDS), JSON) | JSON)
def test_no_body_breaks_it(path: str, body: Any) -> None:
    """Whatever JSON holds; two routers read the same from it."""
    features = read_features(path, body, "t", CONFIG)
    assert features == read_features(path, json.loads(json.dumps(body)), "t", CONFIG)
    assert features.num_prompt >= 1 and features.num_answer >= 0
