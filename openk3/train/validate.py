"""Held-out bits per byte: how well a model predicts documents that training never saw."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from openk3.data.documents import Encoder
from openk3.data.loader import permutation
from openk3.data.packing import Window, cut, pack, take
from openk3.data.sources import Documents, Source
from openk3.inputs.packed import IGNORE, Packed
from openk3.inputs.tokenizer import Tokenizer
from openk3.model.k3 import K3
from openk3.ops.cross_entropy import linear_cross_entropy


@dataclass(frozen=True)
class Validation:
    """Mean loss per text token in nats, the same per UTF-8 byte in bits, and how much text they rest on."""

    loss: float
    bits_per_byte: float
    num_tokens: int
    num_bytes: int


def held_out_batches(
    source: Source, encoder: Encoder, *, seq_len: int, micro_batch_tokens: int, max_tokens: int
) -> list[Packed]:
    """The same windows of held-out documents for every call: documents in a fixed mixed order, up to `max_tokens`."""
    windows: list[Window] = []
    room = max_tokens
    for window in _windows(source, encoder, seq_len):
        if windows and window.span.num_tokens > room:
            break
        room -= window.span.num_tokens
        windows.append(window)
    batches = []
    while windows:
        batches.append(pack(take(windows, max(micro_batch_tokens, seq_len)), encoder.media_pad))
    return batches


def _windows(source: Source, encoder: Encoder, seq_len: int) -> Iterator[Window]:
    documents = Documents(source, encoder)
    for index in permutation(len(source), 0).tolist():
        document = documents[index]
        for span in cut(document, seq_len):
            yield Window(document, span)


def token_bytes(tokenizer: Tokenizer) -> Tensor:
    """UTF-8 bytes that each id stands for [vocab_size]; control tokens stand for none."""
    lengths = [len(tokenizer.decode_bytes([i])) for i in range(tokenizer.num_ranks)]
    return torch.tensor(lengths + [0] * (tokenizer.vocab_size - tokenizer.num_ranks))


def has_text(batches: Sequence[Packed], token_bytes_V: Tensor) -> bool:
    """Whether some batch has a text token to predict, which `validate` needs."""
    return any(bool((_text_only(packed, token_bytes_V).shifted_labels() != IGNORE).any()) for packed in batches)


@torch.no_grad()
def validate(model: K3, batches: Sequence[Packed], token_bytes_V: Tensor) -> Validation:
    """Loss over the text targets of `batches`; control tokens, which stand for no bytes, are left out.

    No trace is passed, so no statistic of training moves. Raises ValueError if no text token is predicted.
    """
    total, num_tokens, num_bytes = 0.0, 0, 0
    device = model.embed.weight.device
    token_bytes_V = token_bytes_V.to(device)
    for packed in batches:
        packed = _text_only(packed.to(device), token_bytes_V)
        labels_T = packed.shifted_labels()
        loss_sum, count = linear_cross_entropy(model.norm(model.hidden(packed)), model.lm_head.weight, labels_T)
        total += float(loss_sum)
        num_tokens += int(count)
        num_bytes += int(token_bytes_V[labels_T[labels_T != IGNORE]].sum())
    if num_bytes == 0:
        raise ValueError("validate: no text token to predict")
    return Validation(total / num_tokens, total / math.log(2) / num_bytes, num_tokens, num_bytes)


def _text_only(packed: Packed, token_bytes_V: Tensor) -> Packed:
    labels_T = packed.token_ids_T if packed.labels_T is None else packed.labels_T
    silent_T = (labels_T == IGNORE) | (token_bytes_V[labels_T.clamp_min(0)] == 0)
    return dataclasses.replace(packed, labels_T=labels_T.masked_fill(silent_T, IGNORE))
