"""The results of `benchmarks/kda.py` as tables, and which errors of ours are larger than fla-core's."""

from __future__ import annotations

from typing import Any

COLUMNS = ("ours", "fla", "flashkda", "nemo")
TITLES = {"ours": "openk3", "fla": "fla-core", "fla_kept": "fla-core, keeping intermediates"}
TITLES |= {"flashkda": "FlashKDA", "nemo": "NeMo"}
MARGIN = 1.01  # of fla-core's error: two roundings of the same result to bfloat16 differ by less
ROUNDING = 1e-6  # float32 sums in another order


def number(value: float | None, digits: int = 3) -> str:
    """Milliseconds with three decimals below 10, and a dash for what was not measured."""
    if value is None:
        return "-"
    return f"{value:.{digits}f}" if value < 10 else f"{value:.{digits - 1}f}"


def ratio(row: dict[str, Any], name: str) -> str:
    """How many times as long a peer takes."""
    theirs, mine = row.get(f"{name}_ms"), row.get("ours_ms")
    return "-" if theirs is None or mine is None else f"{theirs / mine:.2f}"


def worst(found: dict[str, float] | None) -> str:
    """The largest relative error and the result that has it."""
    if not found:
        return "-"
    name = max(found, key=lambda each: found[each] if found[each] == found[each] else float("inf"))
    return f"{found[name]:.1e} ({name})"


def verdict(row: dict[str, Any]) -> str:
    """Whether ours is the fastest, and whether the goal is met."""
    mine = row.get("ours_ms")
    if mine is None:
        return "-"
    rivals = [row[f"{name}_ms"] for name in (*COLUMNS[1:], "fla_kept") if row.get(f"{name}_ms") is not None]
    fastest = "-" if not rivals else "fastest" if mine < min(rivals) else "NOT FASTEST"
    goal = row.get("goal_ms")
    return fastest if goal is None else f"{fastest}, goal {'met' if mine <= goal else 'missed'}"


def print_row(row: dict[str, Any]) -> None:
    """One line as soon as a row is measured."""
    times = ", ".join(f"{name} {number(row.get(f'{name}_ms'))}" for name in (*COLUMNS, "fla_kept"))
    wrong = ", ".join(f"{name} {worst(found)}" for name, found in row["errors"].items())
    print(f"{row['work']}: {times} ms; floor {number(row['floor_ms'])}; errors {wrong}", flush=True)


def table(head: list[str], lines: list[list[str]]) -> list[str]:
    """A Markdown table: first column to the left, others to the right."""
    rows = [head, ["---", *["---:"] * (len(head) - 1)], *lines]
    return ["| " + " | ".join(cells) + " |" for cells in rows]


def times_table(rows: list[dict[str, Any]]) -> list[str]:
    """Milliseconds, ratios, floor and goal."""
    head = ["work, ms", *(TITLES[name] for name in COLUMNS)]
    head += [f"{TITLES[name]} / openk3" for name in COLUMNS[1:]] + ["floor", "goal", ""]
    lines = []
    for row in rows:
        cells = [number(row.get(f"{name}_ms")) for name in COLUMNS] + [ratio(row, name) for name in COLUMNS[1:]]
        lines.append([row["work"], *cells, number(row["floor_ms"]), number(row["goal_ms"]), verdict(row)])
    return table(head, lines)


def values_table(rows: list[dict[str, Any]], field: str, title: str) -> list[str]:
    """One value for each implementation, of the rows that have any."""
    rows = [row for row in rows if row.get(field)]
    names = [name for name in TITLES if any(name in row[field] for row in rows)]
    lines = [[row["work"], *(number(row[field].get(name)) for name in names)] for row in rows]
    return table([title, *(TITLES[name] for name in names)], lines) if rows else []


def errors_table(rows: list[dict[str, Any]]) -> list[str]:
    """The largest error of each implementation."""
    names = [name for name in TITLES if any(name in row["errors"] for row in rows)]
    lines = [[row["work"], *(worst(row["errors"].get(name)) for name in names)] for row in rows]
    return table(["largest relative error", *(TITLES[name] for name in names)], lines) if rows else []


def markdown(results: dict[str, Any]) -> str:
    """All of a run's tables."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    lines = [f"# KDA kernels on {results['gpu']}, {results['date']}", ""]
    lines += [f"Commit {results['commit']}; {versions}; copy rate {results['copy_tb_s']:.2f} TB/s.", ""]
    for name, reason in results["left_out"].items():
        lines += [f"{TITLES[name]} was left out: {reason}", ""]
    kept = [row for row in results["rows"] if row.get("fla_kept_ms") is not None and row.get("peak_gb")]
    parts = [
        times_table(results["rows"]),
        values_table([row | {"kept": {"fla_kept": row["fla_kept_ms"]}} for row in kept], "kept", "work, ms"),
        values_table(results["rows"], "peak_gb", "peak memory, GB"),
        values_table(results["rows"], "eager_ms", "without a graph, ms"),
        errors_table(results["rows"]),
        errors_table(results["checks"]),
    ]
    for row in [*results["rows"], *results["checks"]]:
        for name, why in row.get("failed", {}).items():
            lines += [f"{row['work']}: {TITLES[name]} failed: {why}", ""]
    for part in parts:
        lines += [*part, ""] if part else []
    lines += [f"- {note}" for note in results.get("notes", [])]
    return "\n".join(lines).rstrip() + "\n"


def worse_than_fla(results: dict[str, Any]) -> list[str]:
    """One line for each result of ours that is not a number, or further from float64 than fla-core's by the margin."""
    found = []
    for row in [*results["rows"], *results["checks"]]:
        mine, theirs = row["errors"].get("ours", {}), row["errors"].get("fla", {})
        for name, value in mine.items():
            if name in theirs and not value <= max(theirs[name] * MARGIN, ROUNDING):
                found.append(f"{row['work']}: {name} of ours is off by {value:.2e}, fla-core's by {theirs[name]:.2e}")
            elif not value < float("inf"):
                found.append(f"{row['work']}: {name} of ours is {value}")
    return found


def verdict_on_errors(results: dict[str, Any]) -> str:
    """What is to be said of errors if none is larger than fla-core's: nothing was compared where it did not run."""
    rows = [*results["rows"], *results["checks"]]
    if any(set(row["errors"].get("ours", ())) & set(row["errors"].get("fla", ())) for row in rows):
        return f"no result of ours is further from float64 than fla-core's by more than {MARGIN - 1:.0%}"
    return "fla-core did not run, so no error was compared with its"
