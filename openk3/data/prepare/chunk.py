"""One chunk of records through rules, quality and signatures into one file: what a resumed run does not do again."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from rensa import RMinHash  # pyrefly: ignore[missing-module-attribute]
from safetensors.numpy import save

from openk3.config.json_file import JsonError, parse_json
from openk3.config.prepare import DOMAINS, PrepareConfig
from openk3.data.prepare.domains import label
from openk3.data.prepare.items import Fault, Item
from openk3.data.prepare.measures import Measures
from openk3.data.prepare.quality import Quality, open_quality
from openk3.data.prepare.rules import RULES, first_broken
from openk3.runtime.run_folder import write_atomic

HASH_SEED = 1
EXAMPLES, EXAMPLE_CHARACTERS = 3, 300
# Reasons of a record's own for which it is dropped, beside rules and faults.
DROPS = {
    "not_json": "a line that is not JSON",
    "no_text": "a record without text in the field of --text-field",
    "not_utf8": "text that is not UTF-8",
    "surrogates": "text with halves of characters, which no UTF-8 can hold",
    "quality": "a quality score below --min-quality",
}
_CODEC = "zstd"


class Kept(NamedTuple):
    """A record that stays, so far."""

    text: bytes
    where: str
    domain: str
    quality: float
    shingles: np.ndarray  # uint64: hashes of runs of words


@dataclass
class Outcome:
    """What became of a chunk's records."""

    read: int = 0
    bytes_read: int = 0
    kept: list[Kept] = field(default_factory=list)
    drops: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)  # of whole files and members
    notes: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[dict[str, str]]] = field(default_factory=dict)

    def drop(self, reason: str, where: str, shown: str) -> None:
        """Count a record that goes, and keep the first few for the report."""
        self.drops[reason] += 1
        self._show(reason, where, shown)

    def leave(self, fault: Fault) -> None:
        """The same of a file or member."""
        self.faults[fault.reason] += 1
        self._show(f"file:{fault.reason}", fault.where, fault.detail)

    def _show(self, reason: str, where: str, shown: str) -> None:
        examples = self.examples.setdefault(reason, [])
        if len(examples) < EXAMPLES:
            examples.append({"where": where, "text": shown[:EXAMPLE_CHARACTERS]})


class Sieve:
    """Rules, quality and labels of one configuration."""

    def __init__(self, config: PrepareConfig) -> None:
        self.config = config
        self.rules = tuple(rule for rule in RULES if rule.name not in config.skip_rules)

    @cached_property
    def quality(self) -> Quality | None:
        """The model, read when the first text needs it."""
        return open_quality(self.config.quality)

    def sift(self, items: Sequence[Item | Fault]) -> Outcome:
        """Every record either kept or dropped for one reason."""
        outcome = Outcome()
        for item in items:
            if isinstance(item, Fault):
                if item.whole:
                    outcome.leave(item)
                else:
                    outcome.read += 1
                    outcome.drop(item.reason, item.where, item.detail)
                continue
            outcome.read += 1
            outcome.bytes_read += len(item.payload)
            self._judge(item, outcome)
        return outcome

    def _judge(self, item: Item, outcome: Outcome) -> None:
        text, suffix, domain = self.text_of(item, outcome)
        if text is None:
            return
        text, mended = mend(text)
        outcome.notes.update(mended)
        measures = Measures(text, english_only=self.config.language == "en")
        if domain not in DOMAINS:
            domain = label(measures, suffix)
        broken = first_broken(measures, domain, self.rules)
        if broken:
            outcome.drop(broken, item.where, text)
            return
        score = self.quality.score(measures, domain, suffix) if self.quality is not None else None
        if score is None:
            outcome.notes["quality not judged"] += self.quality is not None
        elif score < self.config.min_quality:
            outcome.drop("quality", f"{item.where} (score {score:.3f})", text)
            return
        quality = float("nan") if score is None else score
        outcome.kept.append(Kept(text.encode("utf-8"), item.where, domain, quality, measures.shingles))

    def text_of(self, item: Item, outcome: Outcome) -> tuple[str | None, str, str]:
        """(text, suffix, domain) of a record; no text, and the reason counted, if there is none."""
        suffix, domain = item.suffix, item.domain
        shown = item.payload[:EXAMPLE_CHARACTERS].decode("utf-8", "replace")
        try:
            text: Any = item.payload.decode("utf-8")
            if item.is_json:
                record = parse_json(text.removeprefix("\ufeff"))
                record = record if isinstance(record, Mapping) else {}
                text = record.get(self.config.text_field)
                domain = domain or record.get("domain", "")
                path = record.get("path")
                suffix = os.path.splitext(path)[1].lower() if isinstance(path, str) else ""
        except UnicodeDecodeError:
            outcome.drop("not_utf8", item.where, shown)
            return None, suffix, domain
        except JsonError:
            outcome.drop("not_json", item.where, shown)
            return None, suffix, domain
        if not isinstance(text, str) or not text:
            outcome.drop("no_text", item.where, shown)
            return None, suffix, domain
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            outcome.drop("surrogates", item.where, shown)
            return None, suffix, domain
        return text, suffix, domain


