"""Text in and out: streams that always exist, input that has to be UTF-8, output that cannot steer the terminal."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import unicodedata
from collections.abc import Generator, Iterator

from openk3.commands.errors import UserError

_HARMLESS = "\n\t\u200c\u200d"  # line ends, tabs and the joiners


def prepare_streams() -> None:
    """Make the standard streams fit for any text.

    One that the caller closed reads nothing and swallows everything; what a terminal cannot show is shown as another
    character; piped text is UTF-8 whatever the locale says.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  for the rest of the process
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if isinstance(sys.stdin, io.TextIOWrapper):
        if sys.stdin.isatty():
            sys.stdin.reconfigure(errors="replace")
        else:
            sys.stdin.reconfigure(encoding="utf-8", errors="strict")


def abandon_stdout() -> None:
    """Nobody takes our output any more: the interpreter flushes it once more at exit, so give it somewhere to go."""
    with contextlib.suppress(io.UnsupportedOperation):  # a stream without a file has nothing left to flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def read_text() -> str:
    """All of standard input, up to the first end that a terminal signals. Raises UserError if it is not UTF-8."""
    with _only_utf8():
        return sys.stdin.read()


def read_lines() -> Iterator[str]:
    """The lines of standard input, as they come. Raises UserError at one that is not UTF-8."""
    with _only_utf8():
        yield from sys.stdin


@contextlib.contextmanager
def _only_utf8() -> Generator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise UserError(f"standard input: is not UTF-8 text ({error.reason}); convert it first") from None


def printable(text: str) -> str:
    """Text that cannot steer the terminal: other control characters than line ends and tabs are shown as U+FFFD.

    Spaces of every script stay, and so do the joiners that letters and emoji are put together with.
    """
    return "".join(
        c if c.isprintable() or c in _HARMLESS or unicodedata.category(c) == "Zs" else "\ufffd" for c in text
    )


def is_coloured() -> bool:
    """Whether standard output is a terminal that takes colours and wants them."""
    return sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb") and "NO_COLOR" not in os.environ
