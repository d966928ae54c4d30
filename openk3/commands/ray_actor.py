"""ServerActor: one `openk3 serve` in the process of a Ray actor."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any


class ServerActor:
    """Made by Ray, in a process of its own. Methods run in threads of it, several at a time."""

    def __init__(self) -> None:
        self._server: Any = None
        self._thread = threading.Thread()

    def start(self, words: list[str], is_local: bool, key_lines: str, key_variable: str) -> tuple[str, int, str]:
        """Serve by these flags. Returns the address, this process's id, and the machine's address in the cluster.

        It listens on the loopback interface, or where the cluster knows this machine.

        Keys come as text, for the router's file need not lie on this machine; they are not written where others read.
        Raises what `openk3 serve` raises.
        """
        serve = importlib.import_module("openk3.commands.serve")  # with torch, which the router does without
        node = importlib.import_module("ray").util.get_node_ip_address()
        words = [*words, "--host", "127.0.0.1" if is_local else node, "--port", "0"]
        flags = importlib.import_module("openk3.commands.flags").parse("serve", words)
        directory = serve.find_model(flags.run)
        config = serve.server_config(flags, directory)
        keys = _read_keys(serve, key_lines, key_variable)
        serve.require_keys(config, keys, is_open=flags.open)
        listener = serve.bind(config)
        service = serve.load(flags, directory, config, keys)
        logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
        self._server = serve.DrainingServer(serve.make_app(service), service)
        self._thread = threading.Thread(target=self._server.run, args=([listener],), daemon=True)
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.01)
        return serve.shown_address(listener), os.getpid(), node

    def wait(self) -> bool:
        """Until the server has ended; whether its engine had failed."""
        self._thread.join()
        return bool(self._server.failed)

    def drain(self) -> None:
        """Take no more calls, and end."""
        self._server.drain()


def _read_keys(serve: Any, lines: str, variable: str) -> Any:
    environment = {"OPENK3_API_KEYS": variable}
    if not lines:
        return serve.read_keys(None, environment)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8") as file:  # only this user may read it
        file.write(lines)
        file.flush()
        return serve.read_keys(Path(file.name), environment)
