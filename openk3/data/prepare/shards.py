"""Shards: which documents go into which, decided beforehand, so that each is written by itself and only once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import safe_open

from openk3.config.prepare import DOMAINS
from openk3.data.documents import Encoder, Record
from openk3.data.prepare.chunk import unpacked
from openk3.data.prepare.duplicates import read_arrays
from openk3.data.shard import SUFFIX, write_shard
from openk3.data.text_shard import TextDocument, write_text_shard
from openk3.inputs.tokenizer import Tokenizer


class Job(NamedTuple):
    """One shard: the documents of `domain` among numbers first..last of all that went through the rules."""

    domain: str
    number: int
    first: int
    last: int
    documents: int
    bytes: int

    @property
    def name(self) -> str:
        """Of the shard's folder."""
        return f"{self.domain}-{self.number:05}{SUFFIX}"


def plan_shards(chunks: Sequence[Path], stays: np.ndarray, most_bytes: int) -> list[Job]:
    """The shards of all documents that stay (bool [n]), in order, each domain by itself, of at most `most_bytes`.

    A document that is larger has a shard of its own.
    """
    domains = np.concatenate([*read_arrays(chunks, "domain"), np.zeros(0, np.uint8)])
    sizes = np.concatenate([*read_arrays(chunks, "size"), np.zeros(0, np.int64)])
    jobs: list[Job] = []
    for code, domain in enumerate(DOMAINS):
        mine = np.flatnonzero(stays & (domains == code))
        ends, start, number = sizes[mine].cumsum(), 0, 0
        while start < len(mine):
            before = int(ends[start - 1]) if start else 0
            stop = max(start + 1, int(np.searchsorted(ends, before + most_bytes, "right")))
            first, last = int(mine[start]), int(mine[stop - 1])
            jobs.append(Job(domain, number, first, last, stop - start, int(ends[stop - 1]) - before))
            start, number = stop, number + 1
    return jobs


def write_job(job: Job, chunks: Sequence[Path], stays: np.ndarray, folder: Path, tokenizer: str) -> dict[str, Any]:
    """Write one shard below `folder`, as text or as token ids; returns its line of the index."""
    path = folder / job.domain / job.name
    documents = _documents(job, chunks, stays)
    line: dict[str, Any] = {"path": f"{job.domain}/{job.name}", **job._asdict()}
    if not tokenizer:
        return line | {"fingerprint": write_text_shard(path, documents)["fingerprint"]}
    opened = _encoder(tokenizer)
    records = (Record({"text": one.text.decode("utf-8")}, one.where) for one in documents)
    tokens = write_shard(path, map(opened.encode, records), opened.tokenizer)
    return line | {"tokens": tokens}


@cache
def _encoder(tokenizer: str) -> Encoder:
    return Encoder(Tokenizer.load(tokenizer))


def _documents(job: Job, chunks: Sequence[Path], stays: np.ndarray) -> Iterator[TextDocument]:
    """The job's documents, a chunk at a time."""
    code, first = DOMAINS.index(job.domain), 0
    for path in chunks:
        with safe_open(path, "numpy") as file:
            domains = file.get_tensor("domain")
            numbers = first + np.flatnonzero(domains == code)
            first += len(domains)
            wanted = stays[numbers] & (numbers >= job.first) & (numbers <= job.last)
            if not wanted.any():
                continue
            yield from _of_chunk(file, job.domain, domains == code, wanted)


def _of_chunk(file: Any, domain: str, mine: np.ndarray, wanted: np.ndarray) -> Iterator[TextDocument]:
    """Those of a domain's documents in a chunk that are wanted."""
    text, where = unpacked(file.get_tensor(f"text.{domain}")), unpacked(file.get_tensor(f"where.{domain}"))
    names = where.decode("utf-8").split("\n")
    hashes, quality = file.get_tensor("hash")[mine], file.get_tensor("quality")[mine]
    ends = file.get_tensor("size")[mine].cumsum()
    for place in np.flatnonzero(wanted).tolist():
        start = int(ends[place - 1]) if place else 0
        body = text[start : int(ends[place])]
        yield TextDocument(body, names[place], float(quality[place]), hashes[place].tobytes())


def find_document(number: int, chunks: Sequence[Path], firsts: Sequence[int]) -> TextDocument:
    """Document `number` of all; `firsts` are the numbers of each chunk's first one."""
    chunk = int(np.searchsorted(firsts, number, "right")) - 1
    with safe_open(chunks[chunk], "numpy") as file:
        codes = file.get_tensor("domain")
        place = number - firsts[chunk]
        mine = codes == codes[place]
        wanted = np.flatnonzero(mine) == place
        return next(_of_chunk(file, DOMAINS[int(codes[place])], mine, wanted))
