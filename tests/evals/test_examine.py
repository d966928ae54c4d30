"""Caption test, samples, anatomy and targets on small models, some of them made so that the answer is known."""

from __future__ import annotations

import json
import math

import pytest
import torch
from small_models import small_model, small_run

from openk3.data.docstring_chat import exchanges
from openk3.data.documents import Encoder, Record
from openk3.data.local_text import TextFile
from openk3.data.packing import Span, Window, pack
from openk3.data.render import KINDS, render
from openk3.evals.anatomy import bias_spread, look_inside
from openk3.evals.byte_model import ByteModel
from openk3.evals.caption import CaptionScore, by_kind, caption_loss, caption_scores, write_caption
from openk3.evals.examine import (
    Subject,
    examine_captions,
    examine_chat,
    examine_samples,
    examine_text,
    held_out_windows,
    targets,
    unigram_entropy,
)
from openk3.evals.samples import Sample, continue_all, python_share, sample_texts, tokenises
from openk3.inputs.packed import Packed
from openk3.inputs.tokenizer import Tokenizer
from openk3.model.k3 import K3
from openk3.train.pretrain import fit_to_tokenizer

TEXT = '"""A module of words."""\n\ndef add(a, b):\n    """Return the sum of two numbers."""\n    return a + b\n' * 8


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train([TEXT, 'bar([1, 2, 3], "red") plot pie text solid green blue dots svg circle'], 640)


@pytest.fixture(scope="module")
def subject(tokenizer: Tokenizer) -> Subject:
    config = fit_to_tokenizer(small_run(), tokenizer).model
    model = K3.build(config, seed=1)
    held_out = [TextFile(f"{n}.py", TEXT + f"x = {n}\n", len(TEXT) + 6) for n in range(3)]
    encoder = Encoder(tokenizer, vision=config.vision)
    return Subject(model, encoder, held_out, ByteModel.fit([TEXT]), window=128)


def test_model_and_byte_model_are_scored_on_the_same_bytes(subject):
    data = examine_text(subject)
    assert data["held_out_bytes"] == sum(file.num_bytes for file in subject.held_out)
    assert data["byte_model"] == subject.byte_model.bits_per_byte(file.text for file in subject.held_out)
    # An untrained model is close to uniform over the vocabulary.
    tokens = sum(len(subject.encoder.tokenizer.encode(file.text)) for file in subject.held_out)
    uniform = tokens * math.log2(subject.model.config.text.vocab_size) / data["held_out_bytes"]
    assert data["bits_per_byte"] == pytest.approx(uniform, rel=0.1)
    assert data["mtp_loss"] == pytest.approx(math.log(subject.model.config.text.vocab_size), rel=0.1)
    assert 0 < data["unigram_entropy"] < math.log(subject.model.config.text.vocab_size)
    assert json.loads(json.dumps(data)) == data


def test_unigram_entropy_is_that_of_the_targets():
    batch = Packed.join([[9, 1, 2, 1, 2]])  # targets 1 2 1 2
    assert unigram_entropy([batch]) == pytest.approx(math.log(2))
    assert unigram_entropy([batch, Packed.join([[9, 1, 1, 1, 1]])]) == pytest.approx(
        -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    )


def test_captions_are_scored_under_both_images_over_the_same_tokens(subject):
    items = [render(0, i, held_out=True) for i in range(60)]
    scores = caption_scores(subject.model, subject.encoder, items)
    assert [score.kind for score in scores] == [item.kind for item in items]
    for score, item in zip(scores, items):
        assert score.num_tokens == len(subject.encoder.tokenizer.encode(item.text)) + 1
        assert score.right != score.wrong
    # One document by itself: the sum over its targets, as the model's own loss gives it.
    document = subject.encoder.encode(Record({"image": items[7].image, "text": items[7].text}, "x"))
    packed = pack([Window(document, Span(0, len(document), int(document.expanded[-1])))], subject.encoder.media_pad)
    with torch.no_grad():
        losses = subject.model.loss(packed)
    assert scores[7].right == pytest.approx(float(losses.lm * losses.num_tokens), rel=1e-5)


