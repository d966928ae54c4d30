"""/tokenize and /detokenize: both ways, for texts, bytes and control tokens."""

from __future__ import annotations

import httpx
from live_server import KEY, TOKENIZER, Live, live_server

from openk3.serve.keys import Caller, Keys


def test_both_ways(live: Live) -> None:
    """A text's control tokens stay text; a name alone is the token, as clients look it up."""
    text = "the é👋 <|sep|> text"
    answer = live.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()
    assert answer == {"tokens": TOKENIZER.encode(text), "count": len(TOKENIZER.encode(text)), "max_model_len": 2048}
    assert max(answer["tokens"]) < TOKENIZER.num_ranks
    assert live.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": text}
    info = httpx.get(f"{live.url}/tokenizer_info", timeout=60).json()
    assert live.post("/tokenize", {"prompt": "x"}).json()["tokens"][0] == TOKENIZER.special[info["bos_token"]]
    for name in (info["bos_token"], info["eos_token"]):
        found = live.post("/tokenize", {"prompt": name, "add_special_tokens": False}).json()["tokens"]
        assert found == [TOKENIZER.special[name]] and live.post("/detokenize", {"tokens": found}).json() == {
            "prompt": name
        }


def test_what_is_refused(live: Live) -> None:
    """By field; keys count here too."""
    assert live.post("/detokenize", {"tokens": [10**6]}).json()["error"]["param"] == "tokens"
    assert live.post("/tokenize", {"prompt": 3}).json()["error"]["param"] == "prompt"
    assert live.post("/tokenize", {"prompt": "x", "model": "other"}).status_code == 404
    with live_server(Keys([(KEY, Caller("ann"))])) as guarded:
        assert guarded.post("/tokenize", {"prompt": "x"}).status_code == 401
        assert httpx.get(f"{guarded.url}/tokenizer_info", timeout=60).status_code == 401
