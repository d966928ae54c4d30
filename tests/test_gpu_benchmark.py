"""One command for every row of the GPU stack: parts run on tiny shapes without a GPU, and one's fault spares others."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu  # noqa: E402

TRIAL = ["--device", "cpu", "--small", "--quick"]


def results(folder: Path) -> tuple[dict, str]:
    """What was written: the rows, and the tables."""
    (path,) = folder.glob("*.json")
    return json.loads(path.read_text()), path.with_suffix(".md").read_text()


def test_rows_and_tables(tmp_path: Path) -> None:
    """Scripts that no other test runs, and one row of training."""
    assert gpu.main([*TRIAL, "--parts", "mxfp4", "decode", "--out", str(tmp_path)]) == 0
    found, text = results(tmp_path)
    assert (found["gpu"], found["failed"]) == ("CPU", {}) and found["peak_tflops"] == 989
    assert [row["work"] for row in found["rows"]] == [
        *("MXFP4 layer trial, T=1", "MXFP4 layer trial, T=40"),
        *("decode tiny, batch 1, context 32", "decode tiny, batch 3, context 32"),
    ]
    for row in found["rows"]:
        assert row["ours_ms"] > 0 and row["commit"] == found["commit"] and f"| {row['work']} |" in text
    few, many, one, three = found["rows"]
    assert few["goal_ms"] == pytest.approx(few["floor_ms"] / 0.75)
    assert many["goal_ms"] == pytest.approx(many["bf16_ms"] / 0.7)
    assert three["states_gb"] == pytest.approx(3 * one["states_gb"]) and three["weights_gb"] > one["weights_gb"]
    assert [path.name[:17] for path in sorted(tmp_path.glob("*.json"))] == ["gpu_mxfp4_decode-"]


def test_a_part_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is named with its reason; the exit status says so."""
    row = {"work": "train tiny 2x64", "ours_ms": 3.0, "tokens_per_s": 2e4, "mfu": 0.25, "floor_ms": None}
    monkeypatch.setattr(gpu, "of_training", lambda options: [row])
    monkeypatch.setattr(gpu, "of_script", lambda part, options: 1 / 0)
    assert gpu.main([*TRIAL, "--parts", "mla", "train", "--out", str(tmp_path)]) == 1
    found, text = results(tmp_path)
    assert found["failed"] == {"mla": "ZeroDivisionError: division by zero"} and len(found["rows"]) == 1
    assert "| train tiny 2x64 | 3.000 | 20,000 | 25.0% |" in text and "Failed: mla" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "tpu"], "--device: must be cuda or cpu, got 'tpu'"),
        (["--device", "cuda"], "--device cuda: no GPU here; --device cpu --small tries the script"),
        ([*TRIAL, "--activations", "bogus"], "activations: 'bogus' is none of none, selective"),
        ([*TRIAL, "--out", __file__], "File exists"),
        ([*TRIAL, "--peers", "nowhere"], "--peers: no such folder: nowhere"),
    ],
)
def test_what_cannot_run_is_refused_before_the_first_part(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not after minutes on a machine that is lent, nor by a traceback."""
    monkeypatch.setattr(gpu, "run", lambda options: 1 / 0)
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as end:
        gpu.main(words)
    assert end.value.code == 2 and message in capsys.readouterr().err
