"""Examine a trained quickstart model: held-out text, images, samples, routing, and each figure beside its target."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from openk3.data.docstring_chat import exchanges
from openk3.data.documents import Encoder
from openk3.data.local_mix import data_uri
from openk3.data.local_text import TextFile
from openk3.data.render import Rendered, draw, render
from openk3.data.sources import Records
from openk3.evals.byte_model import ByteModel
from openk3.evals.caption import CaptionLoss, by_kind, caption_loss, caption_scores, write_caption
from openk3.evals.samples import continue_all, python_share, sample_texts
from openk3.inputs.chat import Parser, encode_chat
from openk3.inputs.chat import render as render_chat
from openk3.inputs.packed import IGNORE, Packed
from openk3.model.k3 import K3
from openk3.ops.sampling import sample
from openk3.train.validate import held_out_batches, token_bytes, validate

_MTP_BATCHES = 4  # batches of held-out text that the MTP loss rests on
_CARDS = 12  # images shown with what the model writes about them


@dataclass(frozen=True)
class Subject:
    """What is examined: a model with its encoder, text that it never saw, and the byte model of what it saw."""

    model: K3
    encoder: Encoder
    held_out: Sequence[TextFile]
    byte_model: ByteModel
    window: int
    seed: int = 0


def held_out_windows(subject: Subject, max_tokens: int = 1 << 40) -> list[Packed]:
    """Batches of the held-out text in windows of the given length."""
    records = Records("held-out text", [{"text": file.text} for file in subject.held_out])
    return held_out_batches(
        *(records, subject.encoder), seq_len=subject.window, micro_batch_tokens=subject.window, max_tokens=max_tokens
    )


def examine_text(subject: Subject) -> dict[str, Any]:
    """Bits per byte of the model and of every byte model over the same bytes; MTP loss and unigram entropy in nats."""
    batches = held_out_windows(subject)
    result = validate(subject.model, batches, token_bytes(subject.encoder.tokenizer))
    return {
        "bits_per_byte": result.bits_per_byte,
        "held_out_bytes": result.num_bytes,
        "byte_model": subject.byte_model.bits_per_byte(file.text for file in subject.held_out),
        "mtp_loss": mtp_loss(subject.model, batches[:_MTP_BATCHES]),
        "unigram_entropy": unigram_entropy(batches),
    }


def examine_captions(subject: Subject, count: int) -> dict[str, Any]:
    """The caption test on `count` held-out images, per kind, and a few images with the model's own words."""
    items = [render(subject.seed, i, held_out=True) for i in range(count)]
    scores = caption_scores(subject.model, subject.encoder, items, subject.seed)
    whole = caption_loss(scores)
    kinds = {kind: _figures(loss) for kind, loss in sorted(by_kind(scores).items())}
    cards = [_card(subject, item) for item in _one_of_each(items)]
    return {**_figures(whole), "by_kind": kinds, "items": cards}


