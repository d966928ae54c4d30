"""The benchmark of depth reads runs end to end on tiny shapes, without a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import attn_res  # noqa: E402


def test_every_row(tmp_path: Path) -> None:
    """Times, floors and errors that bfloat16 explains; floors in units of one tensor of tokens."""
    out = tmp_path / "rows.json"
    assert attn_res.main(["--device", "cpu", "--small", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == len(attn_res.ROWS) == 15
    for row in rows:
        assert row["failed"] == {} and min(row["ours_ms"], row["floor_ms"], row["of_floor"]) > 0
        for found in row["errors"].values():
            assert found["out"] < 5e-3 and found.get("sources", 0) < 3e-2
    unit = 8192 * 7168 * 2
    assert [row.floor_bytes // unit for row in attn_res.ROWS] == [3, 6, 10, 8, 17, 29, 5, 8, 12, 11, 20, 32, 16, 24, 5]
