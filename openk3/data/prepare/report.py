"""The report: what was read, kept and dropped for which reason, with examples; as JSON, as text and as a page."""

from __future__ import annotations

import html
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from openk3.config.prepare import DOMAINS, PrepareConfig
from openk3.data.prepare.chunk import DROPS, EXAMPLE_CHARACTERS, EXAMPLES
from openk3.data.prepare.duplicates import Duplicates, read_arrays
from openk3.data.prepare.inputs import Entry
from openk3.data.prepare.items import FAULTS, Fault
from openk3.data.prepare.journal import Work
from openk3.data.prepare.rules import RULES
from openk3.data.prepare.shards import find_document
from openk3.runtime.run_folder import write_atomic, write_json

REPORTS = ("report.json", "report.txt", "report.html")
_EXACT, _NEAR = "exact_duplicate", "near_duplicate"
EXPLAINED = {
    **{rule.name: f"{rule.says} ({rule.source})" for rule in RULES},
    **FAULTS,
    **DROPS,
    _EXACT: "the same text as an earlier record, but for blanks",
    _NEAR: "an earlier record that stays has this share, or more, of its runs of five words",
}
Found = tuple[Sequence[Path], Duplicates]


def build_report(
    config: PrepareConfig,
    work: Work,
    listed: tuple[Sequence[Entry], Sequence[Fault]],
    found: Found,
    written: tuple[list[dict[str, Any]], dict[str, float]],
) -> dict[str, Any]:
    """Everything the report says. `written`: the index's lines of shards, and seconds by stage of this call."""
    lines, (chunks, duplicates), (shards, seconds) = work.of("chunk"), found, written
    entries, unlisted = listed
    drops, faults, notes = Counter[str](), Counter[str](), Counter[str]()
    examples: dict[str, list[dict[str, Any]]] = {}
    for fault in unlisted:
        faults[fault.reason] += 1
        _keep(examples, f"file:{fault.reason}", [{"where": fault.where, "text": fault.detail}])
    for line in lines:
        drops.update(line["drops"])
        faults.update(line["faults"])
        notes.update(line["notes"])
        for reason, some in line["examples"].items():
            _keep(examples, reason, some)
    exact = int(_is_exact(duplicates, chunks).sum())
    near = int((duplicates.of >= 0).sum()) - exact
    drops.update({name: count for name, count in ((_EXACT, exact), (_NEAR, near)) if count})
    examples |= _pairs(duplicates, chunks)
    domains = {
        domain: {
            "documents": sum(line["documents"] for line in shards if line["domain"] == domain),
            "bytes": sum(line["bytes"] for line in shards if line["domain"] == domain),
        }
        for domain in DOMAINS
        if any(line["domain"] == domain for line in shards)
    }
    return {
        "config": asdict(config),
        "files": len(entries),
        "file_bytes": sum(entry.size for entry in entries),
        "records": sum(line["read"] for line in lines),
        "record_bytes": sum(line["bytes_read"] for line in lines),
        "documents": sum(domain["documents"] for domain in domains.values()),
        "bytes": sum(domain["bytes"] for domain in domains.values()),
        "domains": domains,
        "dropped": dict(drops.most_common()),
        "files_left_out": dict(faults.most_common()),
        "notes": {name: count for name, count in notes.items() if count},
        "quality": _quality(chunks, duplicates),
        "examples": examples,
        "explained": {name: EXPLAINED[name] for name in {*drops, *faults}},
        "seconds": seconds,
        "shards": shards,
    }


def _keep(examples: dict[str, list[dict[str, Any]]], reason: str, some: Sequence[dict[str, Any]]) -> None:
    mine = examples.setdefault(reason, [])
    mine.extend(some[: EXAMPLES - len(mine)])


def _hashes(chunks: Sequence[Path]) -> np.ndarray:
    return np.concatenate([*read_arrays(chunks, "hash"), np.zeros((0, 2), np.uint64)])


def _is_exact(duplicates: Duplicates, chunks: Sequence[Path]) -> np.ndarray:
    """Which texts repeat an earlier one in every word, bool [n]: an estimate of 1 alone does not say it."""
    alike = np.flatnonzero(duplicates.similarity == 1)
    hashes = _hashes(chunks)
    result = np.zeros(len(duplicates.of), bool)
    result[alike] = (hashes[alike] == hashes[duplicates.of[alike]]).all(1)
    return result


