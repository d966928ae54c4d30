"""The benchmark of LatentMoE runs end to end on tiny shapes, without a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import latent_moe  # noqa: E402


def test_every_row(tmp_path: Path) -> None:
    """Errors that bfloat16 explains, a time of each way, and the floor."""
    out = tmp_path / "rows.json"
    assert latent_moe.main(["--device", "cpu", "--small", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["work"] for row in rows] == [row.name for row in latent_moe.ROWS]
    for row in rows:
        assert not row["failed"]
        assert all(value < 2e-2 for each in row["errors"].values() for value in each.values())
        assert min(row[f"{name}_ms"] for name in ("ours", "composition", "definition", "floor")) > 0
