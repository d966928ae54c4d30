"""DenseCache: sizes, growth, snapshot and restore, and passes that fail half way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_model import close, random_ids, tiny_config, tiny_model
from torch import Tensor

from openk3 import ModelConfig, Packed
from openk3.config.model import LinearAttnConfig, TextConfig, schedule
from openk3.model.cache import DenseCache, KdaCache, MlaCache, Sequences
from openk3.model.kda import KimiDeltaAttention

MODEL = tiny_model()


def test_sizes_of_the_released_model() -> None:
    """576 values per token and MLA layer; 6,291,456 bytes of float32 state per KDA layer; 24 and 69 layers."""
    kda, full = schedule(93)
    config = ModelConfig(text=TextConfig(linear_attn_config=LinearAttnConfig(kda_layers=kda, full_attn_layers=full)))
    cache = DenseCache(config, 1, torch.bfloat16, "meta")
    states = [layer for layer in cache.layers if isinstance(layer, KdaCache)]
    latents = [layer for layer in cache.layers if isinstance(layer, MlaCache)]
    assert (len(states), len(latents)) == (69, 24)
    assert {layer.state_NHKV.nbytes for layer in states} == {6_291_456}
    assert {layer.state_NHKV.dtype for layer in states} == {torch.float32}
    assert {tuple(window.shape) for layer in states for window in layer.windows} == {(1, 12288, 4)}
    assert {layer.latents()[0].shape[1] for layer in latents} == {576}


def test_no_expanded_keys_or_values_are_held() -> None:
    """After a prompt, MLA layers hold latent_dim values a token, whatever the buffers' spare room."""
    cache = MODEL.new_cache(2)
    MODEL(Packed.join(random_ids([33, 7])), cache)
    for layer in cache.layers:
        if isinstance(layer, MlaCache):
            assert [tuple(rows.shape) for rows in layer.latents()] == [(33, 24), (7, 24)]
            assert all(buffer.shape[1] == 24 and len(buffer) <= 66 for buffer in layer._buffers)


def test_buffers_grow_by_doubling_and_keep_their_rows() -> None:
    """Token by token, a buffer is copied a logarithmic number of times."""
    layer, sizes = MlaCache(torch.empty(1, 0, 3)), set()
    rows = torch.randn(100, 3)
    for t in range(100):
        layer.append(rows[t : t + 1], Sequences(torch.tensor([0, 1])))
        layer.commit()
        sizes.add(len(layer._buffers[0]))
    assert torch.equal(layer.latents()[0], rows)
    assert sizes == {16, 32, 64, 128}


def test_snapshot_and_restore() -> None:
    """A snapshot survives later passes, can be restored again and again, and continues like the first time."""
    (row,) = random_ids([40])
    cache = MODEL.new_cache(1)
    MODEL(Packed.join([row[:20]]), cache)
    saved = cache.snapshot()
    want = MODEL(Packed.join([row[20:30]]), cache)
    for other in (row[30:], row[5:7], [9]):
        cache.restore(saved)
        assert cache.lengths == [20]
        MODEL(Packed.join([other]), cache)
    cache.restore(saved)
    assert torch.equal(MODEL(Packed.join([row[20:30]]), cache), want)
    assert cache.lengths == [30]


def test_a_pass_that_raises_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in a late layer leaves the cache usable, as it was before the pass."""
    (row,), cache, calls = random_ids([30]), MODEL.new_cache(1), []
    MODEL(Packed.join([row[:20]]), cache)
    forward = KimiDeltaAttention.forward

    def failing(self: KimiDeltaAttention, *args: Any) -> Tensor:
        calls.append(self.layer)
        if self.layer == 4:
            raise RuntimeError("out of memory")
        return forward(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(KimiDeltaAttention, "forward", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            MODEL(Packed.join([[50, 51, 52]]), cache)
    assert calls == [0, 1, 2, 4] and cache.lengths == [20]
    want = MODEL(Packed.join([row]))[20:]
    close(MODEL(Packed.join([row[20:]]), cache), want)


def test_cached_passes_record_no_gradient() -> None:
    """A cache is for inference; logits and hidden values carry no graph even where gradients are enabled."""
    cache = MODEL.new_cache(1)
    assert torch.is_grad_enabled()
    assert not MODEL.hidden(Packed.join([[7, 8]]), cache).requires_grad
    assert not MODEL(Packed.join([[7, 8]]), cache).requires_grad
    assert MODEL(Packed.join([[7, 8]])).requires_grad
    assert torch.is_grad_enabled()


def test_dtype_and_sequence_count() -> None:
    """States are at least float32; another number of sequences is refused."""
    cache = DenseCache(tiny_config(), 3, torch.bfloat16)
    first = cache.layers[0]
    assert isinstance(first, KdaCache)
    assert first.state_NHKV.dtype == torch.float32 and first.windows[0].dtype == torch.bfloat16
    with pytest.raises(ValueError, match="holds 3 sequences, the batch has 1"):
        cache.check(Sequences(torch.tensor([0, 4])))
