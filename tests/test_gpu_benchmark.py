"""One command for every row of the GPU stack: parts run on tiny shapes without a GPU, and one's fault spares others."""

from __future__ import annotations

import json
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import engine_gpu  # noqa: E402
import experts  # noqa: E402
import gpu  # noqa: E402
import gpu_report  # noqa: E402
import hybrid_decode  # noqa: E402
import kimi_linear  # noqa: E402
import latent_moe  # noqa: E402
import residuals  # noqa: E402
import situ  # noqa: E402
import time_to_loss  # noqa: E402
import train_rows  # noqa: E402
import whole_models  # noqa: E402

from openk3.config.train import PretrainConfig  # noqa: E402
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
    monkeypatch.setattr(train_rows, "rows", lambda options, keep: [row])
    monkeypatch.setattr(gpu, "of_script", lambda part, options: 1 / 0)
    assert gpu.main([*TRIAL, "--parts", "mla", "train", "--out", str(tmp_path)]) == 1
    found, text = results(tmp_path)
    assert found["failed"] == {"mla": "ZeroDivisionError: division by zero"} and len(found["rows"]) == 1
    assert "| train tiny 2x64 | 3.000 | 20,000 | 25.0% | - |" in text and "Failed: mla" in text


def test_what_there_is_no_time_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is left out and named, and what is short still runs; without --small, which is never short of time."""
    monkeypatch.setattr(gpu, "of_script", lambda part, options: [{"work": part, "ours_ms": 1.0}])
    monkeypatch.setattr(train_rows, "rows", lambda options, keep: 1 / 0)
    words = ["--device", "cpu", "--parts", "train", "mla", "situ", "--seconds", str(gpu.SECONDS["situ"] + 10)]
    assert gpu.main([*words, "--out", str(tmp_path)]) == 0
    found, text = results(tmp_path)
    assert [row["work"] for row in found["rows"]] == ["situ"] and set(found["left_out"]) == {"train", "mla"}
    assert "Left out: train: takes about" in text


def test_where_the_gpu_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in this one's place goes on with the other parts, and keeps what was found; so where a part hangs."""
    runs: list[list[str]] = []

    class Replaced(BaseException):
        """This process is no more."""

    def replace(program: str, words: list[str]) -> None:
        runs.append(words)
        raise Replaced

    monkeypatch.setattr(gpu.os, "execv", replace)
    monkeypatch.setattr(gpu, "released", lambda options: False)
    monkeypatch.setattr(gpu, "of_script", lambda part, options: [{"work": part, "ours_ms": 1.0}])
    words = [*TRIAL, "--parts", "situ", "mla", "decode", "--out", str(tmp_path)]
    with pytest.raises(Replaced):
        gpu.main(words)
    (again,) = runs
    assert again[again.index("--parts", again.index("--out")) + 1 :][:2] == ["mla", "decode"]
    monkeypatch.setattr(gpu, "released", lambda options: True)
    assert gpu.main(again[again.index("--device") :]) == 0
    found, _ = results(tmp_path)
    assert [row["part"] for row in found["rows"]] == ["situ", "mla", "decode"]

    over = threading.Event()
    with gpu.Watch("situ", 0.01, over.set):
        assert over.wait(30)
    with gpu.Watch("situ", 1000, over.clear):
        assert over.is_set()


def test_training_rows(tmp_path: Path) -> None:
    """A step by its operations; nothing that needs a GPU on a CPU."""
    assert gpu.main([*TRIAL, "--parts", "train", "--out", str(tmp_path)]) == 0
    found, text = results(tmp_path)
    (row,) = found["rows"]
    assert row["work"] == "train tiny 2x64" and len(row["steps_ms"]) == 1 and row["goal_ms"] is None
    assert row["tokens_per_s"] == pytest.approx(128e3 / row["ours_ms"]) and "mfu" not in row
    assert {"optimizer", "experts", "KDA"} <= {each["name"] for each in row["operations"]}
    assert sum(each["seconds"] for each in row["operations"]) == pytest.approx(row["busy_ms"] / 1e3)
    assert "Kernels of one micro-batch of train tiny 2x64" in text


