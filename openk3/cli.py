"""The command line: teaches with --help, parses flags, runs one command, and keeps errors to one line."""

from __future__ import annotations

import difflib
import importlib
import os
import signal
import sys
from collections.abc import Sequence

GROUPS = {
    "Start": {
        "quickstart": "train a small true K3 on this machine in minutes, and write a report",
        "chat": "talk to a model in the terminal; it streams, shows reasoning, takes images",
        "generate": "continue a text",
    },
    "Train": {
        "pretrain": "train from a recipe (tiny, small, k3) on your files; resume a run",
        "tokenizer": "train a tokenizer, or show how a text is cut into tokens",
    },
    "Look and convert": {
        "plan": "parameters, FLOPs, cache and memory of a model, without building it",
        "convert": "between training checkpoints and the released layout; pack and unpack MXFP4",
        "doctor": "what this machine has, and which backends will be used",
    },
}
COMMANDS = {name: line for group in GROUPS.values() for name, line in group.items()}
EXAMPLES = (
    "openk3 quickstart                          # 8 minutes on 2 cores, then: openk3 chat",
    "openk3 chat runs/2026-01-31-1200 --image chart.png",
    "openk3 pretrain tiny --data src/ --out runs/mine",
    "openk3 plan k3                             # 2.78 T parameters, 104 B activated",
    "openk3 convert runs/mine out/ --experts mxfp4",
)


def help_text() -> str:
    """What `openk3 --help` prints."""
    lines = ["usage: openk3 COMMAND [flags]", "", "Kimi K3, complete: train, save, load and talk to a true K3 of any size."]
    for title, commands in GROUPS.items():
        lines += ["", f"{title}:", *(f"  {name:<12}{line}" for name, line in commands.items())]
    lines += ["", "Examples:", *(f"  {line}" for line in EXAMPLES)]
    lines += ["", "Where a command takes RUN and none is given, the newest run under runs/ is used."]
    return "\n".join([*lines, "Each command explains its flags: openk3 COMMAND --help"])


def command_name(word: str) -> str:
    """The command that `word` names. Exits with code 2 and a suggestion where there is none."""
    if word in COMMANDS:
        return word
    near = difflib.get_close_matches(word, COMMANDS, n=1)
    hint = f"did you mean `openk3 {near[0]}`?" if near else "see `openk3 --help`"
    sys.exit(fail(f"{word}: no such command; {hint}"))


def fail(message: str) -> int:
    """Print one error line; returns the exit code of a user's error."""
    print(f"openk3: {message}", file=sys.stderr)
    return 2


def run_command(name: str, arguments: Sequence[str]) -> None:
    """Parse the command's flags (torch-free), then import its module and run it."""
    parse = importlib.import_module("openk3.commands.flags").parse
    flags = parse(name, arguments)
    importlib.import_module(f"openk3.commands.{name}").run(flags)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (default: the process's own) and return its exit code.

    0 done, 2 the user can mend it (one line on stderr), 130 interrupted, 141 the reader of our output went away.
    Any other exception is a fault of the program and keeps its traceback.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0
    if words[0] == "--version":
        print(f"openk3 {importlib.import_module('openk3').__version__}")
        return 0
    name = command_name(words[0])
    errors = importlib.import_module("openk3.commands.errors")
    config_error = importlib.import_module("openk3.config.model").ConfigError
    try:
        run_command(name, words[1:])
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("\nopenk3: stopped", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The interpreter flushes stdout once more at exit; give it somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (errors.UserError, config_error) as error:
        return fail(" ".join(str(error).split()))
    except OSError as error:
        return fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    return 0