def mend(text: str) -> tuple[str, list[str]]:
    """The text without a byte-order mark, with plain line ends, and what was mended."""
    mended = []
    if text.startswith("\ufeff"):
        text = text.removeprefix("\ufeff")
        mended.append("byte-order mark taken off")
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        mended.append("line ends made plain")
    return text, mended


def signatures(sets: Sequence[np.ndarray], num_hashes: int) -> np.ndarray:
    """MinHash signatures of sets of hashes, uint32 [sets, num_hashes] (rensa's full-set R-MinHash)."""
    if not sets:
        return np.zeros((0, num_hashes), np.uint32)
    starts = np.cumsum([0, *map(len, sets)])
    make = RMinHash.digest_matrix_from_flat_token_hashes
    return np.array(make(np.concatenate(sets), starts, num_hashes, HASH_SEED).to_rows(), np.uint32)


def content_hash(text: bytes) -> bytes:
    """128 bits that name a text, blanks at its ends and their kinds inside aside."""
    return hashlib.blake2b(b" ".join(text.split()), digest_size=16).digest()


def chunk_arrays(kept: Sequence[Kept], num_hashes: int) -> dict[str, np.ndarray]:
    """What a chunk's file holds of n records: hash uint64 [n, 2], signature uint32 [n, num_hashes], domain uint8 [n],
    size int64 [n] (bytes of text), quality float32 [n]; texts and places by domain, compressed (uint8)."""
    arrays = {
        "hash": np.frombuffer(b"".join(content_hash(one.text) for one in kept), np.uint64).reshape(-1, 2),
        "signature": signatures([one.shingles for one in kept], num_hashes),
        "domain": np.array([DOMAINS.index(one.domain) for one in kept], np.uint8),
        "size": np.array([len(one.text) for one in kept], np.int64),
        "quality": np.array([one.quality for one in kept], np.float32),
    }
    for domain in DOMAINS:
        mine = [one for one in kept if one.domain == domain]
        arrays[f"text.{domain}"] = _packed(b"".join(one.text for one in mine))
        arrays[f"where.{domain}"] = _packed("\n".join(one.where.replace("\n", " ") for one in mine).encode())
    return arrays


def _packed(data: bytes) -> np.ndarray:
    """Eight bytes with the size, then the data compressed."""
    packed = pa.Codec(_CODEC, compression_level=1).compress(data, asbytes=True)
    return np.frombuffer(len(data).to_bytes(8, "little") + packed, np.uint8)


def unpacked(array: np.ndarray) -> bytes:
    """What `_packed` was given."""
    data = array.tobytes()
    size = int.from_bytes(data[:8], "little")
    return pa.Codec(_CODEC).decompress(data[8:], decompressed_size=size, asbytes=True)


def write_chunk(path: Path, kept: Sequence[Kept], num_hashes: int) -> str:
    """Write the file, whole or not at all; returns its digest."""
    data = save(chunk_arrays(kept, num_hashes))
    write_atomic(path, lambda temporary: temporary.write_bytes(data))
    return hashlib.blake2b(data, digest_size=16).hexdigest()
