"""Held-out bits per byte against its definition, and that measuring moves nothing."""

from __future__ import annotations

import math

import pytest
import torch
from small_models import small_model, small_run

from openk3.config.model import VisionConfig
from openk3.data.documents import Encoder
from openk3.data.sources import Records
from openk3.inputs.packed import Packed
from openk3.inputs.tokenizer import Tokenizer
from openk3.model.k3 import K3
from openk3.train.state import TrainState
from openk3.train.validate import held_out_batches, token_bytes, validate

RANKS = {bytes([b]): b for b in range(256)} | {b"he": 256, "\u20ac".encode()[:2]: 257}
TOKENIZER = Tokenizer(RANKS)
ENCODER = Encoder(TOKENIZER, vision=VisionConfig())
TEXTS = ["hello here", "\u20ac 5", "x" * 40, "the end"]


def test_bits_per_byte_is_its_definition() -> None:
    """-log2 p of every text token over the bytes of the texts; BOS, EOS and what follows no text are left out."""
    model = K3.build(small_model(vocab_size=TOKENIZER.vocab_size), seed=0)
    source = Records("held", [{"text": text} for text in TEXTS])
    batches = held_out_batches(source, ENCODER, seq_len=64, micro_batch_tokens=32, max_tokens=1000)
    assert len(batches) > 1
    found = validate(model, batches, token_bytes(TOKENIZER))
    nats = 0.0
    for text in TEXTS:
        ids = [TOKENIZER.special["[BOS]"], *TOKENIZER.encode(text)]
        with torch.no_grad():
            log_probs = model(Packed.join([ids])).log_softmax(-1)
        nats -= float(log_probs[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].sum())
    num_bytes = sum(len(text.encode()) for text in TEXTS)
    assert found.num_bytes == num_bytes and found.num_tokens == sum(len(TOKENIZER.encode(text)) for text in TEXTS)
    assert found.bits_per_byte == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-5)
    assert found.loss == pytest.approx(nats / found.num_tokens, rel=1e-5)


def test_same_windows_every_time_up_to_the_limit() -> None:
    """A fixed mixed order, not the first files of a folder; never more than the limit."""
    source = Records("held", [{"text": f"{n:02d}" * 20} for n in range(50)])
    first, again = (
        held_out_batches(source, ENCODER, seq_len=32, micro_batch_tokens=64, max_tokens=300) for _ in range(2)
    )
    assert all(torch.equal(a.token_ids_T, b.token_ids_T) for a, b in zip(first, again, strict=True))
    total = sum(packed.num_tokens for packed in first)
    assert 250 < total <= 300 and all(packed.num_tokens <= 64 for packed in first)
    starts = {int(packed.token_ids_T[1]) for packed in first}
    assert len(starts) > 2


def test_validation_moves_nothing() -> None:
    """No statistic, bias, gradient or generator changes."""
    state = TrainState.build(small_run(model=small_model(vocab_size=TOKENIZER.vocab_size)))
    source = Records("held", [{"text": text} for text in TEXTS])
    batches = held_out_batches(source, ENCODER, seq_len=64, micro_batch_tokens=64, max_tokens=1000)
    generator = torch.get_rng_state()
    validate(state.model, batches, token_bytes(TOKENIZER))
    assert all(statistic.num_tokens == 0 for statistic in state.balance.statistics.values())
    assert not any(router.bias.any() for router in state.balance.routers.values())
    assert all(parameter.grad is None for parameter in state.model.parameters())
    assert torch.equal(generator, torch.get_rng_state())


def test_nothing_to_measure_is_an_error() -> None:
    """Control tokens alone have no bytes."""
    model = K3.build(small_model(vocab_size=TOKENIZER.vocab_size), seed=0)
    eos = TOKENIZER.special["[EOS]"]
    with pytest.raises(ValueError, match="no text token to predict"):
        validate(model, [Packed.join([[eos, eos, eos]])], token_bytes(TOKENIZER))
