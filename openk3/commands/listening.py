"""Where a server listens, and whether it may without keys."""

from __future__ import annotations

import socket

from openk3.commands.errors import UserError
from openk3.config.http import ServerConfig
from openk3.serve.keys import VARIABLE, Keys

BACKLOG = 1024


def require_keys(config: ServerConfig, keys: Keys, *, is_open: bool) -> None:
    """Raise UserError for a server that the network reaches and anybody may use, unless that is said to be wanted."""
    if not len(keys) and not config.is_loopback and not is_open:
        raise UserError(
            f"--host {config.host}: other machines can reach it; give API keys by --keys FILE or {VARIABLE}, or --open"
        )


def bind(config: ServerConfig) -> socket.socket:
    """Listen, before anything takes long. Raises UserError if the address is taken or none of this machine's."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)  # who comes before the model is loaded waits
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"--host {config.host} --port {config.port}: cannot listen there ({reason})") from None
    return listener


def shown_address(listener: socket.socket) -> str:
    """http://HOST:PORT."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
