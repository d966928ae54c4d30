"""read_features: from a request's body the session that it belongs to and about how many tokens it is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from openk3.config.fleet import FleetConfig
from openk3.fleet.ticket import Features

HEAD_CHARS, HEAD_IDS = 1024, 256  # of a plain prompt: as long as these stay, it is the same session
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_MOST = 2**40
MOST_VALUES = 2_000_000  # of a body that is looked into: 32 MiB of `{}` are 900 MiB of objects, and two seconds


def read_json(data: bytes) -> Any:
    """A body that is worth it: no conversation that fits a model has more values. Raises ValueError, RecursionError."""
    if data.count(b",") + data.count(b"[") + data.count(b"{") > MOST_VALUES:
        raise ValueError("more values than a request has")
    return json.loads(data)


def read_features(path: str, body: Any, tenant: str, config: FleetConfig) -> Features:
    """A conversation's key is its tenant and its beginning: system prompt, tools and the first user turn, and `user`.

    A `prompt_cache_key` is taken instead where there is one. Routes that answer nothing have no session. A body that is
    no request gets numbers too: what is wrong with it is the replica's to say.
    """
    num_prompt = max(1, estimate_tokens(body, config))
    if not isinstance(body, dict):
        return Features(b"", tenant, num_prompt, 0)
    head = _head(path, body)
    if head is None:
        return Features(b"", tenant, num_prompt, 0)
    given = body.get("prompt_cache_key")
    parts = ["named", given] if isinstance(given, str) and given else ["begins", _user(body), head]
    return Features(_digest([tenant, *parts]), tenant, num_prompt, _answer_tokens(path, body, config))


def estimate_tokens(body: Any, config: FleetConfig) -> int:
    """Of all texts, token ids and pictures in a body; without a tokenizer, so texts count by their bytes."""
    num_bytes = num_ids = num_images = 0
    rest = [body]
    while rest:
        value = rest.pop()
        if isinstance(value, str):
            if value.startswith("data:"):
                num_images += 1
            else:
                num_bytes += len(value) if value.isascii() else len(value.encode("utf-8", "surrogatepass"))
        elif isinstance(value, dict):
            if value.get("type") == "base64":  # a picture as Anthropic's clients send it
                num_images += 1
            else:
                rest.extend(value.values())
        elif isinstance(value, list):
            if value and type(value[0]) is int:
                num_ids += len(value)
            else:
                rest.extend(value)
    return num_ids + int(num_bytes / config.bytes_per_token) + num_images * config.image_tokens


def _head(path: str, body: dict[str, Any]) -> Any:
    """The beginning of a conversation or a plain prompt; None for a route that answers nothing."""
    if path == "/v1/completions":
        prompt = body.get("prompt")
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        return ["prompt", prompt[:HEAD_CHARS] if isinstance(prompt, str) else _list(prompt)[:HEAD_IDS]]
    if path in ("/v1/chat/completions", "/v1/messages"):
        return ["turns", body.get("system"), body.get("tools"), _first_turns(_list(body.get("messages")))]
    if path == "/v1/responses":
        turns = body.get("input")
        first = turns if isinstance(turns, str) else _first_turns(_list(turns))
        return ["items", body.get("instructions"), body.get("tools"), first]
    return None


def _first_turns(turns: Sequence[Any]) -> list[Any]:
    """Everything up to the first turn of a user."""
    for index, turn in enumerate(turns):
        if isinstance(turn, dict) and turn.get("role") == "user":
            return list(turns[: index + 1])
    return list(turns[:1])


def _user(body: dict[str, Any]) -> Any:
    metadata = body.get("metadata")
    inner = metadata.get("user_id") if isinstance(metadata, dict) else None
    return [body.get("user"), body.get("safety_identifier"), inner]


def _answer_tokens(path: str, body: dict[str, Any], config: FleetConfig) -> int:
    """What is expected: a limit is one only where it is below what answers usually have."""
    limits = [value for name in _LIMITS if type(value := body.get(name)) is int and 0 <= value < _MOST]
    count = body.get("n")
    count = count if type(count) is int and 0 < count <= 128 else 1
    prompts = body.get("prompt")
    if path == "/v1/completions" and isinstance(prompts, list) and prompts and not isinstance(prompts[0], int):
        count *= len(prompts)
    return min([config.answer_tokens, *limits]) * count


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _digest(parts: list[Any]) -> bytes:
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return blake2b(text.encode(), digest_size=16).digest()
