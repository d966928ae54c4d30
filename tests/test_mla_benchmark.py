"""The benchmark of Gated MLA's attention runs end to end on tiny shapes, without a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import mla  # noqa: E402


def test_every_row(tmp_path: Path) -> None:
    """The definition is exact on bfloat16 values, and has a time and a floor in every row."""
    out = tmp_path / "rows.json"
    assert mla.main(["--device", "cpu", "--small", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["work"] for row in rows] == [row.name for row in mla.ROWS]
    for row in rows:
        assert not row["failed"] and row["errors"]["definition"] < 1e-6
        assert min(row["definition_ms"], row["floor_ms"], row["tflops"], row["tb_s"]) > 0


def test_flops_and_bytes() -> None:
    """The released model at 8192 tokens, and latents of 64 requests: figures of the notes."""
    rows = {row.name: row for row in mla.ROWS}
    assert abs(rows["forward T=8192 H=96"].flops / 2.0616e12 - 1) < 1e-3
    assert abs(rows["forward and backward T=8192 H=96"].flops / 7.42e12 - 1) < 1e-3
    decode = rows["decode 64 x 32768 H=96"]
    assert abs(decode.flops / 4.38e11 - 1) < 1e-2 and abs(decode.floor_bytes / 2.43e9 - 1) < 1e-2


def test_goals() -> None:
    """By the faster library where one ran, by copies up to 24 heads and by products beyond; other rows have none."""
    rows = {row.name: row for row in mla.ROWS}
    rates = 700e12, 4e12
    times = {"cudnn_ms": 4.0, "flash_ms": 5.0, "triton_ms": 3.0}
    assert mla.goal(rows["forward T=8192 H=96"], times, rates) == 5
    assert abs(mla.goal(rows["forward and backward T=8192 H=96"], times, rates) / (4 / 0.65) - 1) < 1e-9
    assert mla.goal(rows["forward packed H=96"], {"triton_ms": 3.0}, rates) is None
    few, many = rows["decode 64 x 32768 H=24"], rows["decode 64 x 32768 H=96"]
    assert abs(mla.goal(few, {}, rates) / (1e3 * few.floor_bytes / 4e12 / 0.8) - 1) < 1e-9
    assert abs(mla.goal(many, {}, rates) / (1e3 * many.flops / 700e12 / 0.6) - 1) < 1e-9
    assert mla.goal(rows["decode 64 x 32768 H=24, 4 new tokens"], {}, rates) is None
    assert mla.goal(rows["decode 1 x 131072 H=96"], {}, rates) is None
