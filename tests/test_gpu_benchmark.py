"""One command for every row of the GPU stack: parts run on tiny shapes without a GPU, and one's fault spares others."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import engine_gpu  # noqa: E402
import gpu  # noqa: E402
import hybrid_decode  # noqa: E402
import residuals  # noqa: E402
import time_to_loss  # noqa: E402
import whole_models  # noqa: E402

from openk3.model import k3  # noqa: E402
from openk3.model.depth import ResidualStream  # noqa: E402
from openk3.model.k3 import K3  # noqa: E402
from openk3.recipes import pretrain  # noqa: E402

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


def test_residuals(tmp_path: Path) -> None:
    """A training and a decoding row, each with a goal by what plain residuals took; afterwards depth is attended to."""
    before = k3.open_stream
    assert gpu.main([*TRIAL, "--parts", "residuals", "--out", str(tmp_path)]) == 0
    found, text = results(tmp_path)
    assert [row["work"] for row in found["rows"]] == [row.name for row in residuals.TRIAL] and k3.open_stream is before
    for row, most in zip(found["rows"], (1.04, 1.02), strict=True):
        assert row["goal_ms"] == pytest.approx(most * row["plain_ms"]) and row["ours_ms"] > 0
        assert row["more"] == pytest.approx(row["ours_ms"] / row["plain_ms"] - 1)
    assert "| plain |" in text and "| more |" in text


def test_plain_residuals_are_a_running_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same logits as by the stream that adds and norms apart, and others than with depth attention."""
    model = K3.build(pretrain("tiny").model, seed=0, dtype=torch.float32)
    for query in model.depth_queries():
        torch.nn.init.normal_(query.proj)
    ids_T, bounds = torch.arange(40) % 300, torch.tensor([0, 17, 40], dtype=torch.int32)
    with torch.no_grad():
        attended_TD = model.backbone(model.embed(ids_T), bounds)
        with residuals.plain_residuals():
            plain_TD = model.backbone(model.embed(ids_T), bounds)
        monkeypatch.setattr(k3, "open_stream", lambda x_TD, *given: ResidualStream(x_TD))
        wanted_TD = model.backbone(model.embed(ids_T), bounds)
    assert torch.allclose(plain_TD, wanted_TD, atol=1e-5) and not torch.allclose(attended_TD, wanted_TD, atol=1e-2)


