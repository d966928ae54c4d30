"""generate: continue one prompt token by token, text or images, sampling as it streams."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor

from openk3.inputs.packed import Packed
from openk3.model.cache import DenseCache
from openk3.model.capture import Form, has_kernels, is_plain
from openk3.model.decoder import Decoder
from openk3.model.k3 import K3
from openk3.ops.sampling import sample

PREFILL_CHUNK = 2048  # prompt tokens per pass; bounds the memory of a long prompt
GRAPHED = 32  # tokens of an answer from which on a graph is worth its capture
LEAST_ROOM = 2048  # tokens that a Decoder has room for, unless fewer can come


class BrokenModelError(ValueError):
    """A model computes no numbers to sample from; the message says what may have happened to it."""


def generate(
    model: K3,
    prompt: Sequence[int] | Tensor | Packed,
    *,
    max_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    stop_ids: Collection[int] = (),
    generator: torch.Generator | None = None,
) -> Iterator[int]:
    """Yield up to `max_tokens` token ids that continue `prompt` (ids, or a Packed of one sequence with its images).

    Ends after yielding an id of `stop_ids`, so that the caller sees why. temperature 0 is greedy; top_k 0 and top_p 1
    cut nothing. On a GPU, longer answers take their steps as CUDA graphs (`Steps` has the conditions).

    Raises ValueError for an empty prompt, a batch, ids outside the vocabulary and image errors, at once;
    BrokenModelError where the logits are not finite.
    """
    packed = prompt if isinstance(prompt, Packed) else Packed.join([prompt])
    if packed.num_sequences != 1:
        raise ValueError(f"prompt: generate continues one sequence, got {packed.num_sequences}")
    if packed.num_tokens == 0:
        raise ValueError("prompt: is empty; start it with at least one token")
    packed = packed.to(model.embed.weight.device)
    cache = model.new_cache(1)
    logits_1V = prefill(model, packed, cache)

    def pick(logits_1V: Tensor) -> int:
        if not math.isfinite(float(logits_1V.max())):
            raise BrokenModelError(
                "the model's logits are not finite: its weights or configuration are damaged, or its training diverged"
            )
        return int(sample(logits_1V, generator, temperature=temperature, top_k=top_k, top_p=top_p))

    return _stream(model, cache, logits_1V, max_tokens, pick=pick, stop_ids=frozenset(stop_ids))


@torch.no_grad()
def prefill(model: K3, packed: Packed, cache: DenseCache, chunk: int = PREFILL_CHUNK) -> Tensor:
    """Run one sequence's prompt through the cache in chunks -> logits of what follows it [1, V]."""
    x_TD = h_TD = model.inputs(packed)
    for part_TD in x_TD.split(chunk):
        cu_seqlens = torch.tensor([0, len(part_TD)], dtype=torch.int32, device=x_TD.device)
        h_TD = model.backbone(part_TD, cu_seqlens, cache)
    return model.logits(h_TD[-1:])


class Steps:
    """One token after another behind a prompt: by a Decoder, as CUDA graphs, or pass by pass over a DenseCache.

    Graphs take the steps of an answer of GRAPHED tokens and more, of a model on a GPU that `model.capture` has nothing
    against; a change of the model ends that, and the answer goes on over a cache. Both ways run the same kernels on the
    same numbers, in products of library calls that may differ; so the last digits of logits may.
    """

    def __init__(self, model: K3, cache: DenseCache, max_tokens: int, graphs: bool | None = None) -> None:
        """`graphs`: whether a Decoder takes the steps; None leaves it to the conditions."""
        self._model, self._cache = model, cache
        self._most = cache.lengths[0] + max_tokens
        if graphs is None:
            graphs = max_tokens >= GRAPHED and model.embed.weight.is_cuda and is_plain(model) and has_kernels(model)
        self._form = Form(model) if graphs else None
        self._decoder: Decoder | None = None
        if graphs:
            self._decoder = Decoder(model, slots=1, max_tokens=self._room(cache.lengths[0]))
            self._decoder.load(0, cache)

    @property
    def is_graphed(self) -> bool:
        """Whether a Decoder takes the next step."""
        return self._decoder is not None

    @torch.no_grad()
    def __call__(self, last_id: int) -> Tensor:
        """Logits [1, V] of what follows one more token; the next call may overwrite them."""
        decoder, model = self._decoder, self._model
        if decoder is not None and self._form is not None and not self._form.holds():
            decoder.store(0, self._cache)
            decoder = self._decoder = None
        if decoder is not None:
            if decoder.lengths[0] == decoder.cache.max_tokens:
                decoder = self._decoder = decoder.resized(self._room(decoder.lengths[0]))
            return decoder.step([0], [last_id])
        x_TD = model.embed(torch.tensor([last_id], device=model.embed.weight.device))
        cu_seqlens = torch.tensor([0, 1], dtype=torch.int32, device=x_TD.device)
        return model.logits(model.backbone(x_TD, cu_seqlens, self._cache))

    def _room(self, length: int) -> int:
        """Twice what there is, and not more than can come."""
        return min(self._most, max(2 * length, LEAST_ROOM))


def _stream(
    model: K3,
    cache: DenseCache,
    logits_1V: Tensor,
    max_tokens: int,
    *,
    pick: Callable[[Tensor], int],
    stop_ids: frozenset[int],
) -> Iterator[int]:
    steps: Steps | None = None
    for count in range(1, max_tokens + 1):
        last_id = pick(logits_1V)
        yield last_id
        if last_id in stop_ids or count == max_tokens:
            return
        steps = steps or Steps(model, cache, max_tokens)
        logits_1V = steps(last_id)
