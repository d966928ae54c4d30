"""The KDA benchmark runs end to end on tiny shapes, and the results that are committed have the form it writes."""

from __future__ import annotations

import json
import math
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT / "benchmarks"))

import kda  # noqa: E402
import kda_decode  # noqa: E402
from kda_report import markdown, verdict_on_errors, worse_than_fla  # noqa: E402
from kda_timing import Protocol  # noqa: E402

TIMES = ("ours_ms", "fla_ms", "flashkda_ms", "nemo_ms", "floor_ms", "goal_ms")


def assert_form(results: dict[str, Any]) -> None:
    """Conditions, and for each row its times (None where something cannot run) and errors of ours."""
    assert {"date", "commit", "gpu", "versions", "copy_tb_s", "rows", "checks", "left_out"} <= results.keys()
    assert {"python", "torch"} <= results["versions"].keys()
    assert len({row["work"] for row in results["rows"]}) == len(results["rows"])
    for row in results["rows"]:
        assert set(TIMES) <= row.keys(), row["work"]
        assert all(row[name] is None or (math.isfinite(row[name]) and row[name] > 0) for name in TIMES), row["work"]
        assert row["ours_ms"] is not None
        assert row["floor_ms"] is not None
        timed = {name.removesuffix("_ms") for name in TIMES[:4] if row[name] is not None}
        assert timed <= row["errors"].keys(), row["work"]
    for row in [*results["rows"], *results["checks"]]:
        found = row["errors"]["ours"]
        assert {"o", "final"} <= found.keys() or {"o", "state"} <= found.keys()
        assert all(0 <= value < 1 for value in found.values()), row["work"]


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of every row on tiny shapes, without a GPU."""
    folder = tmp_path_factory.mktemp("results")
    assert kda.main(["--device", "cpu", "--small", "--quick", "--out", str(folder)]) == 0
    return next(folder.glob("*.json"))


def test_a_dry_run_measures_every_row(dry_run: Path) -> None:
    """Every row and every hard input, written as JSON and as the same in Markdown; nothing half-written stays."""
    results = json.loads(dry_run.read_text())
    assert_form(results)
    assert [row["work"] for row in results["rows"]] == [kda.small(row).name for row in kda.all_rows()]
    assert results["rows"][0]["work"] == "forward T=8192 H=96 (tiny: T=16, H=2, 16 channels)"
    assert len(results["checks"]) == 32
    assert dry_run.with_suffix(".md").read_text() == markdown(results)
    assert len(list(dry_run.parent.iterdir())) == 2
    both = next(row for row in results["rows"] if row["work"].startswith("forward+backward"))
    assert len(both["errors"]["ours"]) == 10


def test_rows_are_chosen_by_name(tmp_path: Path) -> None:
    """Only rows whose name contains a part; checks of hard inputs belong to a whole run."""
    chosen = ["--rows", "8x1024 H=64", "fused, batch 8"]
    assert kda.main(["--device", "cpu", "--small", "--quick", "--out", str(tmp_path), *chosen]) == 0
    results = json.loads(next(tmp_path.glob("*.json")).read_text())
    names = ["forward 8x1024 H=64", "forward+backward 8x1024 H=64", "decode fused, batch 8"]
    assert [row["work"].partition(" (tiny")[0] for row in results["rows"]] == names
    assert results["checks"] == []
    assert (
        kda.main(["--device", "cpu", "--small", "--check-only", "--rows", "hard", "--out", str(tmp_path / "no")]) == 0
    )
    assert not (tmp_path / "no").exists()


def test_only_a_whole_run_takes_the_name_of_one(tmp_path: Path) -> None:
    """Chosen, tiny and quick rows replace no results of every row, and runs of other rows not each other's."""
    conditions = {"gpu": "NVIDIA H200", "date": "2026-11-30"}
    runs = ([], ["--rows", "decode"], ["--rows", "T=8192 H=96", "8x1024"], ["--quick"], ["--small", "--rows", "decode"])
    kinds = [kda.kind_of(kda.flags(["--device", "cpu", *run])) for run in runs]
    assert kinds == ["", "rows_decode", "rows_T=8192_H=96_8x1024", "quick", "small_rows_decode"]
    names = [kda.file_of(conditions, tmp_path, kind).name for kind in kinds]
    assert names[:2] == ["kda-h200-2026-11-30.json", "kda_rows_decode-h200-2026-11-30.json"]
    assert [fnmatch(name, "kda-*.json") for name in names] == [True, False, False, False, False]


