"""How fast `openk3 data prepare` is, in how much memory, and how many planted near-duplicates it finds.

python benchmarks/data_prepare.py --scale 0.25 --out benchmarks/results

Makes a corpus of 250,000 documents and 1 GB (times the scale) from a seed, a tenth of them edited copies of others,
then runs the command with two workers and compares what it removed with what was planted. On a machine with other work
the seconds of all processes on their cores say more than those of the clock.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from openk3.data.prepare.measures import Measures

DOCUMENTS, DUPLICATES = 250_000, 0.1
WORDS = (300, 950)  # of a document, about 4,000 bytes on average
PARTS = 8
THRESHOLD = 0.8
_FREQUENT = "the of and to in is that for it as was with be on by are this not or from at which have an were"
_ONSETS, _RHYMES = "b c d f g l m n p r s t st tr pl", "a e i o u ar en il or us"


class Writer:
    """Made-up English-like text: a vocabulary with Zipf's law, sentences, paragraphs."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        syllables = [onset + rhyme for onset in _ONSETS.split() for rhyme in _RHYMES.split()]
        self.vocabulary = _FREQUENT.split() + [
            "".join(self.rng.choice(syllables) for _ in range(self.rng.choice((1, 2, 2, 3, 3)))) for _ in range(40_000)
        ]
        weights = 1 / (np.arange(len(self.vocabulary)) + 3.0)
        self.edges = np.cumsum(weights / weights.sum())

    def words(self, count: int) -> list[str]:
        """Words by their frequency."""
        generator = np.random.default_rng(self.rng.getrandbits(64))
        places = np.searchsorted(self.edges, generator.random(count)).clip(0, len(self.vocabulary) - 1)
        return [self.vocabulary[place] for place in places.tolist()]

    def document(self) -> str:
        """A text of paragraphs of sentences."""
        words, sentences = self.words(self.rng.randint(*WORDS)), []
        while words:
            size = self.rng.randint(8, 25)
            sentences.append(" ".join(words[:size]).capitalize() + ".")
            words = words[size:]
        return "".join(s + ("\n\n" if self.rng.random() < 0.15 else " ") for s in sentences).strip()

    def copy(self, text: str) -> str:
        """The text with one edit in 20 to 400 words: changed, left out, put in, or set in capitals."""
        words, rate = text.split(" "), 1 / self.rng.randint(20, 400)
        edited: list[str] = []
        for word in words:
            draw = self.rng.random()
            if draw < rate / 3:
                continue
            edited.append(self.words(1)[0] if draw < 2 * rate / 3 else word)
            if 2 * rate / 3 <= draw < rate:
                edited.append(self.words(1)[0])
        return " ".join(edited)


def jaccard(one: str, other: str) -> float:
    """Of the sets of five-word runs."""
    first, second = (set(Measures(text).shingles.tolist()) for text in (one, other))
    return len(first & second) / max(len(first | second), 1)