def examine_samples(subject: Subject, count: int, max_tokens: int) -> dict[str, Any]:
    """Texts sampled from nothing and from beginnings of held-out files; the share of their lines that is Python."""
    starts = [_beginning(file.text) for file in subject.held_out if len(file.text) > 400]
    prompts = [""] * (count - count // 2) + (starts * count)[: count // 2]
    tokenizer = subject.encoder.tokenizer
    samples = sample_texts(subject.model, tokenizer, prompts, max_tokens=max_tokens, seed=subject.seed)
    shown = [{"prompt": s.prompt, "text": s.text} for s in samples]
    return {"samples": shown, "python_share": python_share(samples)}


def examine_chat(subject: Subject, count: int, max_tokens: int) -> dict[str, Any]:
    """Questions about held-out docstrings, asked as `openk3 chat` asks them; the share of answers that end properly.

    An answer ends properly if the model itself ends its message.
    """
    asked = [exchange for file in subject.held_out for exchange in exchanges(file)]
    questions = [exchange.question for exchange in asked[:: max(1, len(asked) // count)]][:count] or ["What is this?"]
    tokenizer = subject.encoder.tokenizer
    prompts = [encode_chat(tokenizer, render_chat([{"role": "user", "content": q}]))[0] for q in questions]
    end = tokenizer.special["<|end_of_msg|>"]
    pick = partial(sample, generator=None, temperature=0.0, top_k=0, top_p=1.0)
    written = continue_all(subject.model, prompts, max_tokens=max_tokens, stop_id=end, pick=pick)
    parsers = [Parser("think", tokenizer=tokenizer) for _ in written]
    for parser, ids in zip(parsers, written, strict=True):
        parser.feed_ids(ids)
        parser.finish()
    shown = [{"question": q, **_channels(parser)} for q, parser in zip(questions, parsers, strict=True)]
    return {"chat": shown, "chat_closed": sum(p.complete for p in parsers) / len(parsers)}


@torch.no_grad()
def mtp_loss(model: K3, batches: Sequence[Packed]) -> float | None:
    """Mean nats of the MTP layer over all its targets; None in a model without it."""
    total = tokens = 0.0
    for packed in batches:
        losses = model.loss(packed)
        if losses.mtp is None or losses.num_mtp_tokens is None:
            return None
        total += float(losses.mtp * losses.num_mtp_tokens)
        tokens += float(losses.num_mtp_tokens)
    return total / tokens


def unigram_entropy(batches: Sequence[Packed]) -> float:
    """Entropy in nats of the targets' own frequencies: the least loss of a model that ignores all context."""
    labels = torch.cat([packed.shifted_labels() for packed in batches])
    counts = torch.bincount(labels[labels != IGNORE]).double()
    share = counts[counts > 0] / counts.sum()
    return float(-(share * share.log()).sum())


def targets(report: Mapping[str, Any], minutes: float, is_python: bool) -> list[dict[str, Any]]:
    """Each target with the figure that was measured and whether it is met; shorter runs have a lower bar on text."""
    order = 2 if minutes < 3 else 3 if minutes < 6 else 5
    bar, captions = report["byte_model"][order], report["captions"]
    max_load = max(max(row) for row in report["expert_load"]["load"])
    lower = 1 - captions["right"] / captions["wrong"]
    rows = [
        _target(
            "held-out bits per byte", report["bits_per_byte"], bar, f"below {bar:.2f}, the order-{order} byte model"
        ),
        _target("caption loss lower with the right image", -lower, -0.3, "at least 30 %", f"{100 * lower:z.0f} %"),
        _target("busiest expert over the mean", max_load, 1.2, "below 1.20"),
    ]
    if report["mtp_loss"] is not None:
        unigram = report["unigram_entropy"]
        rows.append(_target("MTP loss, nats", report["mtp_loss"], unigram, f"below {unigram:.2f}, the unigram entropy"))
    if is_python:
        share = report["python_share"]
        rows.append(
            _target("sampled lines that tokenise as Python", -share, -0.6, "at least 60 %", f"{100 * share:.0f} %")
        )
    return rows


def _target(name: str, value: float, bound: float, target: str, shown: str = "") -> dict[str, Any]:
    """Met if the value does not exceed its bound."""
    return {
        "name": name,
        "value": shown or f"{value:.2f}",
        "target": target,
        "met": math.isfinite(value) and value <= bound,
    }


def _figures(loss: CaptionLoss) -> dict[str, float]:
    return {"right": loss.right, "wrong": loss.wrong}


def _one_of_each(items: Sequence[Rendered]) -> list[Rendered]:
    """The first of each kind, then others, up to the number of cards."""
    first = list({item.kind: item for item in reversed(items)}.values())
    rest = [item for item in items if not any(item is chosen for chosen in first)]
    return (first + rest)[:_CARDS]


def _card(subject: Subject, item: Rendered) -> dict[str, Any]:
    written = write_caption(subject.model, subject.encoder, item)
    try:
        redrawn = data_uri(draw(written))
    except ValueError:  # the model's own words need not describe a picture
        redrawn = None
    return {"image": data_uri(item.image), "text": item.text, "written": written, "redrawn": redrawn}


def _channels(parser: Parser) -> dict[str, str]:
    """What an answer says, by channel."""
    message = parser.message()
    return {"think": message.get("reasoning_content") or "", "response": message.get("content") or ""}


def _beginning(text: str) -> str:
    """The first lines of a text, about 200 characters."""
    return text[: text.find("\n", 200) + 1] or text[:200]
