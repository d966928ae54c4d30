"""Write a whole folder or file, or nothing: fill a temporary one beside it, then let the two change places at once.

A temporary name is locked while it is in use. What a killed process leaves is not, so the next writer removes it.
"""

from __future__ import annotations

import ctypes
import errno
import glob
import os
import shutil
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from openk3.runtime.lock import try_lock

_ATTEMPTS = 100  # to put a folder in its place while other processes put theirs there
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


class FolderError(ValueError):
    """A folder cannot be written there; the message names it and says what to do."""


@contextmanager
def staged_folder(target: str | Path, may_replace: Callable[[Path], bool]) -> Generator[Path]:
    """Yield an empty folder that becomes `target` when the block ends; on any exception nothing is left behind.

    A non-empty `target` is replaced, in one step, only if `may_replace(target)`; otherwise FolderError, before the
    block runs. Of several processes that write one target, the last one wins. Raises FolderError also where the file
    system refuses.
    """
    target = Path(target)
    place = Path(os.path.realpath(target))  # a link to a folder stays one
    if place.exists() and not place.is_dir():
        raise FolderError(f"{target}: is a file; choose a folder that does not exist yet")
    _require_free(target, place, may_replace)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with temporary_beside(place, folder=True) as staging:
            staging.chmod(0o777 & ~umask())
            yield staging
            _put(staging, target, place, may_replace)
    except OSError as error:
        if error.filename is not None and not _belongs_to(error.filename, place):
            raise
        raise FolderError(f"{target}: cannot be written ({error.strerror or error})") from error


@contextmanager
def temporary_beside(target: Path, *, folder: bool) -> Generator[Path]:
    """A new folder or file beside `target`; whatever has its name at the end is removed. Raises OSError."""
    _clear_leftovers(target)
    path, release = _reserve(target, folder)
    try:
        yield path
    finally:
        _remove(path)
        release()


def named(error: OSError, path: Path) -> OSError:
    """The same error, about `path`."""
    return OSError(error.errno, error.strerror, str(path))


def _reserve(target: Path, folder: bool) -> tuple[Path, Callable[[], None]]:
    while True:
        prefix = f".{target.name}.new-"
        if folder:
            path = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
        else:
            handle, name = tempfile.mkstemp(prefix=prefix, dir=target.parent)
            os.close(handle)
            path = Path(name)
        release = _lock_existing(path)
        if release is not None:
            return path, release


def _lock_existing(path: Path) -> Callable[[], None] | None:
    """The lock of `path`, or None if it is held or gone: another writer may take a name that is not locked yet away."""
    try:
        release = try_lock(path)
    except FileNotFoundError:
        return None
    if release is not None and not path.exists():
        release()
        return None
    return release


def _clear_leftovers(target: Path) -> None:
    """Remove what killed processes left beside `target`; an old folder whose successor never came goes back."""
    for kind in ("new", "old"):
        for path in target.parent.glob(f".{glob.escape(target.name)}.{kind}-*"):
            release = _lock_existing(path)
            if release is None:
                continue
            if kind == "old" and not target.exists():
                os.replace(path, target)
            else:
                _remove(path)
            release()


def _put(staging: Path, target: Path, place: Path, may_replace: Callable[[Path], bool]) -> None:
    """Give the finished folder its name; others may write the same one meanwhile, so a step may have to be redone."""
    for _ in range(_ATTEMPTS):
        _require_free(target, place, may_replace)
        try:
            if not place.is_dir() or not any(place.iterdir()):
                os.replace(staging, place)  # an empty folder is replaced in one step
                return
            if not _exchange(staging, place):
                old = Path(tempfile.mkdtemp(prefix=f".{place.name}.old-", dir=place.parent))
                os.replace(place, old)
                os.replace(staging, place)
                shutil.rmtree(old)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                raise
    raise FolderError(f"{target}: other processes keep writing there; stop them and try again")


def _exchange(one: Path, other: Path) -> bool:
    """Let two names change places at once; False where the system cannot. Raises OSError."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(one))


def _require_free(target: Path, place: Path, may_replace: Callable[[Path], bool]) -> None:
    if place.is_dir() and any(place.iterdir()) and not may_replace(place):
        raise FolderError(f"{target}: holds other files and is left alone; choose an empty or new folder")


def _belongs_to(filename: object, place: Path) -> bool:
    """Whether an error about this file is one about writing `place`."""
    name = os.fspath(filename) if isinstance(filename, str | os.PathLike) else ""
    return name in (str(place), str(place.parent)) or name.startswith(str(place.parent / f".{place.name}."))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def umask() -> int:
    """The permissions that new files of this process do not get."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
