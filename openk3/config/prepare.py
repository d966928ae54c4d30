"""PrepareConfig: what `openk3 data prepare` reads, which text it keeps, and how it writes it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from openk3.config.model import ConfigError

DOMAINS = ("web", "code", "mathematics", "knowledge")
MIB = 1 << 20


@dataclass(frozen=True)
class PrepareConfig:
    """One preparation, complete: the same configuration and inputs give the same shards, byte for byte."""

    inputs: tuple[str, ...]  # files and folders; DOMAIN=PATH gives everything at PATH that label
    out: str  # folder to make
    text_field: str = "text"  # field of a JSONL record, or column of a Parquet file, that holds the text
    language: str = "any"  # "en": also ask for English stop words
    skip_rules: tuple[str, ...] = ()  # rules by name that are not applied
    quality: str = "default"  # "default": the shipped model, "off", or a file of `openk3 data train-quality`
    min_quality: float = 0.1  # text with a lower score is dropped
    similarity: float = 0.8  # Jaccard similarity of five-word shingles from which text is a near-duplicate; 0: off
    num_hashes: int = 128  # values of a MinHash signature
    shard_mib: int = 128  # largest shard, in MiB of text
    max_document_mib: int = 8  # a longer line, record or file is dropped
    max_ratio: int = 200  # compressed input that grows by more than this is not read on
    workers: int = 1  # processes beside the one that reads
    tokenizer: str = ""  # folder: write token ids of this tokenizer in place of text
    strict: bool = False  # stop at the first damaged input, in place of counting it

    def __post_init__(self) -> None:
        _require(bool(self.inputs), "IN: name at least one file or folder to read")
        _require(bool(self.text_field), "--text-field: must not be empty")
        _require(self.language in ("any", "en"), f"--language: 'any' or 'en', got {self.language!r}")
        _require(math.isfinite(self.min_quality), "--min-quality: must be a finite number")
        _require(0 <= self.min_quality <= 1, f"--min-quality: must lie in 0..1, got {self.min_quality}")
        _require(
            self.similarity == 0 or 0.3 <= self.similarity <= 1,
            f"--similarity: 0 (off) or 0.3..1, got {self.similarity}",
        )
        _require(16 <= self.num_hashes <= 1024, f"--num-hashes: must lie in 16..1024, got {self.num_hashes}")
        _require(1 <= self.shard_mib <= 4096, f"--shard-mib: must lie in 1..4096, got {self.shard_mib}")
        _require(
            1 <= self.max_document_mib <= 256, f"--max-document-mib: must lie in 1..256, got {self.max_document_mib}"
        )
        _require(self.max_ratio >= 2, f"--max-ratio: must be at least 2, got {self.max_ratio}")
        _require(1 <= self.workers <= 256, f"--workers: must lie in 1..256, got {self.workers}")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)
