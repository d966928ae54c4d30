"""FakeMooncake: MooncakeDistributedStore in one process, as version 0.3.13 of the real one was seen to behave.

Calls, their defaults, kinds of results and error codes are those of `mooncake.store`; several clients of one `Master`
share objects. Wrong use raises TypeError, as the binding does.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Sequence
from types import ModuleType

BUFFER_TOO_SMALL, NO_AVAILABLE_HANDLE, OBJECT_NOT_FOUND, OBJECT_HAS_LEASE = -600, -200, -704, -706


class Master:
    """Objects, their leases and how much room there is; what was looked at lately is neither removed nor evicted."""

    def __init__(self, room: int = 1 << 20) -> None:
        self.room = room
        self.objects: OrderedDict[str, bytes] = OrderedDict()
        self.leased: set[str] = set()
        self.clients: list[FakeStore] = []

    def let_leases_end(self) -> None:
        """As after some seconds."""
        self.leased.clear()

    def put(self, key: str, value: bytes) -> int:
        """An object that exists stays as it is, and that is a success."""
        if key in self.objects:
            return 0
        for other in list(self.objects):
            if sum(map(len, self.objects.values())) + len(value) <= self.room:
                break
            if other not in self.leased:
                del self.objects[other]
        if sum(map(len, self.objects.values())) + len(value) > self.room:
            return NO_AVAILABLE_HANDLE
        self.objects[key] = value
        return 0

    def find(self, key: str) -> bytes | None:
        """With a lease from now on."""
        if key in self.objects:
            self.leased.add(key)
            self.objects.move_to_end(key)
        return self.objects.get(key)


class FakeStore:
    """One client."""

    masters: dict[str, Master] = {}

    def __init__(self) -> None:
        self._master: Master | None = None
        self._buffer_bytes = 0

    def setup(
        self,
        local_hostname: str,
        metadata_server: str,
        global_segment_size: int,
        local_buffer_size: int,
        protocol: str,
        rdma_devices: str,
        master_server_addr: str,
    ) -> int:
        """0, or a negative number if there is no master."""
        for text in (local_hostname, metadata_server, protocol, rdma_devices, master_server_addr):
            _require(text, str)
        for number in (global_segment_size, local_buffer_size):
            _require(number, int)
        self._master = self.masters.get(master_server_addr)
        self._buffer_bytes = local_buffer_size
        if self._master is None:
            return -1
        self._master.clients.append(self)
        return 0

    def put(self, key: str, value: object) -> int:
        """Anything that has bytes."""
        _require(key, str)
        data = bytes(memoryview(value).cast("B"))  # pyrefly: ignore
        return BUFFER_TOO_SMALL if len(data) > self._buffer_bytes else self._of().put(key, data)

    def get_buffer(self, key: str) -> object | None:
        """Signed bytes, as the binding gives them; None if there is no such object, or no room for it here."""
        _require(key, str)
        data = self._of().find(key)
        if data is None or len(data) > self._buffer_bytes:
            return None
        return (ctypes.c_byte * len(data)).from_buffer_copy(data)

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        """1 or 0 each."""
        for key in _require(keys, list):
            _require(key, str)
        return [int(self._of().find(key) is not None) for key in keys]

    def batch_remove(self, keys: Sequence[str], force: bool = False) -> list[int]:
        """A code each; without force, not what is leased."""
        codes = []
        for key in _require(keys, list):
            if _require(key, str) not in self._of().objects:
                codes.append(OBJECT_NOT_FOUND)
            elif key in self._of().leased and not force:
                codes.append(OBJECT_HAS_LEASE)
            else:
                del self._of().objects[key]
                codes.append(0)
        return codes

    def close(self) -> int:
        """Gone."""
        self._of().clients.remove(self)
        self._master = None
        return 0

    def _of(self) -> Master:
        if self._master is None:
            raise RuntimeError("this client was not set up, or is closed")
        return self._master


def module() -> ModuleType:
    """What `import mooncake.store` gives."""
    made = ModuleType("mooncake.store")
    made.MooncakeDistributedStore = FakeStore  # pyrefly: ignore
    return made


def _require(value, kind):  # noqa: ANN001, ANN202
    if not isinstance(value, kind):
        raise TypeError(f"incompatible function arguments: {value!r} is no {kind.__name__}")
    return value
