"""metrics.jsonl: one JSON line per step, in order, each step once, whatever happened to the run in between."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from pathlib import Path
from statistics import median
from typing import Any

from openk3.config.json_file import JsonError, parse_json
from openk3.runtime.run_folder import write_atomic
from openk3.runtime.staging import named


class MetricsLog:
    """Appends lines to a metrics file; each is whole on disk before `write` returns to the loop."""

    def __init__(self, path: Path, *, keep_through: int) -> None:
        """Continue after step `keep_through` (0: start anew): later lines and a torn last one are dropped."""
        self.path = path
        kept = [row for row in read_metrics(path) if row["step"] <= keep_through] if path.is_file() else []
        text = "".join(_line(row) for row in kept)
        write_atomic(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Append one step's values; numbers that JSON lacks (NaN, infinity) become null."""
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(_line({"step": step, **values}))
        except OSError as error:
            raise named(error, self.path) from error


def _line(row: dict[str, Any]) -> str:
    clean = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in row.items()}
    return json.dumps(clean) + "\n"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Every row of a metrics file, in order; what is no row, such as a torn last line, is left out."""
    rows = []
    for line in path.read_bytes().splitlines():
        try:
            row = parse_json(line)
        except JsonError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


class StepTimer:
    """Seconds per step: the last one, and the median of the last twenty."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=20)
        self._start = 0.0

    def start(self) -> None:
        """The step begins."""
        self._start = time.perf_counter()

    def stop(self) -> float:
        """The step has ended; its seconds."""
        self._recent.append(time.perf_counter() - self._start)
        return self._recent[-1]

    def clear(self) -> None:
        """Steps will take another time from here on."""
        self._recent.clear()

    @property
    def typical(self) -> float:
        """Median seconds of the last steps; 0 before the first."""
        return median(self._recent) if self._recent else 0.0
