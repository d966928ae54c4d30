"""Streams that were closed, locales of every kind, bytes that are no text, and a terminal that stays as it is."""

from __future__ import annotations

import io
import sys

import pytest

from openk3.commands import terminal
from openk3.commands.errors import UserError


def stream(data: bytes, encoding: str, errors: str = "strict") -> io.TextIOWrapper:
    """What Python makes of a pipe in some locale."""
    return io.TextIOWrapper(io.BytesIO(data), encoding=encoding, errors=errors)


@pytest.mark.parametrize(
    ("encoding", "errors"), [("ascii", "strict"), ("latin-1", "strict"), ("utf-8", "surrogateescape")]
)
def test_piped_text_is_utf8_whatever_the_locale(encoding: str, errors: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And anything else is refused, not changed."""
    monkeypatch.setattr(sys, "stdin", stream("é 日\n".encode(), encoding, errors))
    terminal.prepare_streams()
    assert terminal.read_text() == "é 日\n"
    monkeypatch.setattr(sys, "stdin", stream(b"good\ncaf\xe9 x\n", encoding, errors))
    terminal.prepare_streams()
    with pytest.raises(UserError, match="standard input: is not UTF-8 text"):
        terminal.read_text()


def test_what_the_output_cannot_show_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a surrogate pair, as a file's name may hold, or a letter that the encoding lacks."""
    out = stream(b"", "ascii")
    monkeypatch.setattr(sys, "stdout", out)
    terminal.prepare_streams()
    print("a\u65e5\udcff", file=sys.stdout)
    sys.stdout.flush()
    assert out.buffer.getvalue() == b"a??\n"


def test_streams_that_the_caller_closed_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """`openk3 ... <&- >&- 2>&-`: Python gives None."""
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    terminal.prepare_streams()
    print("swallowed")
    print("swallowed", file=sys.stderr)
    assert terminal.read_text() == "" and not sys.stdout.isatty()
    for opened in (sys.stdin, sys.stdout, sys.stderr):
        opened.close()


def test_output_cannot_steer_the_terminal() -> None:
    """Escape sequences, from a model or in a file's name, are shown, not obeyed."""
    assert terminal.printable("a\x1b[2Jb\n\tc\r\u202e") == "a\ufffd[2Jb\n\tc\ufffd\ufffd"
    assert terminal.printable("\x9b1m\x7f\x07\u2028\u2066\ue000\udcff") == "\ufffd1m" + 6 * "\ufffd"


def test_every_script_can_be_read() -> None:
    """Wide and unbreakable spaces, and joiners of emoji or Persian letters, are no control characters."""
    text = "\u4f60\u3000\u597d 1\u00a0000 \U0001f469\u200d\U0001f4bb \u0645\u06cc\u200c\u062e"
    assert terminal.printable(text) == text


def test_a_terminal_signals_the_end_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-D behind a line that is not finished ends the text, where a user once had to press it again and again."""

    class Terminal(io.RawIOBase):
        pieces = [b"abc", b"", b"typed later"]

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: bytearray) -> int:
            piece = self.pieces.pop(0) if self.pieces else b""
            buffer[: len(piece)] = piece
            return len(piece)

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(Terminal())))
    assert terminal.read_text() == "abc"


@pytest.mark.parametrize(
    ("tty", "name", "value", "coloured"),
    [
        (True, "", "", True),
        (False, "", "", False),
        (True, "TERM", "dumb", False),
        (True, "TERM", "", False),
        (True, "NO_COLOR", "1", False),
    ],
)
def test_colours_only_where_they_are_wanted(
    tty: bool, name: str, value: str, coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A terminal that takes them, and a user who did not say no."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if name:
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout.isatty", lambda: tty)
    assert terminal.is_coloured() is coloured