def _pairs(duplicates: Duplicates, chunks: Sequence[Path]) -> dict[str, list[dict[str, Any]]]:
    """The first few duplicates of each kind beside what they repeat."""
    firsts = np.cumsum([0, *(len(sizes) for sizes in read_arrays(chunks, "size"))])[:-1].tolist()
    exact = _is_exact(duplicates, chunks)
    shown: dict[str, list[dict[str, Any]]] = {}
    for name, chosen in ((_EXACT, exact), (_NEAR, (duplicates.of >= 0) & ~exact)):
        for number in np.flatnonzero(chosen)[:EXAMPLES].tolist():
            one = find_document(number, chunks, firsts)
            other = find_document(int(duplicates.of[number]), chunks, firsts)
            pair = {
                "where": one.where,
                "of": other.where,
                "similarity": round(float(duplicates.similarity[number]), 3),
                "text": one.text.decode("utf-8")[:EXAMPLE_CHARACTERS],
                "other": other.text.decode("utf-8")[:EXAMPLE_CHARACTERS],
            }
            shown.setdefault(name, []).append(pair)
    return shown


def _quality(chunks: Sequence[Path], duplicates: Duplicates) -> dict[str, Any]:
    """How many documents that stay have which score, in tenths; and how many were not judged."""
    scores = np.concatenate([*read_arrays(chunks, "quality"), np.zeros(0, np.float32)])[duplicates.of < 0]
    judged = scores[~np.isnan(scores)]
    return {"tenths": np.histogram(judged, 10, (0, 1))[0].tolist(), "not_judged": int(np.isnan(scores).sum())}


def as_text(report: dict[str, Any]) -> str:
    """What a terminal shows."""
    lines = [
        f"{report['records']:,} records ({report['record_bytes']:,} bytes) read from {report['files']:,} files;"
        f" {report['documents']:,} documents ({report['bytes']:,} bytes) kept in {len(report['shards']):,} shards",
        "",
    ]
    for domain, part in report["domains"].items():
        lines.append(f"  {domain:<24}{part['documents']:>12,} documents {part['bytes']:>16,} bytes")
    for title, name in (("dropped records", "dropped"), ("files and members not read", "files_left_out")):
        if report[name]:
            lines += ["", f"{title}:"]
            lines += [f"  {key:<24}{count:>12,}  {report['explained'][key]}" for key, count in report[name].items()]
    if report["notes"]:
        lines += ["", "notes:", *(f"  {name:<32}{count:>12,}" for name, count in report["notes"].items())]
    stages = ", ".join(f"{stage} {seconds:.0f} s" for stage, seconds in report["seconds"].items())
    return "\n".join([*lines, "", f"time of this call: {stages}", ""])


def as_page(report: dict[str, Any]) -> str:
    """A page of one file: the text, then the examples of every reason."""
    parts = [
        "<!doctype html><meta charset='utf-8'><title>Data report</title>",
        "<style>body{font:15px sans-serif;max-width:70em;margin:2em auto;padding:0 1em}pre{white-space:pre-wrap;"
        "background:#f4f4f4;padding:.6em}h3{margin-bottom:.2em}</style>",
        f"<h1>Data report</h1><pre>{html.escape(as_text(report))}</pre><h2>Examples</h2>",
    ]
    for reason, examples in report["examples"].items():
        name = reason.removeprefix("file:")
        parts.append(f"<h3>{html.escape(name)}</h3><p>{html.escape(EXPLAINED.get(name, ''))}</p>")
        for example in examples:
            parts.append(f"<p><b>{html.escape(example['where'])}</b></p><pre>{html.escape(example['text'])}</pre>")
            if "other" in example:
                said = f"{example['similarity']} like {example['of']}"
                parts.append(f"<p>{html.escape(said)}</p><pre>{html.escape(example['other'])}</pre>")
    return "\n".join(parts) + "\n"


def write_report(out: Path, report: dict[str, Any]) -> None:
    """report.json, report.txt and report.html in `out`."""
    texts = {"report.txt": as_text(report), "report.html": as_page(report)}
    for name, text in texts.items():
        write_atomic(out / name, lambda temporary, text=text: temporary.write_text(text, encoding="utf-8"))
    write_json(out / REPORTS[0], json.loads(json.dumps(report)))
