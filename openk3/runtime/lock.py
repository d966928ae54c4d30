"""A lock on a file or folder that ends with the process that holds it, so that none is ever left behind."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EBADF, errno.EINVAL}


def try_lock(path: Path) -> Callable[[], None] | None:
    """Take the lock of an existing file or folder: what releases it, or None if someone else holds it.

    A second call in the same process counts as someone else. On a file system without locks everyone gets one. Raises
    OSError if `path` cannot be opened.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            os.close(handle)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return None
            raise
    return partial(os.close, handle)
