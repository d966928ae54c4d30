"""Outside: what the books ask of memory beyond the pages, and what lies ready there for one request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from openk3.engine.prefix_keys import HashChain


@dataclass(frozen=True)
class Staged:
    """Entries from which a request can start after `num_tokens` tokens of `chain`, together with what the pages hold.

    `pages` are whole pages of latents by their place. `tail` has the state after the last token and the latents of the
    page that is not whole; None where the pages hold a checkpoint, or where no state is needed.
    """

    chain: HashChain
    num_tokens: int
    pages: Mapping[int, Any] = field(default_factory=dict)
    tail: Any | None = None


class Fetch(Protocol):
    """What is being brought nearer for one waiting request."""

    @property
    def staged(self) -> Staged | None:
        """None while nothing is there."""
        ...

    def close(self) -> None:
        """Let go of it all; asked once, when the request starts or ends."""
        ...


class Outside(Protocol):
    """Where evicted prefixes and states of preempted requests go. It copies at once: pages are overwritten later.

    Nothing here raises: what cannot be kept is lost, and costs time only.
    """

    def page_evicted(self, key: bytes, page: int) -> None:
        """A whole page of latents, whose last hash block has this key, is about to be forgotten."""
        ...

    def checkpoint_evicted(self, key: bytes, states: Sequence[int], page: int, num_rows: int) -> None:
        """So is the checkpoint of this key; `num_rows` latents of `page`, from its first, belong to it."""
        ...

    def swap_out(self, states: Sequence[int], page: int | None, num_rows: int, num_lost: int) -> Any | None:
        """Copy a running request's private state and the latents of its last page, if that pays.

        Without it, `num_lost` tokens are computed again. The entry is pinned for the caller.
        """
        ...

    def forget(self, keys: Sequence[bytes]) -> None:
        """Nobody may come upon these prefixes any more, in this process or another."""
        ...

    def pin(self, entries: Iterable[Any]) -> None:
        """Count one more user of each entry, which keeps it in memory."""
        ...

    def unpin(self, entries: Iterable[Any]) -> None:
        """Count one user less."""
        ...
