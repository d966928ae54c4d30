"""UserError, and the rule for which exceptions are the user's to mend."""

from __future__ import annotations


class UserError(ValueError):
    """The user can mend it: the message is one line that names the file or flag and says what to do."""


def is_user_error(error: BaseException) -> bool:
    """Whether the message is meant for the user: ValueErrors of our own kinds are, Python's plain ones are not.

    ConfigError, TokenizerError, CheckpointError and the like name the file or field at fault, wherever they are raised.
    """
    return isinstance(error, ValueError) and type(error).__module__.startswith("openk3.")
