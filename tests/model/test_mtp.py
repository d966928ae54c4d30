"""The MTP layer: what it is given and must predict, boundaries, drafting, and its trace."""

from __future__ import annotations

import pytest
import torch
from tiny_model import MEDIA, close, random_ids, random_image, tiny_config, tiny_model
from torch.nn import functional as F

from openk3 import Packed
from openk3.model.cache import Sequences
from openk3.model.mtp import next_token_pairs
from openk3.model.trace import Recorder

MODEL = tiny_model()


def by_definition(rows: list[list[int]]) -> torch.Tensor:
    """Mean loss of predicting token t + 2 from h_t and token t + 1, sequence by sequence, as a plain residual layer."""
    losses, mtp = [], MODEL.mtp
    assert mtp is not None
    for row in rows:
        if len(row) < 3:
            continue
        h_TD = MODEL.hidden(Packed.join([row]))[:-1]
        joined = torch.cat((mtp.enorm(MODEL.embed.weight[row[1:]]), mtp.hnorm(h_TD)), 1)
        x_TD = joined @ mtp.eh_proj.weight.T
        layout = Sequences(torch.tensor([0, len(x_TD)], dtype=torch.int32))
        x_TD = x_TD + mtp.layer.mixer(mtp.layer.mix_norm(x_TD), layout)
        x_TD = x_TD + mtp.layer.ffn(mtp.layer.ffn_norm(x_TD))
        logits_TV = MODEL.lm_head(mtp.norm(x_TD))
        losses += [F.cross_entropy(logits_TV[t], torch.tensor(row[t + 2])) for t in range(len(row) - 2)]
    return torch.stack(losses).mean()


def test_loss_by_definition_and_inside_each_sequence() -> None:
    """Packed sequences of 1, 2, 3 and more tokens, an empty one among them."""
    rows = random_ids([9, 1, 0, 2, 3, 30])
    losses = MODEL.loss(Packed.join(rows))
    assert losses.mtp is not None and losses.num_mtp_tokens is not None
    assert int(losses.num_mtp_tokens) == 7 + 1 + 28
    close(losses.mtp, by_definition(rows))


def test_loss_reaches_the_backbone_and_the_embedding() -> None:
    """h_t is not detached, the embedding and the head are shared."""
    losses = MODEL.loss(Packed.join(random_ids([20])))
    assert losses.mtp is not None
    reached = [MODEL.embed.weight, MODEL.lm_head.weight, MODEL.output_query.proj, MODEL.layers[0].mixer.q_proj.weight]
    for grad in torch.autograd.grad(losses.mtp, reached):
        assert grad.any()
    assert MODEL.norm.weight.grad is None
    (grad,) = torch.autograd.grad(MODEL.loss(Packed.join([[7, 8, 9]])).mtp, MODEL.norm.weight, allow_unused=True)
    assert grad is None  # h_t is taken before the final norm


@pytest.mark.parametrize("place", [2, 15, 16, 39, 64])
def test_later_tokens_change_nothing_earlier(place: int) -> None:
    """The prediction at t reads tokens up to t + 1: a change at `place` moves it from place - 1 on, not before; the
    gradients of what is predicted before are the same too."""
    (row,) = random_ids([70])
    changed = [*row[:place], *random_ids([70 - place], seed=5)[0]]
    changed[place] = 6 + (row[place] - 5) % 55
    logits, gradients = [], []
    for ids in (row, changed):
        packed = Packed.join([ids])
        layout = torch.tensor([0, 69], dtype=torch.int32)
        _, logits_TV = MODEL.draft(MODEL.hidden(packed)[:-1], torch.tensor(ids[1:]), layout)
        reached = [
            p for name, p in MODEL.named_parameters() if name.startswith(("layers.", "mtp.", "embed.", "lm_head"))
        ]
        early = logits_TV[: place - 1].square().sum()
        logits.append(logits_TV.detach())
        gradients.append(torch.autograd.grad(early, reached, allow_unused=True))
    close(logits[1][: place - 1], logits[0][: place - 1])
    assert (logits[1][place - 1] - logits[0][place - 1]).abs().max() > 1e-6
    for before, after in zip(*gradients, strict=True):
        assert (before is None) == (after is None)
        if before is not None:
            close(after, before)


def test_pairs_stop_at_boundaries() -> None:
    """Every position but the last of each sequence."""
    pairs = next_token_pairs(Sequences(torch.tensor([0, 3, 3, 4, 8], dtype=torch.int32)))
    assert pairs.here_T.tolist() == [0, 1, 4, 5, 6]
    assert pairs.sequences.ends == [0, 2, 2, 2, 5]
    assert pairs.sequences.cu_seqlens.dtype == torch.int32
    again = next_token_pairs(Sequences(torch.tensor([0, 3, 3, 4, 8], dtype=torch.int64)))
    assert again.here_T is pairs.here_T  # nothing is copied to a device for a layout that was met before


def test_labels_with_images() -> None:
    """A position predicts the text token two ahead; image positions are never predicted."""
    row = [7, MEDIA, 8, 9]  # expands to 7, two image tokens, 8, 9
    losses = MODEL.loss(Packed.join([row], images=[random_image((1, 2, 4))]))
    assert losses.num_mtp_tokens is not None
    assert int(losses.num_tokens) == 2 and int(losses.num_mtp_tokens) == 2  # 8 and 9


def test_drafting_continues_from_h() -> None:
    """Two draft steps with and without the cache; the second uses the first one's hidden value."""
    (row,) = random_ids([12])
    layout = torch.tensor([0, 11], dtype=torch.int32)
    cache = MODEL.new_cache(1)
    with torch.no_grad():
        h_TD = MODEL.hidden(Packed.join([row]), cache)[:-1]
        next_ids = torch.tensor(row[1:])
        want_h, want_logits = MODEL.draft(h_TD, next_ids, layout)
        got_h, got_logits = MODEL.draft(h_TD, next_ids, layout, cache)
        close(got_h, want_h)
        close(got_logits, want_logits)
        last = int(want_logits[-1].argmax())
        longer_h = torch.cat((h_TD, want_h[-1:]))
        longer_ids = torch.tensor([*row[1:], last])
        want = MODEL.draft(longer_h, longer_ids, torch.tensor([0, 12], dtype=torch.int32))[1][-1:]
        one = torch.tensor([0, 1], dtype=torch.int32)
        close(MODEL.draft(want_h[-1:], torch.tensor([last]), one, cache)[1], want)
    assert cache.mtp is not None and cache.mtp.lengths == [12] and cache.lengths == [12]


def test_trace_counts_each_pair_once() -> None:
    """The router of the MTP layer sees T - N tokens, at the index after the backbone's last layer."""
    recorder = Recorder()
    MODEL.loss(Packed.join(random_ids([9, 5])), trace=recorder)
    assert len(recorder.scores[6]) == 12 and len(recorder.scores[5]) == 14
    assert recorder.max_logits[6].shape == (3,)
    assert (6, "mixer") not in recorder.depths


def test_model_without_mtp() -> None:
    """No layer, no second loss, and drafting says why it cannot."""
    model = tiny_model(tiny_config(num_nextn_predict_layers=0))
    losses = model.loss(Packed.join([[7, 8, 9]]))
    assert losses.mtp is None and losses.total is losses.lm
    assert model.new_cache(1).mtp is None
    with pytest.raises(ValueError, match="no MTP layer"):
        model.draft(torch.zeros(1, 32), torch.tensor([7]), torch.tensor([0, 1]))