def test_a_model_that_ignores_images_gains_nothing(subject):
    model = K3.build(subject.model.config, seed=2)
    with torch.no_grad():
        model.projector.post_norm.weight.zero_()
    items = [item for item in (render(0, i) for i in range(80)) if item.image.size == (56, 56)]
    whole = caption_loss(caption_scores(model, subject.encoder, items))
    assert whole.reduction == pytest.approx(0.0, abs=1e-6)


def test_caption_losses_are_token_means_by_kind():
    scores = [CaptionScore("a", 2.0, 4.0, 2), CaptionScore("a", 1.0, 2.0, 1), CaptionScore("b", 6.0, 6.0, 3)]
    whole, kinds = caption_loss(scores), by_kind(scores)
    assert (whole.right, whole.wrong) == (1.5, 2.0)
    assert whole.reduction == 0.25
    assert (kinds["a"].right, kinds["a"].wrong, kinds["b"].reduction) == (1.0, 2.0, 0.0)


def test_one_text_alone_has_no_other_image(subject):
    item = render(0, 0)
    with pytest.raises(ValueError, match="have one text"):
        caption_scores(subject.model, subject.encoder, [item, item])


def test_examined_captions_show_every_kind(subject):
    data = examine_captions(subject, 80)
    assert set(data["by_kind"]) == set(KINDS)
    assert len(data["items"]) == 12
    assert all(card["image"].startswith("data:image/png;base64,") for card in data["items"])
    assert json.loads(json.dumps(data)) == data


def test_writing_a_caption_stops_by_itself_or_at_the_limit(subject):
    item = render(0, 3)
    text = write_caption(subject.model, subject.encoder, item, max_tokens=5)
    assert text == write_caption(subject.model, subject.encoder, item, max_tokens=5)
    assert "[EOS]" not in text


def test_continuing_many_prompts_equals_continuing_each(subject):
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11]]

    def greedy(logits_NV):
        return logits_NV.argmax(-1)

    together = continue_all(subject.model, prompts, max_tokens=8, stop_id=-1, pick=greedy)
    for prompt, ids in zip(prompts, together):
        assert continue_all(subject.model, [prompt], max_tokens=8, stop_id=-1, pick=greedy) == [ids]
    stop = together[0][2]
    stopped = continue_all(subject.model, prompts, max_tokens=8, stop_id=stop, pick=greedy)
    for free, ids in zip(together, stopped):
        assert ids == (free[: free.index(stop) + 1] if stop in free else free)


def test_sampled_image_placeholder_is_only_a_token(subject):
    placeholder = subject.model.config.media_placeholder_token_id

    def pick(logits_NV):
        return torch.full((len(logits_NV),), placeholder)

    assert continue_all(subject.model, [[1, 2]], max_tokens=3, stop_id=-1, pick=pick) == [[placeholder] * 3]


def test_samples_are_the_same_for_a_seed(subject, tokenizer):
    def texts(seed):
        return sample_texts(subject.model, tokenizer, ["def ", ""], max_tokens=6, seed=seed)

    assert texts(1) == texts(1) != texts(2)
    assert [s.prompt for s in texts(1)] == ["def ", ""]


@pytest.mark.parametrize(
    "line",
    [
        "x = 1",
        "    return f(a,",
        "]) + 3",
        "'''open",
        "if x:",
        "# any words, don't!",
        "a b c",
        ')"""',
        "class A(B):",
        "}",
    ],
)
def test_lines_of_programs_tokenise(line):
    assert tokenises(line)


@pytest.mark.parametrize("line", ["x = 'open", "a $ b", "what? no", 'print("a)', "x = 1 ! 2 ?"])
def test_other_lines_do_not(line):
    assert not tokenises(line)


