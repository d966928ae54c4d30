"""Folders that appear whole or not at all, whatever else happens beside them."""

from __future__ import annotations

import errno
import multiprocessing
import os
from pathlib import Path

import pytest

from openk3.runtime import staging
from openk3.runtime.lock import try_lock
from openk3.runtime.staging import FolderError, staged_folder, temporary_beside


def write(target: Path, text: str) -> None:
    """One folder with two files of the same text."""
    with staged_folder(target, lambda path: True) as folder:
        (folder / "a").write_text(text)
        (folder / "b").write_text(text)


def content(target: Path) -> set[str]:
    """The texts of its files; they must be `a` and `b`."""
    assert sorted(os.listdir(target)) == ["a", "b"]
    return {path.read_text() for path in target.iterdir()}


@pytest.mark.parametrize("exchange", [True, False])
def test_a_folder_is_written_and_replaced(exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing, empty or full before; with the system's exchange of two names and without."""
    if not exchange:
        monkeypatch.setattr(staging, "_exchange", lambda one, other: False)
    target = tmp_path / "deep" / "m"
    write(target, "1")
    write(target, "2")
    assert content(target) == {"2"}
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty", "3")
    assert content(tmp_path / "empty") == {"3"} and sorted(os.listdir(tmp_path)) == ["deep", "empty"]
    assert os.listdir(tmp_path / "deep") == ["m"]


def test_a_reader_never_finds_the_name_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old folder leaves its name in the same step in which the new one takes it."""
    write(tmp_path / "m", "1")
    moves: list[tuple[str, str]] = []
    monkeypatch.setattr(os, "replace", lambda one, other: moves.append((str(one), str(other))))
    write(tmp_path / "m", "2")
    assert moves == [] and content(tmp_path / "m") == {"2"}


def test_leftovers_of_a_kill_are_removed_and_folders_in_use_are_not(tmp_path: Path) -> None:
    """A locked temporary folder belongs to a living writer."""
    for name in (".m.new-dead", ".m.old-dead", ".m.new-live", ".other.new-dead"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text("x")
    release = try_lock(tmp_path / ".m.new-live")
    assert release is not None
    write(tmp_path / "m", "1")
    assert sorted(os.listdir(tmp_path)) == [".m.new-live", ".other.new-dead", "m"]
    release()
    write(tmp_path / "m", "2")
    assert sorted(os.listdir(tmp_path)) == [".other.new-dead", "m"] and content(tmp_path / "m") == {"2"}


def test_an_old_folder_comes_back_if_its_successor_never_came(tmp_path: Path) -> None:
    """A kill between two renames, on a system without exchange, loses nothing."""
    write(tmp_path / ".m.old-dead", "old")
    with pytest.raises(KeyboardInterrupt), staged_folder(tmp_path / "m", lambda path: True):
        assert content(tmp_path / "m") == {"old"}
        raise KeyboardInterrupt
    assert content(tmp_path / "m") == {"old"} and os.listdir(tmp_path) == ["m"]


def write_often(target: Path, text: str) -> None:
    for _ in range(10):
        write(target, text)


def test_several_processes_may_write_one_folder(tmp_path: Path) -> None:
    """Each folder is whole at every moment, the last one stays, and nothing is left beside it."""
    context = multiprocessing.get_context("fork")
    others = [context.Process(target=write_often, args=(tmp_path / "m", str(n))) for n in range(4)]
    for other in others:
        other.start()
    for other in others:
        other.join(60)
    assert [other.exitcode for other in others] == [0, 0, 0, 0]
    assert os.listdir(tmp_path) == ["m"] and len(content(tmp_path / "m")) == 1


def test_a_link_to_a_folder_stays_one(tmp_path: Path) -> None:
    """The folder that it leads to is written."""
    (tmp_path / "disk" / "m").mkdir(parents=True)
    (tmp_path / "m").symlink_to("disk/m")
    write(tmp_path / "m", "1")
    write(tmp_path / "m", "2")
    assert (tmp_path / "m").is_symlink() and content(tmp_path / "disk" / "m") == {"2"}
    assert os.listdir(tmp_path / "disk") == ["m"]


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    """Also if it comes while the folder is being written."""
    (tmp_path / "f").write_text("x")
    with pytest.raises(FolderError, match="is a file"), staged_folder(tmp_path / "f", lambda path: True):
        pass
    with pytest.raises(FolderError, match="holds other files"), staged_folder(tmp_path / "m", lambda path: False):
        (tmp_path / "m").mkdir()
        (tmp_path / "m" / "mine").write_text("x")
    assert os.listdir(tmp_path / "m") == ["mine"] and sorted(os.listdir(tmp_path)) == ["f", "m"]


def test_errors_name_the_target(tmp_path: Path) -> None:
    """A full disk names no file, and a temporary name means nothing to the user; a source's name stays."""
    target = tmp_path / "m"
    for error in (
        OSError(errno.ENOSPC, "No space left on device"),
        PermissionError(errno.EACCES, "No space left on device", str(tmp_path / ".m.new-x" / "a")),
    ):
        words = rf"^{target}: cannot be written \(No space left"
        with pytest.raises(FolderError, match=words), staged_folder(target, lambda path: True):
            raise error
    with pytest.raises(FileNotFoundError), staged_folder(target, lambda path: True):
        (tmp_path / "source").read_text()
    with pytest.raises(FolderError, match=r"^/proc/x: cannot be written"), staged_folder("/proc/x", lambda path: True):
        pass
    assert os.listdir(tmp_path) == []


def test_a_temporary_file_is_gone_at_the_end(tmp_path: Path) -> None:
    """Unless it was renamed; leftovers of another target stay."""
    (tmp_path / ".a.new-dead").write_text("x")
    (tmp_path / ".ab.new-dead").write_text("x")
    with temporary_beside(tmp_path / "a", folder=False) as temporary:
        assert temporary.parent == tmp_path and try_lock(temporary) is None
        assert sorted(os.listdir(tmp_path)) == sorted([temporary.name, ".ab.new-dead"])
    assert os.listdir(tmp_path) == [".ab.new-dead"]
