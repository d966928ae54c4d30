"""/tokenize, /detokenize and /tokenizer_info: the server's tokenizer for clients that count or score tokens."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from openk3.inputs.xtml import END
from openk3.serve.errors import bad_request
from openk3.serve.keys import Caller
from openk3.serve.schema import Strict
from openk3.serve.service import Dialect, Service


class TokenizeRequest(Strict):
    """Body of POST /tokenize."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool = True  # [BOS] before the text, as /v1/completions puts it there


class DetokenizeRequest(Strict):
    """Body of POST /detokenize."""

    tokens: Annotated[list[int], Field(max_length=2**24)]
    model: str | None = None


def tokenize(service: Service, body: TokenizeRequest, caller: Caller) -> dict[str, Any]:
    """Ids of a text. A text that is the name of a control token, and nothing else, is that token."""
    if body.model is not None:
        service.check_model(body.model)
    special = service.tokenizer.special
    ids = [special[body.prompt]] if body.prompt in special else service.tokenizer.encode(body.prompt)
    if body.add_special_tokens:
        ids = [special["[BOS]"], *ids]
    return {"tokens": ids, "count": len(ids), "max_model_len": service.context}


def detokenize(service: Service, body: DetokenizeRequest, caller: Caller) -> dict[str, Any]:
    """The text of ids, control tokens by name."""
    if body.model is not None:
        service.check_model(body.model)
    size = service.tokenizer.vocab_size
    if not all(0 <= token < size for token in body.tokens):
        raise bad_request("tokens", f"must lie in 0..{size - 1}")
    return {"prompt": service.tokenizer.decode(body.tokens)}


def tokenizer_info(service: Service) -> dict[str, Any]:
    """Names of the tokens that begin and end a text."""
    return {
        "tokenizer_class": "TikTokenTokenizer",
        "vocab_size": service.tokenizer.vocab_size,
        "model_max_length": service.context,
        "bos_token": "[BOS]",
        "eos_token": END,
        "pad_token": "[PAD]",
    }


TOKENIZE = Dialect("/tokenize", TokenizeRequest, tokenize, "Token ids of a text")
DETOKENIZE = Dialect("/detokenize", DetokenizeRequest, detokenize, "The text of token ids")
