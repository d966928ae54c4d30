"""The benchmarks of Newton-Schulz and of head and loss run end to end on tiny shapes, without a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import cross_entropy  # noqa: E402
import newton_schulz  # noqa: E402


def test_newton_schulz(tmp_path: Path) -> None:
    """Errors of ours are smaller than those of bfloat16 products, and an optimizer step has its share."""
    out = tmp_path / "rows.json"
    arguments = ["--device", "cpu", "--small", "--rows", "7168", "512", "small", "--json", str(out)]
    assert newton_schulz.main(arguments) == 0
    *matrices, optimizer = json.loads(out.read_text())["rows"]
    assert [row["work"] for row in matrices] == ["96 heads of 128 x 7168", "1536 tall experts of 512 x 384"]
    for row in matrices:
        assert all(row["errors"]["ours"][kind] < row["errors"]["torch"][kind] for kind in ("normal", "1/n^2"))
        assert min(row[name] for name in ("ours_ms", "torch_ms", "floor_ms", "tflops")) > 0
    assert optimizer["share_of_step"] > 0 and optimizer["parameters"] > 1e5
    assert optimizer["goal_ms"] * optimizer["share_of_step"] / 0.08 == pytest.approx(optimizer["ours_ms"])


def test_cross_entropy(tmp_path: Path) -> None:
    """Loss and log-probabilities: errors that bfloat16 explains, times, and the floor."""
    out = tmp_path / "rows.json"
    arguments = ["--device", "cpu", "--small", "--rows", "D=7168", "--json", str(out)]
    assert cross_entropy.main(arguments) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["work"][:4] for row in rows] == ["loss", "logp"]
    for row in rows:
        assert all(value < 1e-2 for value in row["errors"]["ours"].values())
        assert min(row[name] for name in ("ours_ms", "torch_ms", "definition_ms", "floor_ms", "of_floor")) > 0