def test_whole_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both comparisons with MLA alone run on tiny shapes: a time of each model, and their ratio, in every row."""
    monkeypatch.setattr(time_to_loss, "TIMED_STEPS", 1)
    monkeypatch.setattr(time_to_loss, "MODELS", ("k3", "mla"))
    monkeypatch.setattr(hybrid_decode, "BATCHES", (2,))
    words = ["--parts", "hybrid_decode", "time_to_loss", "--out", str(tmp_path)]
    assert gpu.main([*TRIAL, *words]) == 0
    found, text = results(tmp_path)
    names = [row["work"] for row in found["rows"]]
    assert names == [
        *(f"hybrid decode, batch {batch}, context {context}" for batch, context in ((2, 32), (2, 128), (32, 128))),
        "hybrid decode, a token at the largest batches, context 128",
        next(name for name in names if name.startswith("time to loss ") and name.endswith(", beside all MLA, 1 seeds")),
    ]
    for row in found["rows"]:
        assert row["ratio"] == pytest.approx(row["all_mla_ms"] / row["ours_ms"]) and row["ours_ms"] > 0
        assert f"| {row['work']} |" in text
    assert "| ratio |" in text and found["failed"] == {}


def test_rows_of_time_to_loss() -> None:
    """The worse model trains to its end; the better one is there earlier by the advantage, whichever it is."""

    def row(ours: float, theirs: float, advantage: float) -> dict:
        axes = {axis: mean_of(advantage) for axis in ("tokens", "flops", "seconds", "level")}
        losses = {"k3": {"mean": ours}, "mla": {"mean": theirs}}
        summary = {"advantage": {"mla": axes | {"seeds": [0, 1]}}, "last_loss": losses, "rates": {}}
        plan = {"steps": 10, "step_seconds": {"k3": 0.2, "mla": 0.1}}
        (found,) = whole_models.loss_rows({"plan": plan, "summary": summary})
        return found

    better, worse = row(3.0, 4.0, 2.0), row(4.0, 3.0, 0.5)
    assert (better["ours_ms"], better["all_mla_ms"]) == (500, 1000) and better["ratio"] == 2.0
    assert (worse["ours_ms"], worse["all_mla_ms"]) == (2000, 1000) and worse["token_ratio"] == 0.5


def mean_of(value: float) -> dict:
    """As `loss_curves.spread` has it."""
    return {"mean": value, "deviation": 0.0}


def test_rows_of_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times a token beside the peer's best way, hits beside cold prefixes, and goals; nothing at all is a failure."""
    rows = [
        {"what": "engine, 256 at once", "tokens_per_s": 20000.0},
        {"what": "transformers 5, grouped_mm, static batch of 256", "tokens_per_s": 2000.0},
        {"what": "transformers eager", "error": "RuntimeError: no"},
        {"what": "without graphs, 1 at once", "tokens_per_s": 0.0, "cut": "1 requests had not begun"},
        {"what": "first token of 32K + 512, at most 2048 tokens a pass", "cold_s": 0.4, "hit_s": 0.02, "times": 20.0},
        {"what": "90 % shared, prefixes cached", "tokens_per_s": 30000.0},
        {"what": "90 % shared, no prefix cached", "tokens_per_s": 10000.0, "cached_is_times_as_fast": 3.0},
    ]

    def script(words: list[str]) -> None:
        Path(words[words.index("--out") + 1]).write_text(json.dumps({"rows": rows}))

    monkeypatch.setattr(engine_gpu, "main", script)
    monkeypatch.setattr(gpu, "check", lambda parser, options: options.out.mkdir(exist_ok=True))
    assert gpu.main([*TRIAL, "--parts", "engine", "--out", str(tmp_path)]) == 0
    found, text = results(tmp_path)
    ours, peer, other, cut, hit, cached, unshared = found["rows"]
    assert (ours["work"], ours["ours_ms"], ours["ratio"]) == ("engine: 256 at once", 0.05, 10)
    assert ours["goal_ms"] == pytest.approx(0.1) and peer["transformers_ms"] == 0.5 and peer["ours_ms"] is None
    assert other["transformers_ms"] is None and other["error"] == "RuntimeError: no"
    assert cut["ours_ms"] is None and cut["cut"] == "1 requests had not begun"
    assert (hit["ours_ms"], hit["cold_ms"], hit["goal_ms"]) == (20, 400, 25)
    assert cached["goal_ms"] == pytest.approx(0.1 / 2.4) and cached["ratio"] == pytest.approx(3)
    assert unshared["goal_ms"] is None and "| engine: 256 at once |" in text
    assert gpu.main([*TRIAL, "--parts", "engine", "--rows", "decode", "--out", str(tmp_path / "none")]) == 0
    rows.clear()
    assert gpu.main([*TRIAL, "--parts", "engine", "--out", str(tmp_path / "no rows")]) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "tpu"], "--device: must be cuda or cpu, got 'tpu'"),
        (["--device", "cuda"], "--device cuda: no GPU here; --device cpu --small tries the script"),
        ([*TRIAL, "--activations", "bogus"], "activations: 'bogus' is none of none, selective"),
        ([*TRIAL, "--out", __file__], "File exists"),
        ([*TRIAL, "--parts", "decode", "engine"], "--parts engine: needs a GPU; openk3 bench serve"),
        ([*TRIAL, "--tokens", "nowhere.xz"], "--tokens: no such file: nowhere.xz"),
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
