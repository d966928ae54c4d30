"""MooncakeStore: entries in a Mooncake Store, so that the engines of several machines find each other's prefixes.

The client is `mooncake.store.MooncakeDistributedStore` of the package mooncake-transfer-engine, imported only here and
only when a store is opened. Its calls answer with numbers: 0 is done, a negative one names what went wrong. Objects are
immutable, and the master evicts them when segments are full. An object that was looked at cannot be removed for some
seconds, unless by force.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from openk3.config.outer_tier import MooncakeConfig
from openk3.engine.store import StoreError


class MooncakeStore:
    """A Store shared by all clients of one master. Raises StoreError if the client is missing or cannot connect."""

    def __init__(self, config: MooncakeConfig) -> None:
        self._prefix = config.prefix
        self._client: Any = _client()
        code = self._client.setup(
            config.hostname,
            config.metadata,
            config.segment_bytes,
            config.buffer_bytes,
            config.protocol,
            config.devices,
            config.master,
        )
        if code:
            raise StoreError(f"mooncake: no connection to the master at {config.master} (code {code}); is it running?")

    def has(self, names: Sequence[bytes]) -> list[bool]:
        """Which of these objects exist; one question for all."""
        return [code == 1 for code in self._client.batch_is_exist([self._key(name) for name in names])]

    def get(self, name: bytes, out: memoryview) -> bool:
        """Copy an object into `out`, if it is there and has that size."""
        buffer = self._client.get_buffer(self._key(name))
        if buffer is None:
            return False
        with memoryview(buffer) as view, view.cast("B") as data:
            if len(data) != len(out):
                return False
            out[:] = data
        return True

    def put(self, name: bytes, entry: memoryview) -> bool:
        """Offer an object; one that exists stays as it is."""
        return self._client.put(self._key(name), entry) == 0

    def remove(self, names: Sequence[bytes]) -> None:
        """Remove objects, those somebody is looking at too."""
        self._client.batch_remove([self._key(name) for name in names], True)

    def close(self) -> None:
        """Leave; objects in this machine's segment are gone with it."""
        self._client.close()

    def _key(self, name: bytes) -> str:
        return f"{self._prefix}/{name.hex()}"


def _client() -> Any:
    try:
        return importlib.import_module("mooncake.store").MooncakeDistributedStore()
    except ImportError as error:  # not there, or a library of the system is not
        raise StoreError(
            f"mooncake: the client cannot be loaded ({error}); pip install 'openk3[mooncake]', and the system libraries"
            " that it names"
        ) from error
