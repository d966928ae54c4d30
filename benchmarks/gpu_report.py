"""The results of `gpu.py` as Markdown: a table of goals, then one table for each part, with ratios to peers."""

from __future__ import annotations

from typing import Any

from kda_report import number, table

Rows = list[dict[str, Any]]
NAMES = {"tokens_per_s": "tokens/s", "mfu": "MFU", "of_floor": "of the floor", "share_of_step": "of a training step"}
NAMES |= {"tflops": "TFLOP/s", "ratio": "ratio", "of_floors": "of floors", "published_ratio": "published"}
NAMES |= {"token_ratio": "in tokens", "more": "more"}
TITLES = {
    "ours": "openk3",
    "fla": "fla-core",
    "fla_gluon": "fla-core, Gluon",
    "nemo": "NeMo",
    "nemo_fast": "NeMo, fast",
}
TITLES |= {"torch": "torch", "cudnn": "cuDNN", "flash": "flash attention", "goal_of_roofline": "70 % of the roofline"}
TITLES |= {"products": "torch's products", "composition": "torch, put together", "all_mla": "all MLA", "bf16": "BF16"}
PEERS = ("torch", "composition", "products", "fla", "fla_gluon", "nemo", "nemo_fast", "cudnn", "flash", "transformers")
PEERS += ("compiled", "apart", "plain", "all_mla")
SHARES = ("mfu", "of_floor", "more", "share_of_step")


def is_number(value: Any) -> bool:
    """Whether a field can be shown as one."""
    return isinstance(value, float | int) and not isinstance(value, bool)


def verdict(row: dict[str, Any]) -> str:
    """Whether the goal is met; nothing where there is none."""
    if not is_number(row.get("goal_ms")) or not is_number(row.get("ours_ms")):
        return ""
    return "met" if row["ours_ms"] <= row["goal_ms"] else "missed"


def goals(rows: Rows) -> list[str]:
    """Every row that has a goal, and whether it is met."""
    found = [row for row in rows if verdict(row)]
    if not found:
        return []
    cells = [[row["work"], number(row["ours_ms"]), number(row["goal_ms"]), verdict(row)] for row in found]
    for row in rows:
        if is_number(row.get("goal_of_roofline_ms")):
            reached = "met" if row["ours_ms"] <= row["goal_of_roofline_ms"] else "missed"
            name = f"{row['work']}, 70 % of the roofline"
            cells.append([name, number(row["ours_ms"]), number(row["goal_of_roofline_ms"]), reached])
    met = sum(line[-1] == "met" for line in cells)
    return ["## Goals", "", f"{met} of {len(cells)} met.", "", *table(["work, ms", "openk3", "goal", ""], cells), ""]


def part_table(rows: Rows) -> list[str]:
    """Times, ratios, memory and what else a part's rows have."""
    times = list(dict.fromkeys(key for row in rows for key in row if key.endswith("_ms") and is_number(row[key])))
    times.sort(key=lambda key: (key != "ours_ms", key in ("floor_ms", "goal_ms", "goal_of_roofline_ms")))
    more = [key for key in NAMES if any(is_number(row.get(key)) for row in rows)]
    rivals = [name for name in PEERS if f"{name}_ms" in times]
    peaks = list(dict.fromkeys(name for row in rows for name in _peaks(row)))
    head = ["work, ms", *(TITLES.get(key[:-3], key[:-3].replace("_", " ")) for key in times)]
    head += [f"{TITLES.get(name, name)} / openk3" for name in rivals]
    head += [NAMES[key] for key in more] + [f"peak of {TITLES.get(name, name)}, GB" for name in peaks] + ["goal is"]
    lines = []
    for row in rows:
        cells = [number(row[key]) if is_number(row.get(key)) else "-" for key in times]
        cells += [_ratio(row, name) for name in rivals] + [_shown(key, row.get(key)) for key in more]
        cells += [f"{_peaks(row)[name]:.1f}" if name in _peaks(row) else "-" for name in peaks]
        lines.append([row["work"], *cells, verdict(row) or "-"])
    return table(head, lines)


def markdown(results: dict[str, Any]) -> str:
    """All of a run's tables."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    lines = [
        f"# GPU stack on one {results['gpu']}, {results['date']}",
        "",
        f"{versions}, commit {results['commit']}.",
        "",
    ]
    lines += [f"{note}\n" for note in results.get("notes", [])] + goals(results["rows"])
    for part in dict.fromkeys(row["part"] for row in results["rows"]):
        rows = [row for row in results["rows"] if row["part"] == part]
        seconds = results.get("seconds", {}).get(part)
        lines += [f"## {part}", ""] + ([f"{seconds:.0f} seconds.", ""] if seconds else []) + [*part_table(rows), ""]
        lines += _notes(rows)
    lines += [f"Failed: {part}: {why}" for part, why in results["failed"].items()]
    lines += [f"Left out: {part}: {why}" for part, why in results.get("left_out", {}).items()]
    return "\n".join(lines).rstrip() + "\n"


def _notes(rows: Rows) -> list[str]:
    found = [f"- {row['work']}: {row['error']}" for row in rows if row.get("error")]
    for row in rows:
        found += [f"- {row['work']}: {name} failed: {why}" for name, why in (row.get("failed") or {}).items()]
        if "measured" in row:
            found.append(f"- {row['work']}: measured in another run: {row['measured']}")
    for row in rows:
        if row.get("operations"):
            found += ["", f"Kernels of one micro-batch of {row['work']}:", ""]
            cells = [
                [each["name"], f"{1e3 * each['seconds']:.2f}", _least(each["roofline_seconds"])]
                for each in sorted(row["operations"], key=lambda each: -each["seconds"])
            ]
            found += table(["operation", "ms", "least"], cells)
    return [*found, ""] if found else []


def _least(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.2f}"


def _peaks(row: dict[str, Any]) -> dict[str, float]:
    """Peak memory by way; a plain number is ours."""
    found = row.get("peak_gb")
    if is_number(found):
        return {"ours": found}
    return {name: value for name, value in (found or {}).items() if is_number(value)}


def _ratio(row: dict[str, Any], name: str) -> str:
    theirs, mine = row.get(f"{name}_ms"), row.get("ours_ms")
    return f"{theirs / mine:.2f}" if is_number(theirs) and is_number(mine) and mine else "-"


def _shown(key: str, value: Any) -> str:
    if not is_number(value):
        return "-"
    if key in SHARES:
        return f"{value:.1%}"
    return f"{value:,.0f}" if key in ("tokens_per_s", "tflops") else f"{value:.2f}"
