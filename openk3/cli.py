"""The command line: teaches with --help, parses flags, runs one command, and keeps errors to one line."""

from __future__ import annotations

import difflib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from types import FrameType

import openk3
from openk3.commands import flags
from openk3.commands.errors import is_user_error
from openk3.commands.terminal import abandon_stdout, prepare_streams, printable

GROUPS = {
    "Start": {
        "quickstart": "train a small true K3 on this machine in minutes, and write a report",
        "chat": "talk to a model in the terminal; it streams, shows reasoning, takes images",
        "generate": "continue a text",
        "serve": "answer clients of OpenAI's and Anthropic's interfaces over HTTP",
        "route": "the same through several servers, each conversation with the one that has its prefix",
    },
    "Train": {
        "pretrain": "train from a recipe (tiny, pocket, small, medium, k3) on your files, or resume a run",
        "data": "make training shards from raw text: filter, remove duplicates, label, report",
        "tokenizer": "train a tokenizer, or show how a text is cut into tokens",
        "bench": "measure how fast a recipe trains here, or how fast an engine answers",
    },
    "Look and convert": {
        "fleet": "simulate a fleet of servers on a trace of requests, or send one to live servers",
        "plan": "parameters, FLOPs, cache and memory of a model, without building it",
        "convert": "write a model in the released layout; pack and unpack MXFP4 experts",
        "doctor": "what this machine has, and which backends will be used",
    },
}
COMMANDS = {name: line for group in GROUPS.values() for name, line in group.items()}
EXAMPLES = {
    "openk3 quickstart": "8 minutes on 2 cores",
    "openk3 chat": "talk to the newest run, or to the model that comes along",
    "openk3 generate --prompt 'def main('": "let it write",
    "openk3 serve runs/mine --port 8000": "an OpenAI-compatible server",
    "openk3 route --replicas http://127.0.0.1:8001 ...": "several servers behind one address",
    "openk3 pretrain tiny --data src/ --out runs/mine": "train on your files",
    "openk3 plan k3": "2.78 T parameters, 104 B activated",
    "openk3 convert runs/mine out/ --experts mxfp4": "pack the experts",
}


def help_text() -> str:
    """What `openk3 --help` prints."""
    lines = [
        "usage: openk3 COMMAND [flags]",
        "",
        "Kimi K3, complete: train, save, load and talk to a true K3 of any size.",
    ]
    for title, commands in GROUPS.items():
        lines += ["", f"{title}:", *(f"  {name:<12}{line}" for name, line in commands.items())]
    lines += ["", "Examples:", *(f"  {command:<52}# {note}" for command, note in EXAMPLES.items())]
    lines += [
        "",
        "Where a command takes RUN and none is given, it uses the newest run under runs/; chat,",
        "generate and serve use pocket, the small model that comes with openk3, where there is no run.",
    ]
    return "\n".join([*lines, "Each command explains its flags: openk3 COMMAND --help"])


def fail(message: str) -> int:
    """Print one error line, whatever a file's or tensor's name holds; returns the exit code of a user's error."""
    print(f"openk3: {printable(' '.join(message.split()))}", file=sys.stderr)
    return 2


def unknown_command(word: str) -> int:
    """Say that there is no such command, and which one may be meant."""
    near = difflib.get_close_matches(word, COMMANDS, n=1)
    return fail(f"{word}: no such command; " + (f"did you mean `openk3 {near[0]}`?" if near else "see `openk3 --help`"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (default: the process's own) and return its exit code.

    0 done, 2 the user can mend it (one line on stderr), 130 interrupted, 141 the reader of our output went away, 143
    terminated, with nothing half-written left. Any other exception is a fault of the program and keeps its traceback.
    """
    prepare_streams()
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with sigterm_unwinds():
            try:
                return run(words)
            finally:
                sys.stdout.flush()
    except KeyboardInterrupt:
        print("\nopenk3: stopped", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        abandon_stdout()
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.filename is not None:
            return fail(f"{os.fsdecode(error.filename)}: {error.strerror}")
        abandon_stdout()  # whatever else is written has a name
        return fail(f"standard output: {error.strerror or error}")
    except ValueError as error:
        if not is_user_error(error):
            raise
        return fail(str(error))


def run(words: Sequence[str]) -> int:
    """Answer help and version; else parse the command's flags (without torch), import its module and run it."""
    if not words or words[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0
    if words[0] == "--version":
        print(f"openk3 {openk3.__version__}")
        return 0
    if words[0] not in COMMANDS:
        return unknown_command(words[0])
    # Read when torch loads: threads that spin while they wait make a machine with other work several times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    parsed = flags.parse(words[0], words[1:])
    importlib.import_module(f"openk3.commands.{words[0]}").run(parsed)
    return 0


@contextmanager
def sigterm_unwinds() -> Generator[None]:
    """SIGTERM ends the program as an exception does, so that temporary files go; training has its own answer to it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