def test_python_share_counts_complete_lines_that_are_not_blank():
    samples = [
        Sample("def f(", "x):\n\n    y = $\nhalf a li?", False),  # "def f(x):" and "y = $"
        Sample("", "z = 1\nw = ?", True),  # both, because the model ended there
    ]
    assert python_share(samples) == 2 / 4
    assert python_share([Sample("", "half", False)]) == 0.0


def test_examined_samples_start_from_nothing_and_from_held_out_text(subject):
    data = examine_samples(subject, 4, 6)
    prompts = [sample["prompt"] for sample in data["samples"]]
    assert prompts[:2] == ["", ""] and all(TEXT.startswith(prompt) and len(prompt) > 200 for prompt in prompts[2:])
    assert 0 <= data["python_share"] <= 1


def test_examined_chat_asks_about_held_out_docstrings(subject):
    data = examine_chat(subject, 2, 5)
    asked = {exchange.question for file in subject.held_out for exchange in exchanges(file)}
    questions = [turn["question"] for turn in data["chat"]]
    assert len(set(questions)) == 2 and set(questions) <= asked
    assert data["chat_closed"] in (0.0, 0.5, 1.0)


def test_look_inside_counts_every_token_and_weight(subject):
    batches = held_out_windows(subject)[:3]
    inside = look_inside(subject.model, batches)
    assert inside["expert_load"]["layers"] == [2]
    (load,) = inside["expert_load"]["load"]
    assert sum(load) / len(load) == pytest.approx(1.0)
    depth = inside["depth"]
    assert depth["sources"][0] == "embed" and depth["reads"][-1] == "output"
    for row in depth["weights"]:
        assert len(row) == len(depth["sources"])
        assert sum(w for w in row if w is not None) == pytest.approx(1.0)
    (decay,) = inside["decay"]
    # The gate lies in (-5, 0): no channel halves in less than ln 2 / 5 tokens.
    assert decay["name"] == "layer 1"
    assert math.log(2) / 5 <= decay["low"] <= decay["middle"] <= decay["high"]
    assert json.loads(json.dumps(inside)) == inside


def test_bias_spread_is_the_widest_layer():
    model = K3.build(small_model(), seed=0)
    assert bias_spread(model) == 0.0
    with torch.no_grad():
        model.layers[1].ffn.router.bias.copy_(torch.tensor([0.1, -0.2, 0.0, 0.1]))
    assert bias_spread(model) == pytest.approx(0.3)


REPORT = {
    "bits_per_byte": 1.7,
    "byte_model": [4.7, 3.5, 2.6, 2.05, 1.9, 1.8],
    "captions": {"right": 1.0, "wrong": 2.0},
    "mtp_loss": 2.5,
    "unigram_entropy": 6.0,
    "python_share": 0.9,
    "expert_load": {"layers": [2, 3], "load": [[0.9, 1.1], [1.0, 1.0]]},
}


def test_all_targets_met_and_missed():
    assert all(row["met"] for row in targets(REPORT, 8, True))
    assert len(targets(REPORT, 8, True)) == 5
    captions, load = {"right": 1.5, "wrong": 2.0}, {"layers": [2], "load": [[0.7, 1.3]]}
    bad = {"bits_per_byte": 1.9, "captions": captions, "mtp_loss": 7.0, "python_share": 0.5, "expert_load": load}
    assert not any(row["met"] for row in targets({**REPORT, **bad}, 8, True))
    assert not targets({**REPORT, "bits_per_byte": math.nan}, 8, True)[0]["met"]


def test_shorter_runs_have_a_lower_bar_on_text_and_other_text_none_on_python():
    bars = [targets(REPORT, minutes, False)[0]["target"] for minutes in (1, 4, 8)]
    assert [bar.split(",")[0] for bar in bars] == ["below 2.60", "below 2.05", "below 1.80"]
    assert not any("Python" in row["name"] for row in targets(REPORT, 8, False))
    assert len(targets({**REPORT, "mtp_loss": None}, 8, False)) == 3