def test_training_lets_go_of_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters in bfloat16, too, whose optimizer hangs on them by hooks: the next recipe needs their memory."""
    alive: list[weakref.ref] = []

    def built(config: PretrainConfig) -> K3:
        model = K3.build(config.model, seed=0, dtype=torch.bfloat16)
        alive.extend(weakref.ref(parameter) for parameter in model.parameters())
        return model

    monkeypatch.setattr(train_rows.bench, "random_model", built)
    monkeypatch.setattr(train_rows, "breakdown", lambda model, call, device: call() or {})
    train_rows.measure(train_rows.BenchTrain("tiny", 64, 64, 2), "cpu", 1)
    assert alive and not any(parameter() is not None for parameter in alive)


def test_experts_and_activations(tmp_path: Path) -> None:
    """Rows of routed experts alone and of MXFP8, SiTU, and the peer's model, by definitions on a CPU."""
    words = ["--parts", "experts", "situ", "kimi_linear", "--out", str(tmp_path)]
    assert gpu.main([*TRIAL, *words]) == 0
    found, _ = results(tmp_path)
    by_name = {row["work"]: row for row in found["rows"]}
    assert len(by_name) == len(experts.ROWS) + len(situ.ROWS) + len(kimi_linear.TRIAL)
    assert all(row["ours_ms"] > 0 and "error" not in row for row in by_name.values())
    few = by_name["experts in MXFP4, released widths, 112 experts, T=16"]
    assert few["goal_ms"] == pytest.approx(few["floor_ms"] / 0.75) and 2 <= few["experts"] <= 8
    many = by_name["experts in MXFP4, small, T=65536"]
    assert many["goal_ms"] == pytest.approx(many["bf16_ms"] / 0.7) and many["floor_ms"] is None
    forward, both = (by_name[situ.small(row).name] for row in (situ.ROWS[0], situ.ROWS[3]))
    assert both["floor_ms"] == pytest.approx(8 / 3 * forward["floor_ms"]) and both["errors"]["ours"] < 1e-2


def test_experts_of_a_definition() -> None:
    """What is timed on a CPU sums each token's experts, with gradients for all weights."""
    row = experts.small(experts.Row("bf16", "small", 65536, *experts.SMALL, True))
    device = torch.device("cpu")
    moe, z_TC = latent_moe.build(row.layer, device)
    routes = experts.routed(moe, row, 0, device)
    out = experts.both_ways(experts.ours(moe, row, z_TC, routes), [z_TC, *moe.experts.parameters()], z_TC.detach())
    want = torch.zeros_like(z_TC)
    with torch.no_grad():
        for t, ids in enumerate(routes.expert_ids_Tk.tolist()):
            for e in ids:
                want[t] += moe.experts(z_TC[t : t + 1], torch.arange(row.E).eq(e).long())[0]
    assert torch.allclose(out, want, atol=0.05, rtol=0.05)


def test_report() -> None:
    """Goals with their verdicts first; ratios to peers, memory by way, and what another run measured."""
    rows = [
        {"part": "a", "work": "fast", "ours_ms": 1.0, "goal_ms": 2.0, "torch_ms": 3.0, "peak_gb": {"ours": 1.5}},
        {"part": "a", "work": "slow", "ours_ms": 4.0, "goal_ms": 2.0, "goal_of_roofline_ms": 5.0, "peak_gb": 7.0},
        {"part": "b", "work": "broken", "ours_ms": None, "goal_ms": 2.0, "error": "RuntimeError: no"},
        {"part": "b", "work": "old", "ours_ms": 1.0, "failed": {"nemo": "gone"}, "measured": "old.json"},
    ]
    facts = {"gpu": "X", "date": "today", "versions": {"torch": "2"}, "commit": "abc", "failed": {}, "rows": rows}
    facts["notes"] = ["Peers by hand."]
    text = gpu_report.markdown(facts)
    assert "2 of 3 met." in text and "| slow, 70 % of the roofline | 4.000 | 5.000 | met |" in text
    assert "| fast | 1.000 | 3.000 | 2.000 | - | 3.00 | 1.5 | met |" in text and "torch / openk3" in text
    assert "| slow | 4.000 | - | 2.000 | 5.000 | - | 7.0 | missed |" in text
    for line in (
        "- broken: RuntimeError: no",
        "- old: nemo failed: gone",
        "measured in another run: old.json",
        "\nPeers by hand.\n",
    ):
        assert line in text


def test_time_to_loss_of_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the newest results of the same GPU say where they are from; without any there is none."""
    rows = whole_models.recorded_loss("NVIDIA H200")
    assert rows and all(row["measured"].startswith("time_to_loss-h200-") and row["ratio"] > 0 for row in rows)
    with pytest.raises(FileNotFoundError, match="on a B200"):
        whole_models.recorded_loss("B200")


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
            assert k3.few_hidden() is None  # kernels for few tokens read depth by themselves
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
        ([*TRIAL, "--onto", "nowhere"], "--onto: no such file: nowhere"),
        ([*TRIAL, "--seconds", "0"], "--seconds: must be positive, got 0"),
    ],
)
def test_what_cannot_run_is_refused_before_the_first_part(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not after minutes on a machine that is lent, nor by a traceback."""
    monkeypatch.setattr(gpu, "run", lambda *given: 1 / 0)
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as end:
        gpu.main(words)
    assert end.value.code == 2 and message in capsys.readouterr().err
