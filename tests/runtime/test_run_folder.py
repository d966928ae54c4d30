"""The run folder's places, and files that are written whole or not at all."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from openk3.runtime.run_folder import RunFolder, write_atomic, write_json
from openk3.runtime.staging import umask


def test_places(tmp_path: Path) -> None:
    """Names inside the folder; a run is there once its configuration is."""
    run = RunFolder.at(tmp_path / "r")
    names = [path.name for path in (run.config, run.metrics, run.checkpoints, run.tokenizer, run.model, run.report)]
    assert names == ["run.json", "metrics.jsonl", "checkpoints", "tokenizer", "model", "report.html"]
    assert not run.is_run and not run.path.exists()
    write_json(run.config, {"steps": 3})
    assert run.is_run and json.loads(run.config.read_text()) == {"steps": 3}


def test_home_is_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`~/runs/x` is where the shell would put it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert RunFolder.at("~/runs/x").path == tmp_path / "runs" / "x"


def test_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    """An error while writing keeps the old content and no temporary file."""
    path = tmp_path / "a.json"
    write_json(path, [1])

    def fail(temporary: Path) -> None:
        temporary.write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match="No space left"):
        write_atomic(path, fail)
    assert json.loads(path.read_text()) == [1] and os.listdir(tmp_path) == ["a.json"]


def test_errors_name_the_file_and_leftovers_go(tmp_path: Path) -> None:
    """Not the temporary name; what a killed process left is removed by the next writer."""
    path = tmp_path / "a.json"
    (tmp_path / ".a.json.new-dead").write_text("half")
    write_json(path, [1])
    assert os.listdir(tmp_path) == ["a.json"] and path.stat().st_mode & 0o777 == 0o666 & ~umask()

    def fail(temporary: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match="No space left") as error:
        write_atomic(path, fail)
    assert error.value.filename == str(path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError) as error:
        write_json(tmp_path / "folder", [1])
    assert error.value.filename == str(tmp_path / "folder")


def test_links_and_what_is_no_file_stay(tmp_path: Path) -> None:
    """`--out /dev/full`, `--out /dev/stdout`: a file in the place of a device would break other programs."""
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a.json").write_text("[]")
    (tmp_path / "link").symlink_to(tmp_path / "real" / "a.json")
    write_json(tmp_path / "link", [1])
    assert (tmp_path / "link").is_symlink() and json.loads((tmp_path / "real" / "a.json").read_text()) == [1]
    assert sorted(os.listdir(tmp_path)) == ["link", "real"]
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_json(pipe, [2])
        assert json.loads(os.read(reader, 100)) == [2] and not pipe.is_file()
    finally:
        os.close(reader)
    full = Path("/dev/full")
    assert full.is_char_device()
    with pytest.raises(OSError, match="No space left") as error:
        write_json(full, [3])
    assert error.value.filename == str(full) and full.is_char_device()


def test_an_unknown_user_is_no_error(tmp_path: Path) -> None:
    """`~nobody-of-this-name/x` is then a path like any other."""
    assert RunFolder.at("~nobody-of-this-name/x").path == Path("~nobody-of-this-name/x")
