"""The caption test: does a model read its images, or only guess what captions are like?"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from openk3.data.documents import Document, Encoder, Record
from openk3.data.packing import Span, Window, pack
from openk3.data.render import Rendered
from openk3.inputs.packed import IGNORE, Packed
from openk3.model.generate import generate
from openk3.model.k3 import K3
from openk3.ops.cross_entropy import token_logprobs

BATCH_TOKENS = 4096


@dataclass(frozen=True)
class CaptionScore:
    """One caption's summed loss in nats under its own image and under another one, over the same tokens."""

    kind: str
    right: float
    wrong: float
    num_tokens: int


@dataclass(frozen=True)
class CaptionLoss:
    """Mean nats per caption token with the right image and with another one."""

    right: float
    wrong: float

    @property
    def reduction(self) -> float:
        """How much lower the loss is with the right image, as a fraction of the other."""
        return 1 - self.right / self.wrong


def caption_scores(model: K3, encoder: Encoder, items: Sequence[Rendered], seed: int = 0) -> list[CaptionScore]:
    """Score every caption twice: after its own image, and after that of another item of the same kind.

    The other image has the same kind and another text, so that nothing but what the image shows can help. Raises
    ValueError if all items of a kind have one text.
    """
    rights = _losses(model, encoder, [(item, item) for item in items])
    wrongs = _losses(model, encoder, list(zip(items, _others(items, seed), strict=True)))
    return [
        CaptionScore(item.kind, right, wrong, count)
        for item, (right, count), (wrong, _) in zip(items, rights, wrongs, strict=True)
    ]


def caption_loss(scores: Sequence[CaptionScore]) -> CaptionLoss:
    """The mean over all tokens of `scores`."""
    tokens = sum(score.num_tokens for score in scores)
    return CaptionLoss(sum(s.right for s in scores) / tokens, sum(s.wrong for s in scores) / tokens)


def by_kind(scores: Sequence[CaptionScore]) -> dict[str, CaptionLoss]:
    """`caption_loss` of every kind."""
    groups: dict[str, list[CaptionScore]] = defaultdict(list)
    for score in scores:
        groups[score.kind].append(score)
    return {kind: caption_loss(group) for kind, group in groups.items()}


def write_caption(model: K3, encoder: Encoder, item: Rendered, max_tokens: int = 60) -> str:
    """What the model writes after the image, taking the likeliest token each time, until it ends the document."""
    document = encoder.encode(Record({"image": item.image, "text": ""}, item.kind))
    prompt = Packed.join([document.ids[:-1].astype("int64")], document.images)
    ids = list(generate(model, prompt, max_tokens=max_tokens, temperature=0, stop_ids=[encoder.eos]))
    return encoder.tokenizer.decode(i for i in ids if i != encoder.eos)


def _others(items: Sequence[Rendered], seed: int) -> list[Rendered]:
    """For each item a random one of the same kind whose text differs."""
    rng = random.Random(f"others:{seed}")
    groups: dict[str, list[Rendered]] = defaultdict(list)
    for item in items:
        groups[item.kind].append(item)
    others = []
    for item in items:
        choices = [other for other in groups[item.kind] if other.text != item.text]
        if not choices:
            raise ValueError(f"captions: all {len(groups[item.kind])} items of kind {item.kind} have one text")
        others.append(rng.choice(choices))
    return others


@torch.no_grad()
def _losses(model: K3, encoder: Encoder, pairs: Sequence[tuple[Rendered, Rendered]]) -> list[tuple[float, int]]:
    """(summed loss, number of tokens) of each first item's text after the second one's image."""
    documents = [encoder.encode(Record({"image": shown.image, "text": told.text}, told.kind)) for told, shown in pairs]
    results: list[tuple[float, int]] = []
    for batch in _batches(documents):
        whole = [Window(d, Span(0, len(d), int(d.expanded[-1]))) for d in batch]
        packed = pack(whole, encoder.media_pad).to(model.embed.weight.device)
        losses_T, counted_T = _token_losses(model, packed)
        sums_N = torch.zeros(packed.num_sequences, dtype=torch.float64, device=losses_T.device)
        sums_N.index_add_(0, packed.sequence_T, losses_T.double())
        counts_N = torch.bincount(packed.sequence_T[counted_T], minlength=packed.num_sequences)
        results += list(zip(sums_N.tolist(), counts_N.tolist(), strict=True))
    return results


def _token_losses(model: K3, packed: Packed) -> tuple[Tensor, Tensor]:
    """-log p of each position's label (0 where there is none), and where there is one."""
    labels_T = packed.shifted_labels()
    counted_T = labels_T != IGNORE
    logprob_T, _ = token_logprobs(model.norm(model.hidden(packed)), model.lm_head.weight, labels_T.clamp_min(0))
    return -logprob_T * counted_T, counted_T


def _batches(documents: Sequence[Document]) -> list[list[Document]]:
    batches: list[list[Document]] = []
    room = 0
    for document in documents:
        size = int(document.expanded[-1])
        if size > room:
            batches.append([])
            room = BATCH_TOKENS
        batches[-1].append(document)
        room -= size
    return batches
