"""UserError, and the guard that turns what a user's file or value broke into one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """The user can mend it: the message is one line that names the file or field and says what to do."""


@contextmanager
def from_user(what: object) -> Iterator[None]:
    """Inside, a ValueError or OSError is about `what` (a file or a flag) and becomes a UserError that names it.

    Wrap only calls that read what the user gave: elsewhere a ValueError is our own mistake and keeps its traceback.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        text = " ".join(reason.split())
        raise UserError(text if str(what) in text else f"{what}: {text}") from error


def is_user_error(error: BaseException) -> bool:
    """Whether the message is meant for the user: ValueErrors of our own kinds are, Python's plain ones are not.

    ConfigError, TokenizerError and UserError all name the file or field at fault, wherever they are raised.
    """
    return isinstance(error, ValueError) and type(error).__module__.startswith("openk3.")
