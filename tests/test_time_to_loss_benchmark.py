"""Time to loss: crossings and ratios, a baseline of equal cost, and runs that go on where they were cut off."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import all_mla  # noqa: E402
import loss_curves  # noqa: E402
import time_to_loss  # noqa: E402
import token_file  # noqa: E402

from openk3.config.model import ModelConfig  # noqa: E402
from openk3.inputs.packed import Packed  # noqa: E402
from openk3.model.accounting import account  # noqa: E402
from openk3.train.flops import model_flops  # noqa: E402

CASES = [(all_mla.text_config(4096), time_to_loss.Sizes().length), (all_mla.text_config(1024, small=True), 64)]


def curve(*losses: float, step: float = 10.0) -> list[dict[str, float]]:
    """Points every `step` tokens; a token takes two seconds and three FLOPs."""
    places = [(n + 1) * step for n in range(len(losses))]
    return [{"loss": y, "tokens": x, "seconds": 2 * x, "flops": 3 * x} for x, y in zip(places, losses)]


def run(model: str, seed: int, lr: float, losses: list[float]) -> dict:
    """A finished run."""
    return {"model": model, "seed": seed, "lr": lr, "finished": True, "curve": curve(*losses), "step_seconds": 0.1}


@pytest.mark.parametrize(
    ("losses", "level", "tokens"),
    [
        ((4.0, 3.0, 2.0), 2.5, 25.0),  # half-way between the second point and the third
        ((4.0, 3.0, 2.0), 3.0, 20.0),  # at a point
        ((4.0, 3.0, 2.0), 5.0, 10.0),  # before the first point, which is all that is known
        ((4.0, 3.0, 2.0), 1.9, None),
        ((4.0, 2.0, 3.0, 1.0), 2.5, 17.5),  # the first time, though it rises again
    ],
)
def test_crossing(losses: tuple[float, ...], level: float, tokens: float | None) -> None:
    """Straight lines between points, the first time that the loss comes down to the level."""
    assert loss_curves.crossing(curve(*losses), level, "tokens") == tokens
    seconds = loss_curves.crossing(curve(*losses), level, "seconds")
    assert seconds is None if tokens is None else seconds == 2 * tokens


def test_advantage() -> None:
    """Above 1 for the run that needs less, its inverse seen from the other; a flat end is not charged."""
    fast, slow = curve(4.0, 2.0, 1.0), curve(4.0, 3.0, 2.0, step=20.0)
    won = loss_curves.advantage(fast, slow)
    assert (won.level, won.tokens, won.flops, won.seconds) == (2.0, 3.0, 3.0, 3.0)
    lost = loss_curves.advantage(slow, fast)
    assert lost.level == 2.0 and lost.tokens == pytest.approx(1 / 3)
    flat = loss_curves.advantage(curve(4.0, 2.0, 1.0), curve(4.0, 2.0, 2.0, 2.0))
    assert flat.tokens == 1.0
    with pytest.raises(ValueError, match="at least one point"):
        loss_curves.advantage([], fast)


def test_summary_takes_each_model_at_its_own_rate() -> None:
    """Chosen on the first seed; other runs are kept in the results and have no say."""
    runs = [run("k3", 0, 1.0, [4, 2, 1]), run("k3", 0, 2.0, [4, 3, 2]), run("k3", 1, 1.0, [4, 2.5, 1.5])]
    runs += [run("mla", 0, 1.0, [4, 3, 3]), run("mla", 0, 2.0, [4, 3, 2]), run("mla", 1, 2.0, [4, 3, 2])]
    found = loss_curves.summary(runs)
    assert found["rates"] == {"k3": 1.0, "mla": 2.0}
    assert found["last_loss"]["k3"] == {"mean": 1.25, "deviation": 0.125**0.5, "values": [1.0, 1.5]}
    ratio = found["advantage"]["mla"]
    assert ratio["seeds"] == [0, 1] and ratio["tokens"]["values"] == [pytest.approx(1.5), pytest.approx(1.2)]
    assert loss_curves.mean_curve(runs, "k3", "tokens")[-1] == (30.0, 1.25)
    svg = loss_curves.plot(runs)
    assert svg.startswith("<svg") and "<style>" in svg and svg.count("<polyline") == 2


@pytest.mark.parametrize(("config", "length"), CASES)
def test_the_baseline_costs_what_the_k3_costs(config: ModelConfig, length: int) -> None:
    """FLOPs a token as training logs count them, and stored parameters, within 2 %; all of its layers are MLA."""
    other = all_mla.matched(config, length)
    assert set(other.text.layer_kinds()) == {"mla"} and set(config.text.layer_kinds()) == {"kda", "mla"}
    windows = Packed.join([torch.zeros(length, dtype=torch.int64)] * 2)
    ours, theirs = (model_flops(account(each), [windows]) / (2 * length) for each in (config, other))
    theirs -= account(other).training_flops(length).depth  # plain residuals read no depth
    assert theirs == pytest.approx(all_mla.training_flops(other, length, plain=True))
    assert ours == pytest.approx(all_mla.training_flops(config, length, plain=False))
    assert abs(theirs / ours - 1) < all_mla.TOLERANCE
    assert abs(account(other).total / account(config).total - 1) < all_mla.TOLERANCE


def test_lengths_without_a_match_are_refused() -> None:
    """Attention over long sequences costs MLA so much that whole layers and the dense layer cannot make up for it."""
    with pytest.raises(ValueError, match="no all-MLA model within 2%"):
        all_mla.matched(all_mla.text_config(1024), 8192)


def built(name: str) -> all_mla.K3:
    """A tiny model in float64."""
    config = all_mla.model_config(name, 1024, 64, small=True)
    return all_mla.model_class(name).build(config, seed=3, dtype=torch.float64)


def test_plain_residuals() -> None:
    """A running sum that every part reads through its own norm, and no depth queries anywhere."""
    model = built("mla")
    assert not any("query" in name for name, _ in model.named_parameters())
    packed = Packed.join([list(range(9)), list(range(5))])
    x_TD = model.inputs(packed)
    h_TD = model.hidden(packed)
    sequences = all_mla.Sequences(packed.cu_seqlens)
    for layer in model.layers:
        x_TD = x_TD + layer.mixer(layer.mix_norm(x_TD), sequences)
        x_TD = x_TD + layer.ffn(layer.ffn_norm(x_TD))
    torch.testing.assert_close(h_TD, x_TD)
    h_TD.square().sum().backward()
    assert all(parameter.grad is not None for name, parameter in model.named_parameters() if "lm_head" not in name
               and name != "norm.weight")  # fmt: skip
    with pytest.raises(ValueError, match="continues no cache"):
        model.hidden(packed, model.new_cache(2))


def test_rotation_knows_distances_alone() -> None:
    """Scores of rotated pairs depend on how far they are apart, and places begin anew with each sequence."""
    cos_TR, sin_TR = all_mla.rotation(torch.tensor([0, 6, 10], dtype=torch.int32), 10, 8)
    assert torch.equal(cos_TR[:4], cos_TR[6:]) and torch.equal(sin_TR[:4], sin_TR[6:])
    generator = torch.Generator().manual_seed(0)
    q_R, k_R = torch.randn(2, 8, generator=generator)
    turned_q, turned_k = (all_mla.rotate(x.expand(6, 8), cos_TR[:6], sin_TR[:6]) for x in (q_R, k_R))
    scores = turned_q @ turned_k.T
    for distance in range(-5, 6):
        line = scores.diagonal(distance)
        torch.testing.assert_close(line, line[:1].expand_as(line))
    assert float((scores[0] - scores[0, 0]).abs()[1:].min()) > 1e-3


def test_rotary_model() -> None:
    """Equal to the one without positions where every token is the first of its sequence, and nowhere else."""
    plain, rotary = built("mla"), built("mla-rotary")
    alone, together = Packed.join([[n] for n in range(5)]), Packed.join([list(range(5))])
    torch.testing.assert_close(rotary.hidden(alone), plain.hidden(alone))
    assert float((rotary.hidden(together) - plain.hidden(together)).abs().max().detach()) > 1e-6


def test_batches_are_epochs_in_an_order_of_their_own() -> None:
    """Every window once an epoch; the same for all models of a seed, another order for another seed."""
    sizes = time_to_loss.Sizes(length=4, micro_batch=8, micro_batches=2)
    windows_NT = torch.arange(48).view(12, 4)

    def steps(seed: int, count: int) -> list[int]:
        parts = [part for step in range(count) for part in time_to_loss.batches(windows_NT, sizes, seed, step)]
        assert all(part.cu_seqlens.tolist() == [0, 4, 8] for part in parts)
        return torch.cat([part.token_ids_T for part in parts]).view(-1, 4)[:, 0].tolist()

    epoch, again = steps(0, 3), steps(0, 6)[12:]
    assert sorted(epoch) == sorted(again) == list(range(0, 48, 4)) and epoch != again
    assert steps(0, 3) == epoch != steps(1, 3)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> token_file.Tokens:
    """Ids of some files that were made up."""
    folder = tmp_path_factory.mktemp("text")
    for n in range(80):
        words = [f"value_{n} = {n * line % 97}  # the remainder of {n} times {line}\n" for line in range(60)]
        (folder / f"file{n}.py").write_text("".join(words), encoding="utf-8")
    (folder / "again.py").write_text((folder / "file7.py").read_text(encoding="utf-8"), encoding="utf-8")
    (folder / "other.bin").write_bytes(b"\0" * 64)
    (folder / "bytes.txt").write_bytes(b"\xff" * 64)
    names = [name for name, _ in token_file.documents({"text": folder})]
    assert len(names) == len(set(names)) and "text/other.bin" not in names and "text/bytes.txt" not in names
    assert len({"text/again.py", "text/file7.py"} & set(names)) == 1
    return token_file.gather({"text": folder}, 200_000, 600)


def test_token_file(tokens: token_file.Tokens, tmp_path: Path) -> None:
    """What is read is what was written; a damaged file is refused."""
    path = tmp_path / "tokens.xz"
    token_file.write(path, tokens)
    found = token_file.read(path)
    assert torch.equal(found.train_T, tokens.train_T) and torch.equal(found.held_out_T, tokens.held_out_T)
    assert found.vocab == 600 and int(found.train_T.max()) < 600 and found.held_out_bytes_per_token > 1
    head = dict(tokens.head) | {"sha256": "0"}
    with token_file.lzma.open(path, "wb") as file:
        file.write(json.dumps(head).encode() + b"\n")
    with pytest.raises(ValueError, match="damaged"):
        token_file.read(path)


def test_a_whole_comparison_that_is_resumed(
    tokens: token_file.Tokens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plan, rates, runs and report; called again nothing is trained, and a missing run alone is made."""
    monkeypatch.setattr(time_to_loss, "gather", lambda *given: tokens)
    monkeypatch.setattr(time_to_loss, "TIMED_STEPS", 1)
    words = ["--device", "cpu", "--small", "--out", str(tmp_path), "--models", "k3", "mla", "--seeds", "0", "1"]
    words += ["--rates", "2e-3", "8e-3", "--steps", "2"]
    assert time_to_loss.main(words) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert len(results["runs"]) == 6 and results["gpu"] == "CPU" and results["plan"]["steps"] == 2
    assert set(results["summary"]["advantage"]["mla"]) == {"tokens", "flops", "seconds", "level", "seeds"}
    for each in results["runs"]:
        assert each["finished"] and each["curve"][-1]["tokens"] == 2 * time_to_loss.TRIAL.batch_tokens
        assert each["curve"][-1]["seconds"] == 2 * results["plan"]["step_seconds"][each["model"]]
    text = (tmp_path / "results.md").read_text()
    assert "| over all MLA |" in text and (tmp_path / "loss.svg").read_text().startswith("<svg")
    real, calls = time_to_loss.train_step, []
    monkeypatch.setattr(time_to_loss, "train_step", lambda *given: calls.append(1) or real(*given))
    assert time_to_loss.main(words) == 0 and not calls
    lost = next(path for path in tmp_path.glob("mla-seed1-*-steps2.json"))
    before = json.loads(lost.read_text())
    lost.unlink()
    assert time_to_loss.main(words) == 0 and len(calls) == 2
    after = json.loads(lost.read_text())
    assert [p["loss"] for p in after["curve"]] == [p["loss"] for p in before["curve"]]


def test_what_cannot_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By one line and status 2."""
    for words, message in (
        (["--device", "cpu"], "tokens: name a file"),
        (["nowhere.xz", "--device", "cpu"], "no such file: nowhere.xz"),
        (["--device", "cpu", "--small", "--models", "k4"], "invalid choice: 'k4'"),
    ):
        with pytest.raises(SystemExit) as end:
            time_to_loss.main([*words, "--out", str(tmp_path)])
        assert end.value.code == 2 and message in capsys.readouterr().err
