"""GatedMLA: by definition, absorbed equal to expanded, what is cached, and the logits that QK-Clip sees."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tiny_model import close, tiny_config
from torch import Tensor

from openk3.model.cache import DenseCache, MlaCache, Sequences
from openk3.model.init import initialize
from openk3.model.mla import GatedMLA
from openk3.model.trace import Recorder


def layer(**text: object) -> GatedMLA:
    """A float64 layer: width 32, 3 heads of 12 + 4, values of 8."""
    mla = GatedMLA(dataclasses.replace(tiny_config().text, **text), 3).double()
    initialize(mla, 0, 0.4)
    torch.nn.init.normal_(mla.kv_a_layernorm.weight, mean=1.0, std=0.1)
    return mla


def sequences(*lengths: int) -> Sequences:
    """The layout of a pass."""
    return Sequences(torch.tensor([0, *lengths]).cumsum(0).to(torch.int32))


def new_cache(num_sequences: int) -> MlaCache:
    """The fourth layer's cache of the tiny model."""
    cache = DenseCache(tiny_config(), num_sequences, torch.float64).layers[3]
    assert isinstance(cache, MlaCache)
    return cache


def by_definition(mla: GatedMLA, x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """(y_TD, largest scaled logit of each head) of one sequence (report eq. 7); latent norms have eps 1e-6."""

    def norm(y: Tensor, weight: Tensor) -> Tensor:
        return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6) * weight

    q = norm(x_TD @ mla.q_a_proj.weight.T, mla.q_a_layernorm.weight) @ mla.q_b_proj.weight.T
    latent, shared = (x_TD @ mla.kv_a_proj_with_mqa.weight.T).split((20, 4), -1)
    kv = (norm(latent, mla.kv_a_layernorm.weight) @ mla.kv_b_proj.weight.T).unflatten(1, (3, 20))
    heads, tops = [], []
    for h in range(3):
        key = torch.cat((kv[:, h, :12], shared), 1)
        logits = q.unflatten(1, (3, 16))[:, h] @ key.T / 4
        logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), float("-inf"))
        heads.append(logits.softmax(-1) @ kv[:, h, 12:])
        tops.append(logits.max())
    o = torch.cat(heads, 1)
    if mla.g_proj is not None:
        o = o * torch.sigmoid(x_TD @ mla.g_proj.weight.T)
    return o @ mla.o_proj.weight.T, torch.stack(tops)


@pytest.mark.parametrize("gated", [True, False])
def test_layer_by_definition(gated: bool) -> None:
    """Two packed sequences, values and the largest logit of each head."""
    mla, recorder = layer(mla_use_output_gate=gated), Recorder()
    x_TD = torch.randn(31, 32, dtype=torch.float64)
    got = mla(x_TD, sequences(11, 20), trace=recorder)
    first, second = by_definition(mla, x_TD[:11]), by_definition(mla, x_TD[11:])
    close(got, torch.cat((first[0], second[0])), 1e-12)
    close(recorder.max_logits[3], torch.maximum(first[1], second[1]), 1e-12)


def test_absorbed_equals_expanded() -> None:
    """Over cached latents of several sequences, for one and for several new tokens each."""
    mla = layer()
    for new in ((1, 1, 1), (3, 0, 6)):
        latents = [torch.randn(n, 24, dtype=torch.float64) for n in (7, 4, 19)]
        q_THK = torch.randn(sum(new), 3, 16, dtype=torch.float64)
        layout, keys = sequences(*new), sequences(7, 4, 19)
        want = mla.expanded(q_THK, torch.cat(latents), layout.cu_seqlens, keys.cu_seqlens)
        close(mla.absorbed(q_THK, latents, layout.cu_seqlens), want, 1e-12)


@pytest.mark.parametrize("absorbed", [True, False])
def test_continuing_from_the_cache(absorbed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either form, whatever the split, gives what one pass gives."""
    mla, taken = layer(), []
    monkeypatch.setattr(GatedMLA, "prefers_absorbed", lambda *_: absorbed)
    for name in ("absorbed", "expanded"):
        form = getattr(GatedMLA, name)
        monkeypatch.setattr(GatedMLA, name, lambda *a, form=form, name=name: taken.append(name) or form(*a))
    x_TD, cache, parts = torch.randn(40, 32, dtype=torch.float64), new_cache(1), []
    with torch.no_grad():
        for rows in x_TD.split([10, 1, 1, 25, 3]):
            parts.append(mla(rows, sequences(len(rows)), cache))
            cache.commit()
    close(torch.cat(parts), by_definition(mla, x_TD)[0], 1e-12)
    assert set(taken) == {"absorbed" if absorbed else "expanded"}


def test_decoding_absorbs_and_prefill_expands() -> None:
    """The choice follows the cost: absorbed up to C (K + V) / (2C - K - V) tokens per continued sequence."""
    mla, cache = layer(), new_cache(2)
    assert not mla.prefers_absorbed(sequences(5, 9), cache.lengths)  # nothing cached yet
    cache.append(torch.zeros(14, 24, dtype=torch.float64), sequences(5, 9))
    cache.commit()
    assert mla.prefers_absorbed(sequences(1, 1), cache.lengths)
    assert mla.prefers_absorbed(sequences(1, 20), cache.lengths)  # 20 * 20 / (40 - 20)
    assert not mla.prefers_absorbed(sequences(1, 21), cache.lengths)


def test_cache_holds_the_latent_and_the_shared_key() -> None:
    """C + R values a token: the normed latent, then the key part that is neither normed nor rotated."""
    mla, cache = layer(), new_cache(1)
    x_TD = torch.randn(6, 32, dtype=torch.float64)
    with torch.no_grad():
        mla(x_TD, sequences(6), cache)
    cache.commit()
    (rows,) = cache.latents()
    raw_TC = x_TD @ mla.kv_a_proj_with_mqa.weight.T
    close(rows[:, 20:], raw_TC[:, 20:], 1e-13)
    latent_TC = raw_TC[:, :20] * torch.rsqrt(raw_TC[:, :20].square().mean(1, keepdim=True) + 1e-6)
    close(rows[:, :20], latent_TC * mla.kv_a_layernorm.weight, 1e-13)


def test_attention_output_stays_float32_in_a_bfloat16_model() -> None:
    """The output meets its gate before it is rounded (report section 2.1.2)."""
    mla = layer().to(torch.bfloat16)
    x_TD = torch.randn(9, 32).to(torch.bfloat16)
    q_THK = torch.randn(9, 3, 16).to(torch.bfloat16)
    layout = sequences(9)
    latent_TC = mla.latent(x_TD)
    assert mla.expanded(q_THK, latent_TC, layout.cu_seqlens, layout.cu_seqlens).dtype == torch.float32
    assert mla.absorbed(q_THK, [latent_TC], layout.cu_seqlens).dtype == torch.float32
    assert mla(x_TD, layout).dtype == torch.bfloat16


def test_a_trace_sees_max_logits_also_when_decoding() -> None:
    """If it asks for them, cached passes take the expanded form."""
    mla, cache, recorder = layer(), new_cache(1), Recorder()
    x_TD = torch.randn(8, 32, dtype=torch.float64)
    with torch.no_grad():
        mla(x_TD[:7], sequences(7), cache)
        cache.commit()
        got = mla(x_TD[7:], sequences(1), cache, recorder)
    close(got, by_definition(mla, x_TD)[0][7:], 1e-12)
    assert recorder.max_logits[3].shape == (3,)
