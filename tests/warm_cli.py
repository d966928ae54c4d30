"""A process that has imported what `openk3` needs and forks for every call: commands without seconds of imports each.

    python tests/warm_cli.py NAME

listens at a socket of this name, which is no file: paths of sockets must be short. A call is argv and the working
directory as JSON, with standard input, output and error; its answer is the exit code. Calls run one after another, each
in a process of its own, whose environment is that of the first one.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import socket
import subprocess
import sys
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = ("chat", "convert", "doctor", "generate", "plan", "pretrain", "quickstart", "tokenizer")
# What `openk3` is: it needs no site-packages.
PROGRAM = """#!/bin/sh
exec {python} -I -S -c '
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as call:
    call.connect(chr(0) + sys.argv[1])
    socket.send_fds(call, [json.dumps([sys.argv[2:], os.getcwd()]).encode()], [0, 1, 2])
    sys.exit(int(call.recv(16) or 70))
' {name} "$@"
"""


@contextmanager
def warm_openk3(folder: Path) -> Generator[Path]:
    """A folder with a program `openk3` of this checkout, for the front of PATH, until the block ends."""
    name = f"openk3-{secrets.token_hex(16)}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    server = subprocess.Popen([sys.executable, __file__, name], env=environment, stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None and server.stdout.readline() == b"ready\n"
        program = folder / "openk3"
        program.write_text(PROGRAM.format(python=shlex.quote(sys.executable), name=name))
        program.chmod(0o755)
        yield folder
    finally:
        server.kill()
        server.wait()


def serve(name: str) -> None:
    """Answer calls for ever."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command line sets it before it loads torch
    from importlib import import_module

    from openk3.cli import main

    for command in COMMANDS:
        import_module(f"openk3.commands.{command}")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"\0{name}")
        listening.listen()
        print("ready", flush=True)
        while True:
            call, _ = listening.accept()
            words, streams, _, _ = socket.recv_fds(call, 1 << 16, 3)
            arguments, folder = json.loads(words)
            child = os.fork()
            if not child:
                for number, (stream, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
                    os.dup2(streams[number], number)
                    setattr(sys, stream, os.fdopen(number, mode, 1, encoding="utf-8", closefd=False))
                os.chdir(folder)
                try:
                    code = main(arguments)
                    sys.stdout.flush()
                except SystemExit as end:
                    code = end.code if isinstance(end.code, int) else 1
                except BaseException:
                    traceback.print_exc()
                    code = 1
                sys.stderr.flush()
                os._exit(code)
            for stream in streams:
                os.close(stream)
            call.sendall(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())
            call.close()


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    serve(sys.argv[1])
