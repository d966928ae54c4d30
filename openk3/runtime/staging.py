"""Write a whole folder or nothing: fill a temporary one beside it, then rename."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path


class FolderError(ValueError):
    """A folder cannot be written there; the message names it and says what to do."""


@contextmanager
def staged_folder(target: str | Path, may_replace: Callable[[Path], bool]) -> Generator[Path]:
    """Yield an empty folder that becomes `target` when the block ends; on any exception nothing is left behind.

    A non-empty `target` is replaced only if `may_replace(target)`; otherwise FolderError, before the block runs.
    """
    target = Path(target)
    if target.exists() and not target.is_dir():
        raise FolderError(f"{target}: is a file; choose a folder that does not exist yet")
    if target.is_dir() and any(target.iterdir()) and not may_replace(target):
        raise FolderError(f"{target}: holds other files and is left alone; choose an empty or new folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.new-", dir=target.parent))
    try:
        staging.chmod(0o777 & ~_umask())
        yield staging
        _swap(staging, target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _swap(staging: Path, target: Path) -> None:
    if not target.is_dir() or not any(target.iterdir()):
        os.replace(staging, target)  # an empty folder is replaced in one step
        return
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old-", dir=target.parent))
    os.replace(target, old)
    os.replace(staging, target)
    shutil.rmtree(old)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
