"""The benchmark of activation policies runs end to end in few steps."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import activations  # noqa: E402


@pytest.mark.slow
def test_all_parts(tmp_path: Path) -> None:
    """Presets hold less one after the other, exact ones change no gradient, FP8 little, runs are comparable."""
    out = tmp_path / "rows.json"
    sizes = ["--steps", "2", "--seeds", "1", "--batch", "1", "--length", "64"]
    assert activations.main([*sizes, "--json", str(out)]) == 0
    rows = {row["work"]: row for row in json.loads(out.read_text())["rows"]}
    held = [rows[f"memory, {name}"]["bytes"] for name in ("none", "selective", "memory", "full")]
    assert held == sorted(held, reverse=True)
    assert rows["gradients, full"]["error"] == 0 < rows["gradients, memory"]["error"] < 0.05
    assert max(rows[f"blocks of {kind}"]["error"] for kind in ("32, power of two", "128, float32")) < 0.04
    exact, rounded = (rows[f"training, {name}, seed 0"]["losses"] for name in ("none", "memory"))
    assert exact[0] == rounded[0] and abs(exact[1] - rounded[1]) < 0.1
