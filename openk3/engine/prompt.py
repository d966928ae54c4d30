"""read_prompt: check a request's prompt against the model, and give every image token its place."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from openk3.engine.job import Prompt
from openk3.engine.prefix_keys import ImageSpan, image_digest
from openk3.engine.request import Request
from openk3.inputs.packed import MediaItem, Packed
from openk3.model.k3 import K3


def read_prompt(request: Request, model: K3) -> Prompt:
    """The prompt with one placeholder per image token.

    A prompt that is expanded already stays as it is. Raises ValueError naming the field: an empty prompt, ids outside
    the vocabulary, images that do not fit their placeholders or the model, turn ends outside the prompt.
    """
    packed = Packed.join([request.prompt], request.images)
    ids = packed.token_ids_T.tolist()
    if not ids:
        raise ValueError("prompt: at least one token is needed")
    vocabulary = model.config.text.vocab_size
    for name, tokens in (("prompt", ids), ("stop_ids", request.params.stop_ids)):
        for token in (min(tokens, default=0), max(tokens, default=0)):
            if not 0 <= token < vocabulary:
                raise ValueError(f"{name}: token id {token} lies outside the vocabulary of {vocabulary}")
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(request.params, name) or 0) > vocabulary:
            raise ValueError(f"{name}: there are {vocabulary} tokens only")
    if any(type(end) is not int or not 0 <= end <= len(ids) for end in request.turn_ends):
        raise ValueError(f"turn_ends: every end must lie in 0..{len(ids)}, got {list(request.turn_ends)[:8]}")
    if not packed.images and model.vision is None:  # the placeholder's id is a token like any other
        return Prompt(ids, (), (), tuple(request.turn_ends))
    if model.vision is None:
        raise ValueError("images: this model has no vision tower (vision_config is null)")
    media = model.config.media_placeholder_token_id
    expanded = packed.expand(media).token_ids_T.tolist()
    ends = tuple(request.turn_ends)
    if len(expanded) != len(ids):
        ends = _moved(ends, ids, media, packed.images)
    spans = _spans(expanded, media, packed.images)
    return Prompt(expanded, packed.images, spans, ends)


def _moved(ends: Sequence[int], ids: Sequence[int], media: int, images: Sequence[MediaItem]) -> tuple[int, ...]:
    """Where turns end once each placeholder has become as many as its image has tokens."""
    sizes = iter(images)
    places = [0, *accumulate(next(sizes).num_tokens if token == media else 1 for token in ids)]
    return tuple(places[end] for end in ends)


def _spans(ids: Sequence[int], media: int, images: Sequence[MediaItem]) -> tuple[ImageSpan, ...]:
    spans, after = [], 0
    for pixels, grid in images:
        start = ids.index(media, after)
        after = start + grid[1] * grid[2] // 4
        spans.append(ImageSpan(start, after - start, image_digest(_bytes(pixels), grid)))
    return tuple(spans)


def _bytes(pixels: Tensor) -> memoryview:
    """Of whatever format, without a copy where they lie on the CPU in one piece."""
    return pixels.detach().cpu().contiguous().view(torch.uint8).numpy().data.cast("B")
