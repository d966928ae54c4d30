"""Invariants of the whole model in float64: packing, causality, caching, padding, losses, dtypes, errors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_model import MEDIA, VOCAB, close, gradients, random_ids, random_image, tiny_config, tiny_model
from torch.nn import functional as F

from openk3 import K3, Packed
from openk3.model.cache import DenseCache, KdaCache
from openk3.model.trace import Recorder

MODEL = tiny_model()
FULL = tiny_model(tiny_config(attn_res_mode="full"))


def states(cache: DenseCache) -> list[torch.Tensor]:
    """Everything a cache holds, sequence by sequence."""
    out: list[torch.Tensor] = []
    for layer in cache.layers:
        out += [layer.state_NHKV, *layer.windows] if isinstance(layer, KdaCache) else layer.latents()
    return out


@pytest.mark.parametrize("model", [MODEL, FULL], ids=["block", "full"])
def test_packed_equals_separate(model: K3) -> None:
    """Sequences in one batch (one of them empty, one of a single token) do not see each other."""
    rows = random_ids([5, 0, 70, 1, 17])
    close(model(Packed.join(rows)), torch.cat([model(Packed.join([row])) for row in rows]))


def test_packed_gradients_equal_separate() -> None:
    """Parameter gradients add up over sequences."""
    rows = random_ids([9, 1, 66], seed=1)
    together = gradients(MODEL, Packed.join(rows))
    apart = [gradients(MODEL, Packed.join([row])) for row in rows]
    for name, value in together.items():
        size = float(value.abs().max())
        want = sum((part[name] for part in apart if name in part), torch.zeros_like(value))
        torch.testing.assert_close(value, want, atol=1e-11 * max(1.0, size), rtol=0, msg=name)


@settings(max_examples=8)
@given(st.integers(0, 39), st.integers(0, 1000))
def test_later_tokens_change_nothing_earlier(place: int, seed: int) -> None:
    """A token changed at `place` leaves every logit before it, and every other sequence, as it was."""
    first, second = random_ids([40, 12], seed)
    before = MODEL(Packed.join([first, second]))
    changed = [*first]
    changed[place] = 6 + (first[place] - 5) % (VOCAB - 6)
    after = MODEL(Packed.join([changed, second]))
    close(after[:place], before[:place])
    close(after[40:], before[40:])
    assert (after[place] - before[place]).abs().max() > 1e-6


@pytest.mark.parametrize("model", [MODEL, FULL], ids=["block", "full"])
@pytest.mark.parametrize("place", [0, 15, 40, 63, 64])
def test_later_tokens_change_no_earlier_gradient(model: K3, place: int) -> None:
    """What is read at or before `place` sends the same gradient to every parameter and input, gates, decay and router
    included, whatever tokens follow."""
    first, second = random_ids([80, 20], seed=place)
    weights_TV = torch.randn(100, VOCAB, dtype=torch.float64)
    weights_TV[place + 1 : 80] = 0
    changed = [*first[: place + 1], *random_ids([79 - place], seed=99)[0]]
    want = gradients(model, Packed.join([first, second]), weights_TV)
    got = gradients(model, Packed.join([changed, second]), weights_TV)
    for name, value in want.items():
        close(got[name], value)
        assert name.startswith(("layers.0.mix_query", "mtp.")) or value.any(), name


def test_gradients_are_causal() -> None:
    """What is read at or before t sends no gradient to inputs after t; to inputs at or before t it does."""
    packed = Packed.join(random_ids([80, 20]))
    x_TD = MODEL.inputs(packed).detach()
    for place in (0, 15, 16, 40, 63, 64, 78):
        x_TD.requires_grad_()
        h_TD = MODEL.backbone(x_TD, packed.cu_seqlens)
        (grad_TD,) = torch.autograd.grad(h_TD[: place + 1].square().sum(), x_TD)
        assert grad_TD[place + 1 :].abs().max() <= 1e-11
        assert grad_TD[: place + 1].abs().amax(1).min() > 1e-6


@st.composite
def splits(draw: st.DrawFn) -> tuple[list[int], list[list[int]]]:
    """(lengths of three sequences, how many tokens each brings in each pass; passes may bring none or one)."""
    lengths = draw(st.lists(st.integers(1, 70), min_size=3, max_size=3))
    left, passes = list(lengths), []
    while any(left):
        taken = [min(n, draw(st.sampled_from([0, 1, 1, 2, 3, 5, 16, 40]))) for n in left]
        left = [n - k for n, k in zip(left, taken)]
        passes.append(taken)
        if len(passes) == 12:
            passes.append(left)
            break
    return lengths, passes


@settings(max_examples=12)
@given(splits(), st.sampled_from(["block", "full"]))
def test_any_split_through_the_cache_equals_one_pass(plan: tuple[list[int], list[list[int]]], mode: str) -> None:
    """Prefill in pieces, alone or beside decoding sequences, gives the logits and the states of one pass."""
    (lengths, passes), model = plan, MODEL if mode == "block" else FULL
    rows = random_ids(lengths, seed=7)
    with torch.no_grad():
        want = model(Packed.join(rows)).split(lengths)
    cache, parts, done = model.new_cache(3), [[], [], []], [0, 0, 0]
    for taken in passes:
        pieces = [row[start : start + count] for row, start, count in zip(rows, done, taken)]
        for n, part in enumerate(model(Packed.join(pieces), cache).split(taken)):
            parts[n].append(part)
        done = [start + count for start, count in zip(done, taken)]
        assert cache.lengths == done
    for n in range(3):
        close(torch.cat(parts[n]), want[n])
    whole = model.new_cache(3)
    model(Packed.join(rows), whole)
    for got, expected in zip(states(cache), states(whole), strict=True):
        close(got, expected)


def test_float32_split_equals_one_pass_with_equal_routing() -> None:
    """In float32 the same holds at the golden tolerance, and the same experts are chosen."""
    model = tiny_model(dtype=torch.float32)
    (row,), whole = random_ids([50]), Recorder()
    want = model(Packed.join([row]), trace=whole)
    cache, parts = model.new_cache(1), []
    for start, end in ((0, 20), (20, 21), (21, 22), (22, 50)):
        recorder = Recorder()
        parts.append(model(Packed.join([row[start:end]]), cache, recorder))
        for i, routes in recorder.routes.items():
            assert torch.equal(routes.expert_ids_Tk, whole.routes[i].expert_ids_Tk[start:end])
    torch.testing.assert_close(torch.cat(parts), want, atol=1e-3, rtol=0)


def test_float32_packed_equals_separate_with_equal_routing() -> None:
    """In float32 at the golden tolerance, and every token goes to the same experts."""
    model, rows, together = tiny_model(dtype=torch.float32), random_ids([5, 0, 70, 1, 17]), Recorder()
    logits, start = model(Packed.join(rows), trace=together), 0
    for row in rows:
        alone, here = Recorder(), slice(start, start + len(row))
        want = model(Packed.join([row]), trace=alone)
        torch.testing.assert_close(logits[here], want, atol=1e-3, rtol=0)
        for i, routes in alone.routes.items():
            assert torch.equal(together.routes[i].expert_ids_Tk[here], routes.expert_ids_Tk)
        start += len(row)


@pytest.mark.parametrize(("left", "right"), [(0, 0), (1, 0), (3, 0), (4, 0), (5, 0), (0, 5), (2, 3)])
@pytest.mark.parametrize("batch", [1, 2])
def test_padding_leaves_no_trace(left: int, right: int, batch: int) -> None:
    """K08: a 6-token prompt padded on either side, alone and beside an 11-token prompt, then 3 tokens decoded."""
    prompt, other = random_ids([9, 14], seed=3)
    width = 11 if batch == 2 else 6 + left + right
    ids, mask = torch.full((batch, max(width, 6 + left + right)), 3), torch.zeros(batch, max(width, 6 + left + right))
    ids[0, left : left + 6], mask[0, left : left + 6] = torch.tensor(prompt[:6]), 1
    if batch == 2:
        ids[1, :11], mask[1, :11] = torch.tensor(other[:11]), 1
    alone, padded = MODEL.new_cache(1), MODEL.new_cache(batch)
    want = MODEL(Packed.join([prompt[:6]]), alone)
    packed = Packed.from_padded(ids, mask)
    got_BTV = packed.to_padded(MODEL(packed, padded))
    close(got_BTV[0, left : left + 6], want)
    assert not got_BTV[0, :left].any() and not got_BTV[0, left + 6 :].any()
    check_first_sequence(alone, padded)
    for t in range(6, 9):
        want = MODEL(Packed.join([prompt[t : t + 1]]), alone)
        step = [prompt[t : t + 1], other[t + 5 : t + 6]][:batch]
        close(MODEL(Packed.join(step), padded)[:1], want)
    check_first_sequence(alone, padded)


def check_first_sequence(alone: DenseCache, padded: DenseCache) -> None:
    """State, convolution windows and latents of sequence 0 are those of the prompt alone."""
    for one, many in zip(alone.layers, padded.layers, strict=True):
        if isinstance(one, KdaCache):
            assert isinstance(many, KdaCache)
            close(many.state_NHKV[:1], one.state_NHKV)
            for got, want in zip(many.windows, one.windows):
                close(got[:1], want)
        else:
            close(many.latents()[0], one.latents()[0])


def test_gradients_at_padding_are_zero_and_finite() -> None:
    """K08: the padding embedding gets no gradient; a token whose q and k are exactly zero gets a finite one."""
    model = tiny_model()
    with torch.no_grad():
        model.embed.weight[3] = 0.0
    ids = torch.tensor([[3, 3, 3, 10, 11, 12], [20, 21, 22, 23, 24, 25]])
    mask = torch.tensor([[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    for packed, padded in ((Packed.from_padded(ids, mask), True), (Packed.join([[3, 3, 10], [3]]), False)):
        grads = gradients(model, packed)
        assert all(torch.isfinite(grad).all() for grad in grads.values())
        assert bool(grads["embed.weight"][3].any()) is not padded


def test_image_positions_have_no_label_and_the_rest_does() -> None:
    """The loss is the mean cross-entropy of the next text token inside each sequence."""
    rows = [[7, MEDIA, 8, 9, 10], [11, 12]]
    packed = Packed.join(rows, images=[random_image((1, 4, 4))])
    logits_TV = MODEL(packed)
    assert len(logits_TV) == 10  # 7, four image tokens, 8, 9, 10; 11, 12
    want = [(4, 8), (5, 9), (6, 10), (8, 12)]
    lm = torch.stack([F.cross_entropy(logits_TV[t], torch.tensor(label)) for t, label in want]).mean()
    losses = MODEL.loss(packed)
    close(losses.lm, lm)
    assert int(losses.num_tokens) == 4 and losses.mtp is not None
    close(losses.total, losses.lm + 0.1 * losses.mtp)
    close(MODEL.loss(packed, mtp_loss_weight=0.5).total, losses.lm + 0.5 * losses.mtp)


def test_loss_without_any_label_is_zero() -> None:
    """Single tokens have nothing to predict: loss 0, gradients finite."""
    losses = MODEL.loss(Packed.join([[7], [8]]))
    assert float(losses.total.detach()) == 0.0 and int(losses.num_tokens) == 0
    losses.total.backward()
    assert all(torch.isfinite(p.grad).all() for p in MODEL.parameters() if p.grad is not None)
    MODEL.zero_grad()


def test_every_part_gets_a_gradient() -> None:
    """One training loss with an image reaches every parameter but the three that are inert by design."""
    model = tiny_model()
    rows = [[*random_ids([40])[0], MEDIA, *random_ids([40], seed=5)[0]]]
    model.loss(Packed.join(rows, images=[random_image((2, 4, 6))])).total.backward()
    without = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    inert = ("layers.0.mix_query.", "mtp.layer.mix_query.", "mtp.layer.ffn_query.")
    assert {name for name in without if not name.startswith(inert)} == set()
    assert len(without) == 6


def test_bfloat16_keeps_what_must_stay_float32() -> None:
    """Decay, convolution, KDA output norm and router bias stay float32, built so or converted; the model runs."""
    kept = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "router.bias")
    built = K3.build(tiny_config(), seed=3, dtype=torch.bfloat16)
    converted = K3.build(tiny_config(), seed=3).to(torch.bfloat16)
    for (name, one), (_, two) in zip(built.state_dict().items(), converted.state_dict().items(), strict=True):
        assert one.dtype == two.dtype == (torch.float32 if name.endswith(kept) else torch.bfloat16), name
        assert torch.equal(one, two), name
    packed = Packed.join([[7, MEDIA, 8, 9]], images=[random_image((1, 2, 2))])
    assert built(packed).dtype == torch.bfloat16
    built.loss(packed).total.backward()
    assert all(torch.isfinite(p.grad).all() for p in built.parameters() if p.grad is not None)
    cache = built.new_cache(1)
    built(packed, cache)
    assert {layer.state_NHKV.dtype for layer in cache.layers if isinstance(layer, KdaCache)} == {torch.float32}
    assert built(Packed.join([[9]]), cache).isfinite().all()
    assert all(p.dtype == torch.float64 for p in built.double().parameters())


def test_empty_batch() -> None:
    """No tokens give no logits, with and without sequences."""
    for rows in ([], [[]], [[], []]):
        assert MODEL(Packed.join(rows)).shape == (0, VOCAB)
        assert float(MODEL.loss(Packed.join(rows)).total.detach()) == 0.0


def test_errors_name_what_is_wrong() -> None:
    """Ids beyond the vocabulary, images without a tower or placeholder, a cache of another size."""
    with pytest.raises(ValueError, match="token id 61 lies outside the vocabulary of 61"):
        MODEL(Packed.join([[VOCAB]]))
    with pytest.raises(ValueError, match="token id -1 lies outside the vocabulary of 61"):
        MODEL(Packed(torch.tensor([3, -1]), torch.tensor([0, 2], dtype=torch.int32)))
    blind = tiny_model(tiny_config(vision=False))
    with pytest.raises(ValueError, match="no vision tower"):
        blind(Packed.join([[MEDIA]], images=[random_image((1, 2, 2))]))
    with pytest.raises(ValueError, match="placeholders"):
        MODEL(Packed.join([[7]], images=[random_image((1, 2, 2))]))
    with pytest.raises(ValueError, match="holds 2 sequences, the batch has 1"):
        MODEL(Packed.join([[7]]), MODEL.new_cache(2))
    for batch in ([[1, 2]], torch.tensor([[1, 2]]), {"input_ids": [1]}):
        for call in (MODEL, MODEL.loss, MODEL.hidden):
            with pytest.raises(TypeError, match=r"reads a Packed, such as Packed\.join"):
                call(batch)


def test_text_model_reads_the_placeholder_as_a_token() -> None:
    """Without a tower the id that stands for images elsewhere is a token: it has logits and a label."""
    blind = tiny_model(tiny_config(vision=False))
    packed = Packed.join([[7, MEDIA, 9]])
    assert blind(packed).shape == (3, VOCAB)
    assert int(blind.loss(packed).num_tokens) == 2
    with pytest.raises(ValueError, match="placeholder"):
        MODEL(packed)
