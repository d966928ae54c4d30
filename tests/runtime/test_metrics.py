"""metrics.jsonl: whole lines, each step once, also after a resume or a torn write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from openk3.runtime.metrics import MetricsLog, StepTimer, read_metrics


def test_lines_and_resume(tmp_path: Path) -> None:
    """Steps after the resumed one and a torn last line are dropped, then written anew: no step twice."""
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, keep_through=0)
    for step in range(1, 6):
        log.write(step, {"loss": 1 / step})
    with path.open("a") as file:
        file.write('{"step": 6, "lo')
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3, 4, 5]
    log = MetricsLog(path, keep_through=3)
    log.write(4, {"loss": 0.5})
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4] and rows[3]["loss"] == 0.5


def test_what_is_no_row_is_left_out(tmp_path: Path) -> None:
    """Bytes that are no text, JSON that is no row, nesting without end: the rows around them stay."""
    path = tmp_path / "metrics.jsonl"
    rubbish = [b"\xff\xfe", b"[1]", b"3", b'{"loss": 1}', b'{"step": "2"}', b"[" * 100_000, b""]
    path.write_bytes(b"\n".join([b'{"step": 1}', *rubbish, b'{"step": 2}', b'{"st']))
    assert read_metrics(path) == [{"step": 1}, {"step": 2}]
    MetricsLog(path, keep_through=1)
    assert read_metrics(path) == [{"step": 1}]


def test_a_new_run_starts_empty(tmp_path: Path) -> None:
    """Step 0 keeps nothing."""
    path = tmp_path / "metrics.jsonl"
    MetricsLog(path, keep_through=0).write(1, {"loss": 2.0})
    MetricsLog(path, keep_through=0)
    assert path.read_text() == ""


def test_numbers_that_json_lacks(tmp_path: Path) -> None:
    """NaN and infinity become null; the file stays strict JSON."""
    path = tmp_path / "metrics.jsonl"
    MetricsLog(path, keep_through=0).write(1, {"loss": float("nan"), "norm": float("inf"), "lr": 0.1})

    def refuse(name: str) -> None:
        raise AssertionError(name)

    assert json.loads(path.read_text(), parse_constant=refuse) == {"step": 1, "loss": None, "norm": None, "lr": 0.1}


def test_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The median forgives one slow step."""
    times = iter([0.0, 1.0, 1.0, 2.0, 2.0, 9.0])
    monkeypatch.setattr("openk3.runtime.metrics.time.perf_counter", lambda: next(times))
    timer = StepTimer()
    assert timer.typical == 0
    seconds = []
    for _ in range(3):
        timer.start()
        seconds.append(timer.stop())
    assert seconds == [1.0, 1.0, 7.0] and timer.typical == 1.0
    timer.clear()
    assert timer.typical == 0
