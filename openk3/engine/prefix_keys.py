"""HashChain: names of prefixes that only the same tokens, images, tenant and weights share.

The key of hash block i is blake2b over the key of block i - 1, the block's token ids, and position, extent and digest
of each image that reaches into it. The first key follows from tenant, weights and block size. Each part is written with
its length, so no two inputs give the same bytes to hash.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

KEY_BYTES = 32  # collisions must stay out of reach of somebody who looks for them


class Salt(NamedTuple):
    """Prefixes are shared inside one tenant and one version of the weights only."""

    tenant: str
    weights_version: str


class ImageSpan(NamedTuple):
    """An image in a prompt: its expanded placeholders are tokens start .. start + num_tokens - 1."""

    start: int
    num_tokens: int
    digest: bytes  # the whole digest, at least KEY_BYTES


def image_digest(pixels: bytes | bytearray | memoryview, grid_thw: tuple[int, int, int]) -> bytes:
    """Digest of an image's prepared patches (of an array: `memoryview(array).cast("B")`) and of their grid."""
    digest = blake2b(struct.pack("<3q", *grid_thw), digest_size=KEY_BYTES, person=b"openk3 image")
    digest.update(pixels)
    return digest.digest()


class HashChain:
    """Keys of one request's complete hash blocks: `keys[i]` names the first (i + 1) * hash_tokens tokens.

    Made once for a request, however often it waits or is preempted: a million tokens take about a tenth of a second.
    `images` are in order and apart; each lies inside `token_ids`. Raises ValueError naming the image that does not, or
    whose digest was cut short.
    """

    def __init__(
        self, salt: Salt, hash_tokens: int, token_ids: Sequence[int], images: Sequence[ImageSpan] = ()
    ) -> None:
        end = 0
        for n, image in enumerate(images):
            if image.start < end or image.num_tokens < 1 or image.start + image.num_tokens > len(token_ids):
                raise ValueError(f"image {n}: tokens {image.start} + {image.num_tokens} overlap others or the end")
            if len(image.digest) < KEY_BYTES:
                raise ValueError(f"image {n}: a digest of {len(image.digest)} bytes, at least {KEY_BYTES} are needed")
            end = image.start + image.num_tokens
        self.salt = salt
        self.hash_tokens = hash_tokens
        self.keys: list[bytes] = []
        self.num_tokens = 0
        self._last = _root(salt, hash_tokens)
        self._images = list(images)
        self._tail: list[int] = []
        self.append(token_ids)

    def append(self, token_ids: Sequence[int]) -> None:
        """Go on with more tokens."""
        self.num_tokens += len(token_ids)
        self._tail += token_ids
        size = self.hash_tokens
        complete = len(self._tail) - len(self._tail) % size
        for first in range(0, complete, size):
            self._last = self._key(self._tail[first : first + size])
            self.keys.append(self._last)
        del self._tail[:complete]

    def _key(self, token_ids: Sequence[int]) -> bytes:
        start, end = len(self.keys) * self.hash_tokens, (len(self.keys) + 1) * self.hash_tokens
        inside = [image for image in self._images if image.start < end and image.start + image.num_tokens > start]
        parts = [self._last, struct.pack(f"<{len(token_ids)}q", *token_ids), struct.pack("<q", len(inside))]
        for image in inside:
            parts += [struct.pack("<3q", image.start, image.num_tokens, len(image.digest)), image.digest]
        return _hash(b"".join(parts), b"openk3 block")


def _root(salt: Salt, hash_tokens: int) -> bytes:
    parts = [text.encode() for text in salt]
    lengths = struct.pack("<3q", hash_tokens, *map(len, parts))
    return _hash(lengths + b"".join(parts), b"openk3 root")


def _hash(data: bytes, person: bytes) -> bytes:
    return blake2b(data, digest_size=KEY_BYTES, person=person).digest()
