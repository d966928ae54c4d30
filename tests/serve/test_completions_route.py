"""/v1/completions by OpenAI's client: texts and ids, echo with the prompt's log-probabilities, stops, streams."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch
from live_server import MODEL, TOKENIZER, Live, tiny_model

from openk3.inputs.packed import Packed

TEXT = "the message é says"


@pytest.fixture
def client(live: Live) -> Iterator[openai.OpenAI]:
    """Without retries."""
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def plain_logprobs(ids: list[int]) -> list[float]:
    """Of each token but the first, by one pass without a cache."""
    with torch.no_grad():
        logits_TV = tiny_model()(Packed.join([ids]))
    return logits_TV[:-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1).tolist()


def test_echo_scores_the_prompt(client: openai.OpenAI) -> None:
    """Log-probabilities are the model's own; with [BOS] before a text even its first token has one."""
    ids = [TOKENIZER.special["[BOS]"], *TOKENIZER.encode(TEXT)]
    answer = client.completions.create(model=MODEL, prompt=TEXT, echo=True, logprobs=2, max_tokens=0).choices[0]
    assert answer.text == TEXT and answer.finish_reason == "length"
    assert answer.logprobs.token_logprobs == pytest.approx(plain_logprobs(ids), abs=1e-4)
    assert answer.logprobs.tokens == [TOKENIZER.decode([i]) for i in ids[1:]]
    assert [len(top) <= 2 for top in answer.logprobs.top_logprobs] == [True] * len(ids[1:])
    offsets = answer.logprobs.text_offset
    assert offsets[0] == 0 and all(
        TEXT[at:].startswith(t) for at, t in zip(offsets, answer.logprobs.tokens) if "\ufffd" not in t
    )


def test_echo_of_ids_and_an_answer(client: openai.OpenAI) -> None:
    """The first token has no log-probability where nothing was put before it; tokens of the answer follow."""
    ids = TOKENIZER.encode(TEXT)
    answer = client.completions.create(model=MODEL, prompt=ids, echo=True, logprobs=0, max_tokens=3, seed=1)
    rows = answer.choices[0].logprobs
    assert rows.token_logprobs[0] is None and rows.token_logprobs[1 : len(ids)] == pytest.approx(
        plain_logprobs(ids), abs=1e-4
    )
    assert answer.choices[0].text.startswith(TEXT) and len(rows.tokens) <= len(ids) + 3
    assert answer.usage.prompt_tokens == len(ids) and answer.usage.completion_tokens == 3


def test_many_prompts_and_choices(client: openai.OpenAI) -> None:
    """Choices of the first prompt, then of the second; the seed counts on inside each prompt; usage is of all."""
    options: dict[str, Any] = {"model": MODEL, "max_tokens": 5, "seed": 7}
    two = client.completions.create(prompt=["ab", "cd"], n=2, **options)
    assert [choice.index for choice in two.choices] == [0, 1, 2, 3]
    texts = [choice.text for choice in two.choices]
    assert texts[2:] == [choice.text for choice in client.completions.create(prompt="cd", n=2, **options).choices]
    assert len(set(texts)) == 4 and two.usage.completion_tokens == 20
    assert two.usage.prompt_tokens == 2 + len(TOKENIZER.encode("ab")) + len(TOKENIZER.encode("cd"))


def test_streams_join_to_the_whole(live: Live, client: openai.OpenAI) -> None:
    """Text, log-probabilities and offsets; echo comes first; a stop ends it; control tokens are no text."""
    live.say("story", "one <|sep|>two é end of it")
    options: dict[str, Any] = {
        "model": MODEL,
        "prompt": "story",
        "max_tokens": 64,
        "stop": ["end", "zz"],
        "logprobs": 1,
        "echo": True,
    }
    whole = client.completions.create(**options).choices[0]
    assert (whole.text, whole.finish_reason) == ("storyone two é ", "stop")
    chunks = [chunk.choices[0] for chunk in client.completions.create(stream=True, **options)]
    assert "".join(chunk.text for chunk in chunks) == whole.text and chunks[0].text.startswith("story")
    assert [chunk.finish_reason for chunk in chunks][-1] == "stop"
    for name in ("tokens", "text_offset"):
        assert [x for chunk in chunks for x in getattr(chunk.logprobs, name)] == getattr(whole.logprobs, name)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [[1], 2]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": "", "add_special_tokens": False}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": [TOKENIZER.special["<|media_pad|>"]]}, "images"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 50}, "logprobs"),
    ],
)
def test_errors_name_the_field(live: Live, fields: dict[str, Any], param: str) -> None:
    """400, and nothing of it stays."""
    answer = live.post("/v1/completions", {"model": MODEL, "prompt": "x", "max_tokens": 2, **fields})
    assert answer.status_code == 400, answer.text
    assert (answer.json()["error"]["param"] or "").startswith(param) or answer.json()["error"]["message"].startswith(
        param
    )


def test_usage_in_each_chunk_of_a_text(live: Live) -> None:
    """Asked for by continuous_usage_stats: it grows to the last chunk's."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": MODEL, "prompt": "a", "max_tokens": 6, "temperature": 0, "stream_options": options}
    *chunks, last, _ = live.events("/v1/completions", body)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[0] > 0 and chunks[-1]["usage"] == last["usage"] and not last["choices"]