def test_without_a_gpu_nothing_is_written_unless_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trying the script leaves the folder of results alone, says so, and claims nothing of what did not run."""
    monkeypatch.setattr(kda, "RESULTS", tmp_path / "results")
    assert kda.main(["--device", "cpu", "--small", "--quick", "--rows", "fused, batch 8"]) == 0
    assert not (tmp_path / "results").exists()
    said = capsys.readouterr().out.splitlines()
    assert said[-2:] == [
        "nothing is written; --out FOLDER keeps the results",
        "fla-core did not run, so no error was compared with its",
    ]


def test_a_run_that_breaks_replaces_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rows measured before are kept under a name that says so; the results of the last whole run stay."""
    run = [
        "--device",
        "cpu",
        "--small",
        "--quick",
        "--rows",
        "fused, batch 8",
        "fused, batch 1",
        "--out",
        str(tmp_path),
    ]
    assert kda.main(run) == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    measure = kda.Bench.measure

    def breaks(self: kda.Bench, row: Any) -> dict[str, Any]:
        if "batch 8" in row.name:
            raise RuntimeError("out of memory")
        return measure(self, row)

    monkeypatch.setattr(kda.Bench, "measure", breaks)
    with pytest.raises(RuntimeError, match="out of memory"):
        kda.main(run)
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert before.items() <= after.items()
    (kept,) = (name for name in after if name.endswith(".json") and name not in before)
    assert "unfinished" in kept and len(json.loads(after[kept])["rows"]) == 1


def test_decode_errors_of_all_are_of_the_same_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timed steps change the pool; the same steps under another name have the same errors nevertheless."""
    steps = {False: kda_decode.our_recurrence, True: kda_decode.our_layer}
    monkeypatch.setattr(kda_decode, "decode_steps", lambda names: dict.fromkeys(names, steps))
    row = kda.small(next(row for row in kda.all_rows() if row.name == "decode fused, batch 8"))
    found = kda_decode.measure_decode(row, ["ours", "fla"], torch.device("cpu"), Protocol(repeats=2, warmups=1))
    assert found["errors"]["ours"] == found["errors"]["fla"] and set(found["times"]) == {"ours", "fla"}


def test_floors_count_every_byte_once() -> None:
    """T=8192, H=96: 1.0 GB forward, 2.8 GB with backward; a decode step of 256 reads and writes 3.2 GB of states."""
    rows = {row.name: row.floor_bytes / 1e9 for row in kda.all_rows()}
    assert rows["forward T=8192 H=96"] == pytest.approx(1.02, abs=0.02)
    assert rows["forward+backward T=8192 H=96"] == pytest.approx(2.85, abs=0.03)
    assert rows["decode recurrence only, batch 256"] == pytest.approx(3.25, abs=0.03)


def test_larger_errors_than_the_peers_are_reported() -> None:
    """By more than one per cent, or not a number; errors of rounding in float32 are not compared."""
    row = {"work": "row", "errors": {"ours": {"o": 2e-3, "final": 2e-7, "d_q": 1.005e-3}, "fla": {}}}
    row["errors"]["fla"] = {"o": 1.9e-3, "final": 1e-7, "d_q": 1e-3}
    lost = {"work": "lost", "errors": {"ours": {"o": math.nan}}}
    found = worse_than_fla({"rows": [row], "checks": [lost]})
    assert [line.partition(" ")[0] for line in found] == ["row:", "lost:"]
    assert "o of ours" in found[0]
    said = "no result of ours is further from float64 than fla-core's by more than 1%"
    assert verdict_on_errors({"rows": [row], "checks": []}) == said
    assert verdict_on_errors({"rows": [lost, {"errors": {"ours": {"o": 1e-3}, "fla": {}}}], "checks": []}) != said


def test_committed_results_have_the_form() -> None:
    """Every results file is of a GPU, and its Markdown is made from it."""
    paths = sorted(RESULTS.glob("kda-*.json"))
    assert paths
    for path in paths:
        results = json.loads(path.read_text())
        assert_form(results)
        assert not results["gpu"].startswith("none")
        assert path.name == f"kda-{results['gpu'].removeprefix('NVIDIA ').split()[0].lower()}-{results['date']}.json"
        assert path.with_suffix(".md").read_text() == markdown(results)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "cuda:99"], "torch sees"),
        (["--device", "nonsense"], "must be cuda"),
        (["--device", "meta"], "must be cuda"),
        (["--device", "cpu", "--rows", "nonsense"], "no row has that in its name"),
        (["--device", "cpu", "--peers", "/no/such/folder"], "no such folder"),
        (["--device", "cpu", "--out", __file__], "not a folder"),
    ],
)
def test_flags_that_lead_nowhere(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line and exit code 2 before anything is measured or written, and no traceback."""
    with pytest.raises(SystemExit, match="2"):
        kda.main(arguments)
    assert words in capsys.readouterr().err
