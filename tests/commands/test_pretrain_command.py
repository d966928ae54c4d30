"""`openk3 pretrain`: flags override the recipe, a run can be resumed, and what is wrong is named."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from openk3 import recipes
from openk3.cli import main
from openk3.commands import flags, pretrain
from openk3.commands.errors import UserError
from openk3.config.model import ConfigError
from openk3.config.train import PretrainConfig
from openk3.optim.optimizer import NonFiniteGradient
from openk3.runtime.metrics import read_metrics


def test_every_field_of_the_recipe_is_a_flag() -> None:
    """Nested fields too; what no flag names stays as the recipe has it."""
    words = ["small", "--data", "a", "b", "--optim.lr", "0.5", "--model.text.num-experts", "8", "--seed", "4"]
    parsed = flags.parse("pretrain", [*words, "--data.stages", "0.5", "64", "0.5", "128"])
    expected = recipes.pretrain("small")
    text = dataclasses.replace(expected.model.text, num_experts=8)
    expected = dataclasses.replace(
        expected,
        model=dataclasses.replace(expected.model, text=text),
        data=dataclasses.replace(expected.data, stages=((0.5, 64), (0.5, 128))),
        optim=dataclasses.replace(expected.optim, lr=0.5),
        seed=4,
    )
    assert (parsed.recipe, parsed.data, parsed.config) == ("small", (Path("a"), Path("b")), expected)


def test_help_shows_the_recipe_named_before_it(capsys: pytest.CaptureFixture[str]) -> None:
    """`openk3 pretrain small --help` prints small's values."""
    with pytest.raises(SystemExit) as stop:
        flags.parse("pretrain", ["small", "--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0 and "--steps" in text and f"(default: {recipes.pretrain('small').steps})" in text


def test_run_folder_is_complete(tiny_run: Path) -> None:
    """What the folder promises, and a metrics line per step."""
    assert {path.name for path in tiny_run.iterdir()} >= {"run.json", "metrics.jsonl", "checkpoints", "model"}
    assert (tiny_run / "model" / "tiktoken.model").is_file()
    assert [row["step"] for row in read_metrics(tiny_run / "metrics.jsonl")] == [1, 2]
    assert PretrainConfig.from_json(tiny_run).steps == 2


def test_resume_goes_on_and_flags_still_override(
    tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run may have moved; the folder given is the one that is written."""
    run = shutil.copytree(tiny_run, tmp_path / "moved run")
    assert main(["pretrain", "--resume", str(run), "--steps", "3"]) == 0
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == [1, 2, 3]
    assert f"openk3 chat '{run}'" in capsys.readouterr().out
    assert json.loads((run / "run.json").read_text())["out"] == str(run)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "RECIPE: name one of tiny, pocket, small, medium, k3, or continue a run with --resume RUN"),
        (["tinny", "--data", "x"], "tinny: no such recipe; there are tiny, pocket, small, medium, k3"),
        (["tiny"], "--data: name text files, JSONL files or folders of them to train on"),
        (["--resume", "nowhere"], "nowhere: no such file; expected the run.json of a training run"),
    ],
)
def test_what_is_missing_is_named(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, exit code 2."""
    assert main(["pretrain", *words]) == 2
    assert capsys.readouterr().err == f"openk3: {line}\n"


def test_data_that_does_not_exist_leaves_no_run_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names the path; the folder of the run is not made."""
    monkeypatch.chdir(tmp_path)
    assert main(["pretrain", "tiny", "--data", "not-here.txt", "--out", "run"]) == 2
    assert "not-here.txt" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_resuming_with_nothing_left_says_so(tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps and minutes are those of the whole run: fewer than it has had are none."""
    run = shutil.copytree(tiny_run, tmp_path / "run")
    for words in (["--steps", "1"], ["--minutes", "1e-9"]):
        assert main(["pretrain", "--resume", str(run), *words]) == 0
        assert "nothing left to train" in capsys.readouterr().out


def test_recipe_and_resume_exclude_each_other(tiny_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A resumed run has its own configuration."""
    assert main(["pretrain", "tiny", "--resume", str(tiny_run)]) == 2
    assert "leave RECIPE out" in capsys.readouterr().err


def test_existing_run_is_not_overwritten(tiny_run: Path, small_text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message says what to do instead."""
    assert main(["pretrain", "tiny", "--data", str(small_text), "--out", str(tiny_run)]) == 2
    assert "already holds a run" in capsys.readouterr().err


def test_other_files_are_left_alone_and_a_killed_start_is_not(tmp_path: Path, small_text: Path) -> None:
    """A folder of the user's is no run folder; what a kill left of a beginning is."""
    (tmp_path / "tokenizer").mkdir()
    words = ["tiny", "--data", str(small_text), "--out", str(tmp_path)]
    assert pretrain.complete(flags.parse("pretrain", words)).out == str(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="--out: .* holds other files and is left alone"):
        pretrain.complete(flags.parse("pretrain", words))


def test_a_resumed_run_stays_in_its_folder(tiny_run: Path) -> None:
    """--out would be passed over silently."""
    with pytest.raises(UserError, match="--out: a resumed run stays in its own folder"):
        pretrain.complete(flags.parse("pretrain", ["--resume", str(tiny_run), "--out", "elsewhere"]))
    assert pretrain.complete(flags.parse("pretrain", ["--resume", str(tiny_run)])).out == str(tiny_run)


def test_weights_come_with_the_data_flag(small_text: Path) -> None:
    """One per path, however the paths are named."""
    words = ["tiny", "--data", "a", "b", "--data.weights", "1", "2"]
    assert pretrain.complete(flags.parse("pretrain", words)).data.weights == (1.0, 2.0)
    with pytest.raises(ConfigError, match=r"data\.weights: 2 weights for 1 paths"):
        pretrain.complete(flags.parse("pretrain", ["tiny", "--data", "a", "--data.weights", "1", "2"]))


@pytest.mark.parametrize("words", [["--model.text.vocab-size", "600"], ["--model.text.vocab-size=5000"]])
def test_another_vocabulary_moves_the_control_tokens(words: list[str]) -> None:
    """They lie at its top, so one flag is enough."""
    model = flags.parse("pretrain", ["tiny", *words]).config.model
    size = model.text.vocab_size
    assert size in (600, 5000)
    ids = (model.bos_token_id, model.eos_token_id, model.media_placeholder_token_id, model.pad_token_id)
    assert ids == (size - 256, size - 254, size - 235, size - 1)
    with pytest.raises(ConfigError, match="--model.text.vocab-size: at least 512"):
        flags.parse("pretrain", ["tiny", "--model.text.vocab-size", "511"])


def test_field_out_of_range_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is read or written."""
    with pytest.raises(SystemExit) as stop:
        main(["pretrain", "tiny", "--data", "x", "--optim.lr", "-1"])
    assert stop.value.code == 2 and "optim.lr" in capsys.readouterr().err


def test_folder_is_named_by_the_time_when_none_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """runs/<date and time>."""
    monkeypatch.chdir(tmp_path)
    config = pretrain.complete(flags.parse("pretrain", ["tiny", "--data", "x"]))
    assert Path(config.out).parent == Path("runs") and config.data.paths == ("x",)


def test_interrupted_run_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Stopping is no failure: the state was saved."""

    @dataclasses.dataclass
    class Stopped:
        interrupted: bool = True
        step: int = 3
        total_steps: int = 9

    monkeypatch.setattr(pretrain, "pretrain", lambda config, resume: Stopped())
    assert main(["pretrain", "tiny", "--data", "x", "--out", "a b"]) == 0
    assert "stopped at step 3 of 9" in (out := capsys.readouterr().out) and "--resume 'a b'" in out


def test_divergence_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The learning rate is the user's."""

    def diverge(config: PretrainConfig, resume: bool) -> None:
        raise NonFiniteGradient("step 7")

    monkeypatch.setattr(pretrain, "pretrain", diverge)
    assert main(["pretrain", "tiny", "--data", "x", "--out", "r"]) == 2
    assert "lower --optim.lr" in capsys.readouterr().err


def test_errors_are_of_the_right_kind() -> None:
    """UserError from flags, ConfigError from the configuration: both are the user's."""
    with pytest.raises(UserError):
        pretrain.complete(flags.parse("pretrain", ["tiny"]))
    with pytest.raises(ConfigError):
        flags.parse("pretrain", ["nothing"])
