"""EntryFormat: names and bytes of what is kept outside the pages; whatever does not check out is a miss.

An entry is a header of 96 bytes, then its payload: magic and version, kind, length of the payload, name, checksum
(blake2b over the rest of the header and the payload). A name is a digest of the memory's layout and of the prefix's key
(see HashChain), which covers tokens, images with their places, tenant and weights. So an entry cannot be taken for
another one, of another model, dtype or page size, however it came under its name.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from hashlib import blake2b

from openk3.config.model import ModelConfig
from openk3.config.serve import PageShape
from openk3.engine.boundary import PAGE, TAIL

MAGIC, VERSION = b"openk3 e", 1
HEADER_BYTES = 96
NAME_BYTES = 32
_FIELDS = struct.Struct("<8sIIQQ32s")  # magic, version, kind, payload bytes, zero, name
_KINDS = {PAGE: 1, TAIL: 2}


def layout_digest(shape: PageShape, model: ModelConfig, dtype: str) -> bytes:
    """Of everything that gives an entry's bytes their meaning."""
    layout = [VERSION, dataclasses.asdict(shape), model.to_dict(), dtype]
    return blake2b(
        json.dumps(layout, sort_keys=True).encode(), digest_size=NAME_BYTES, person=b"openk3 layout"
    ).digest()


class EntryFormat:
    """Names and headers for one layout; a `secret` keys both, so that nobody without it can guess or forge them."""

    def __init__(self, layout: bytes, secret: bytes = b"") -> None:
        self._layout = layout
        self._key = blake2b(secret, person=b"openk3 secret").digest() if secret else b""

    def name(self, kind: str, key: bytes) -> bytes:
        """The entry's name: 32 bytes that say nothing about the prompt."""
        data = struct.pack("<I", _KINDS[kind]) + self._layout + key
        return blake2b(data, digest_size=NAME_BYTES, key=self._key, person=b"openk3 name").digest()

    def seal(self, entry: memoryview, kind: str, name: bytes) -> None:
        """Write the header over the first bytes of an entry whose payload is complete."""
        fields = _FIELDS.pack(MAGIC, VERSION, _KINDS[kind], len(entry) - HEADER_BYTES, 0, name)
        entry[:HEADER_BYTES] = fields + self._checksum(fields, entry[HEADER_BYTES:])

    def is_intact(self, entry: memoryview, kind: str, name: bytes) -> bool:
        """Whether these bytes are the entry of this name, every one of them as it was written."""
        if len(entry) < HEADER_BYTES:
            return False
        fields = _FIELDS.pack(MAGIC, VERSION, _KINDS[kind], len(entry) - HEADER_BYTES, 0, name)
        if entry[: _FIELDS.size] != fields:
            return False
        return entry[_FIELDS.size : HEADER_BYTES] == self._checksum(fields, entry[HEADER_BYTES:])

    def _checksum(self, fields: bytes, payload: memoryview) -> bytes:
        digest = blake2b(fields, digest_size=NAME_BYTES, key=self._key, person=b"openk3 entry")
        digest.update(payload)
        return digest.digest()
