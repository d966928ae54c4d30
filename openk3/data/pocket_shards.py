"""Shards of the pocket recipe, written by several processes: books, conversations, pictures, and what is held out."""

from __future__ import annotations

import itertools
import multiprocessing
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openk3.config.model import VisionConfig
from openk3.data.documents import Encoder, Record
from openk3.data.pocket_mix import Knowledge, book_records, picture_records, talk_records
from openk3.data.shard import SUFFIX, write_shard
from openk3.inputs.tokenizer import Tokenizer

MAX_IMAGE_TOKENS = 256
TOKENIZER_BYTES = 6_000_000
HELD_OUT_TALKS, HELD_OUT_SERIES = 200, 1000  # a series of conversations that training never sees


@dataclass(frozen=True)
class Amounts:
    """How much is made, in how many shards of each kind."""

    talks: int = 105_000
    pictures: int = 24_000
    parts: int = 15
    seed: int = 0


@dataclass(frozen=True)
class Shards:
    """out/{books,held_out,talk,pictures}/*.shard, which depend on these fields alone."""

    out: Path
    knowledge: Knowledge
    tokenizer: Tokenizer
    vision: VisionConfig | None
    amounts: Amounts = Amounts()

    def write(self, workers: int) -> Iterator[tuple[str, int]]:
        """Write them by this many processes, yielding (name, tokens) of each as it is done."""
        jobs = [("books", 0), ("held_out", 0)]
        jobs += [(kind, part) for part in range(self.amounts.parts) for kind in ("pictures", "talk")]
        with multiprocessing.get_context("fork").Pool(workers) as pool:
            for (kind, part), size in zip(jobs, pool.imap(self.write_one, jobs, chunksize=1), strict=True):
                yield f"{kind}-{part:02}", size

    def write_one(self, job: tuple[str, int]) -> int:
        """Shard number `part` of a kind; returns its number of tokens."""
        kind, part = job
        encoder = Encoder(self.tokenizer, vision=self.vision, max_image_tokens=MAX_IMAGE_TOKENS)
        documents = (
            encoder.encode(Record(record, f"{kind}:{n}")) for n, record in enumerate(self._records(kind, part))
        )
        return write_shard(self.out / kind / f"{kind}-{part:02}{SUFFIX}", documents, self.tokenizer)

    def _records(self, kind: str, part: int) -> Iterator[dict[str, Any]]:
        known, amounts = self.knowledge, self.amounts
        if kind == "talk":
            return talk_records(known, amounts.seed, part, amounts.talks // amounts.parts)
        if kind == "pictures":
            return picture_records(known, amounts.seed, part, amounts.pictures // amounts.parts)
        if kind == "books":
            return book_records(known)
        talks = talk_records(known, amounts.seed + HELD_OUT_SERIES, 0, HELD_OUT_TALKS)
        return itertools.chain(book_records(known, held_out=True), talks)


def tokenizer_texts(knowledge: Knowledge, seed: int = 0) -> Iterator[str]:
    """Books and conversations without their digits: each digit stays a token of its own, so that sums can be learnt."""
    texts = [chapter.text for chapter in knowledge.chapters]
    random.Random(seed).shuffle(texts)
    talks = talk_records(knowledge, seed + 1, 0, 100_000)
    said = (
        " ".join(filter(None, (message.get("reasoning_content"), message["content"])))
        for record in talks
        for message in record["messages"]
    )
    for source in (iter(texts), said):
        room = TOKENIZER_BYTES // 2
        for text in source:
            yield re.sub(r"\d", " ", text)
            room -= len(text)
            if room < 0:
                break
