"""Store: what an outer tier asks of the place behind its memory: bytes under names, kept as long as there is room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class StoreError(ValueError):
    """A store cannot be opened; the message names what is wrong and what to do."""


class Store(Protocol):
    """A map from names of 32 bytes to entries, which may lose any of them at any time.

    Entries are immutable: the same name always has the same bytes. Methods are called by several threads at once. What
    they raise is counted as a miss. The caller checks every byte that it gets, so a store need not.
    """

    def has(self, names: Sequence[bytes]) -> list[bool]:
        """Which of these entries seem to be there."""
        ...

    def get(self, name: bytes, out: memoryview) -> bool:
        """Fill `out` with an entry of exactly that size, and count it as just used; false if there is none."""
        ...

    def put(self, name: bytes, entry: memoryview) -> bool:
        """Keep an entry; true once others can get it whole. False if it was not kept."""
        ...

    def remove(self, names: Sequence[bytes]) -> None:
        """Let nobody find these entries any more."""
        ...

    def close(self) -> None:
        """Nothing is asked after this."""
        ...
