"""Which run a command uses when none is named."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path

import pytest

from openk3.commands import runs
from openk3.commands.errors import UserError


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`runs/` is looked for in the working directory, and nothing is shipped."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs, "SHIPPED", tmp_path / "package" / "shipped")


def make(directory: Path, written: float = 0.0) -> Path:
    """A model directory whose configuration was written at a given time."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    os.utime(directory / "config.json", (written, written))
    return directory


def test_given_run_comes_first() -> None:
    """A path that exists is taken, whatever is newer."""
    make(Path("runs/new/model"), 9)
    assert runs.find_run(make(Path("mine"))) == Path("mine")


def test_given_path_that_does_not_exist_is_named() -> None:
    """The message says how to make one."""
    with pytest.raises(UserError, match=r"^nothing: no such run; .*openk3 quickstart"):
        runs.find_run(Path("nothing"))


def test_a_run_without_its_folder_is_guessed() -> None:
    """`mine` for `runs/mine`: the message has the path to type."""
    make(Path("runs/mine/model"))
    with pytest.raises(UserError, match=r"^mine: no such run; did you mean runs/mine\?$"):
        runs.find_run(Path("mine"))


def test_the_shipped_model_has_a_name() -> None:
    """Also where there are runs; a folder of that name comes first."""
    shipped, name = runs.SHIPPED, Path(runs.SHIPPED.name)
    with pytest.raises(UserError, match="no such run"):
        runs.find_model(name)
    make(shipped)
    make(Path("runs/new/model"))
    assert runs.find_model(name) == shipped
    make(name / "model")
    assert runs.find_model(name) == name / "model"


def test_newest_finished_run_is_the_default() -> None:
    """By the time its model was written; folders without a model do not count."""
    for name, written in (("a", 5), ("b", 9), ("c", 7)):
        make(Path("runs") / name / "model", written)
    Path("runs/unfinished/checkpoints").mkdir(parents=True)
    Path("runs/note.txt").write_text("")
    assert runs.find_run(None) == Path("runs/b")
    assert runs.find_model(None) == Path("runs/b/model")


def test_shipped_model_is_the_last_resort() -> None:
    """Only where there is no run."""
    shipped = make(runs.SHIPPED)
    assert runs.find_model(None) == shipped
    make(Path("runs/a/model"))
    assert runs.find_model(None) == Path("runs/a/model")


def test_nothing_at_all_is_one_line_that_says_how_to_make_a_run() -> None:
    """The first thing a newcomer may see."""
    with pytest.raises(UserError) as error:
        runs.find_model(None)
    assert "openk3 quickstart" in str(error.value) and "\n" not in str(error.value)


def test_model_directory_is_found_in_a_run_and_as_itself() -> None:
    """`RUN` may be the run folder or the model inside it."""
    model = make(Path("runs/a/model"))
    assert runs.model_in(Path("runs/a")) == runs.model_in(model) == model


def test_unfinished_run_says_that_it_has_no_model() -> None:
    """A folder is there, but nothing to load."""
    Path("half").mkdir()
    with pytest.raises(UserError, match=r"^half: holds no model"):
        runs.find_model(Path("half"))


def test_new_run_never_names_an_existing_folder() -> None:
    """Two runs started in the same second get two folders."""
    now = datetime(2026, 1, 31, 12, 5, 9)
    first = runs.new_run(now)
    assert first == Path("runs/2026-01-31-120509")
    first.mkdir(parents=True)
    assert runs.new_run(now) == Path("runs/2026-01-31-120509-1")


def test_next_commands_can_be_pasted() -> None:
    """A path with a space is quoted."""
    lines = runs.next_commands("my runs/a").splitlines()
    assert lines[0] == "next:" and all("'my runs/a'" in line for line in lines[1:])