def make_corpus(folder: Path, scale: float, seed: int) -> dict[str, float]:
    """JSONL files; returns each planted copy's id with its true similarity to what it was copied from."""
    writer, planted = Writer(seed), dict[str, float]()
    count = round(DOCUMENTS * scale)
    recent: list[tuple[str, str]] = []
    files = [(folder / f"part-{number}.jsonl").open("w") for number in range(PARTS)]
    for number in range(count):
        name = f"d{number}"
        if recent and writer.rng.random() < DUPLICATES:
            text = recent[writer.rng.randrange(len(recent))][1]
            copied = writer.copy(text)
            planted[name] = jaccard(text, copied)
            text = copied
        else:
            text = writer.document()
            if len(recent) < 20_000:
                recent.append((name, text))
            else:
                recent[writer.rng.randrange(len(recent))] = (name, text)
        files[number * PARTS // count].write(json.dumps({"id": name, "text": text}) + "\n")
    for file in files:
        file.close()
    return planted


class Memory(threading.Thread):
    """The most memory that a process and its children hold together: proportional set sizes, five times a second."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid, self.peak, self.stop = pid, 0, threading.Event()

    def run(self) -> None:
        """Until told to stop."""
        while not self.stop.wait(0.2):
            self.peak = max(self.peak, sum(held(pid) for pid in family(self.pid)))


def family(pid: int) -> list[int]:
    """A process and everything below it."""
    found = [pid]
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += family(int(child))
    except OSError:
        pass
    return found


def held(pid: int) -> int:
    """A process's share of memory, in bytes."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def found_copies(out: Path, corpus: Path) -> tuple[set[str], set[str]]:
    """(ids of documents that stay, all ids), by the places that the shards name."""
    names = {}
    for path in sorted(corpus.glob("*.jsonl")):
        with path.open() as file:
            for number, line in enumerate(file, 1):
                names[f"{path}:{number}"] = json.loads(line)["id"]
    stays = set()
    for where in out.glob("*/*.shard/where.txt"):
        stays.update(names[line] for line in where.read_text().split("\n"))
    return stays, set(names.values())


def measure(corpus: Path, out: Path, workers: int) -> dict[str, Any]:
    """Run the command once, with its time and memory."""
    command = [sys.executable, "-m", "openk3", "data", "prepare", str(corpus), "--out", str(out)]
    command += ["--workers", str(workers), "--similarity", str(THRESHOLD)]
    command += ["--min-quality", "0"]  # every text is scored; made-up words would not pass
    load, before = os.getloadavg()[0], resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    memory = Memory(process.pid)
    memory.start()
    output, _ = process.communicate()
    memory.stop.set()
    memory.join()
    if process.returncode:
        raise SystemExit(f"openk3 data prepare failed: {output}")
    seconds, used = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    peak = round(memory.peak / 2**20)
    return {"seconds": round(seconds, 1), "cpu_seconds": round(cpu, 1), "load_before": round(load, 1), "peak_mib": peak}


def judge(planted: dict[str, float], stays: set[str], names: set[str], dropped: dict[str, int]) -> dict[str, Any]:
    """Recall by true similarity, and precision: removed documents that are copies of something."""
    gone = names - stays
    rows = {}
    for low, high in ((0.5, 0.7), (0.7, 0.75), (0.75, 0.8), (0.8, 0.85), (0.85, 0.9), (0.9, 1.01)):
        mine = [name for name, similarity in planted.items() if low <= similarity < high]
        rows[f"{low}-{min(high, 1.0)}"] = {"planted": len(mine), "removed": sum(name in gone for name in mine)}
    above = [name for name, similarity in planted.items() if similarity >= THRESHOLD]
    removed = sum(name in gone for name in above)
    return {
        "planted": len(planted),
        "planted_at_threshold": len(above),
        "recall_at_threshold": removed / max(len(above), 1),
        "removed": len(gone),
        "precision": sum(name in planted for name in gone) / max(len(gone), 1),
        "by_similarity": rows,
        "dropped": dropped,
    }


def main() -> None:
    """Make the corpus, run, compare, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=None, help="where the corpus is made; kept if it is named")
    parser.add_argument("--out", type=Path, default=None, help="folder for the results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        corpus, out = folder / "corpus", folder / "out"
        corpus.mkdir(parents=True, exist_ok=True)
        began = time.perf_counter()
        planted = make_corpus(corpus, options.scale, options.seed)
        size = sum(path.stat().st_size for path in corpus.iterdir())
        print(f"{size:,} bytes made in {time.perf_counter() - began:.0f} s", flush=True)
        run = measure(corpus, out, options.workers)
        stays, names = found_copies(out, corpus)
        report = json.loads((out / "report.json").read_text())
        result = {
            "date": datetime.date.today().isoformat(),
            "machine": {"cores": os.cpu_count(), "processor": platform.processor() or platform.machine()},
            "corpus": {"documents": len(names), "bytes": size, "seed": options.seed, "scale": options.scale},
            "workers": options.workers,
            "stages": report["seconds"],
            **run,
            **judge(planted, stays, names, report["dropped"]),
        }
    print(json.dumps(result, indent=2))
    if options.out is not None:
        path = options.out / f"data_prepare-cpu-{result['date']}.json"
        path.write_text(json.dumps(result, indent=2) + "\n")
        print(path)


if __name__ == "__main__":
    main()
