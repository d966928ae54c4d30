"""`openk3 bench serve --mix`: the requests that it says, rows that agree with rounds, a peer that is asked in turn."""

from __future__ import annotations

import io
import json
import stat
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from openk3.cli import main
from openk3.commands import bench_mix, bench_peer
from openk3.commands.bench_flags import BenchServe
from openk3.commands.bench_mix import ANSWERS, PREFIX_TOKENS, PREFIXES, PROMPTS, Peer, mix, model_config, peer_config
from openk3.commands.errors import UserError

FEW = ["--mix", "tiny", "--mix-requests", "3", "--at-once", "2", "--rounds", "1", "--device", "cpu"]


def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths that take no time."""
    monkeypatch.setattr(bench_mix, "PROMPTS", (3, 9))
    monkeypatch.setattr(bench_mix, "ANSWERS", (2, 5))
    monkeypatch.setattr(bench_mix, "PREFIX_TOKENS", 64)


def test_the_mix_is_what_it_says() -> None:
    """Lengths within bounds, the same from the same seed, arrivals that rise, and the share with a prefix."""
    flags = BenchServe(mix="tiny", mix_requests=400, rate=10.0, seed=3)
    plain, shared = mix(flags, 700), mix(flags, 700, 0.9)
    assert plain == mix(flags, 700) != mix(BenchServe(mix_requests=400, rate=10.0, seed=4), 700)
    for each in plain:
        assert PROMPTS[0] <= len(each.prompt) <= PROMPTS[1] and ANSWERS[0] <= each.num_answer <= ANSWERS[1]
    times = [each.seconds for each in plain]
    assert times == sorted(times) and 25 < times[-1] < 60
    assert {each.seconds for each in mix(BenchServe(mix_requests=5), 700)} == {0.0}
    common = [each for each in shared if each.prefix is not None]
    assert 0.85 < len(common) / len(shared) < 0.95 and {each.prefix for each in common} == set(range(PREFIXES))
    assert len({tuple(each.prompt[:PREFIX_TOKENS]) for each in common}) == PREFIXES
    assert [each.num_answer for each in plain] == [each.num_answer for each in shared]


def test_rows_agree_with_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prefixes are found where they may be; the table and both files say the same."""
    short(monkeypatch)
    out = tmp_path / "mix.json"
    assert main(["bench", "serve", *FEW, "--rate", "100", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    found = json.loads(out.read_text())
    rows = {row["way"]: row for row in found["rows"]}
    assert list(rows) == [bench_mix.ENGINE, bench_mix.CACHED, bench_mix.COLD, bench_mix.UNCACHED]
    only = found["raw_rounds"][0]
    vocab = model_config("tiny").media_placeholder_token_id
    asked = sum(each.num_answer for each in mix(BenchServe(mix="tiny", mix_requests=3, rate=100.0), vocab))
    for way, row in rows.items():
        assert row["tokens"] == only[way]["tokens"] == asked and row["seconds"] == only[way]["seconds"] > 0
        assert f"{row['tokens_per_s']:,.0f}" in printed and way in out.with_suffix(".md").read_text()
    assert (
        only[bench_mix.CACHED]["cached"] > 0 == only[bench_mix.UNCACHED]["cached"] == only[bench_mix.ENGINE]["cached"]
    )
    ratio = only[bench_mix.UNCACHED]["cpu_seconds"] / only[bench_mix.CACHED]["cpu_seconds"]
    assert rows[bench_mix.UNCACHED]["engine_is_times_as_fast_by_cpu"] == ratio


def fake_python(folder: Path, *answers: dict[str, Any]) -> Path:
    """A program that answers each line with the next of these, whatever it is asked."""
    path = folder / "python"
    lines = [json.dumps(answer) for answer in answers]
    path.write_text(f"#!{sys.executable}\nfor answer in {lines!r}:\n    input()\n    print(answer, flush=True)\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_a_peer_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its rows are in the report, with times as fast; a way that it cannot go says why."""
    short(monkeypatch)
    timed = {"tokens": 10, "seconds": 5.0, "cpu_seconds": 4.0, "first_token_s": [1.0, 3.0]}
    python = fake_python(tmp_path, {"transformers": "5"}, timed, timed, timed, {"error": "ValueError: no such layer"})
    assert main(["bench", "serve", *FEW, "--peer-python", str(python), "--json"]) == 0
    text = capsys.readouterr().out
    found = json.loads(text[text.index("{") :])
    rows = {row["way"]: row for row in found["rows"]}
    assert rows["continuous"] == {"way": "continuous", "error": "ValueError: no such layer"}
    assert rows["eager"]["first_token_s"] == 2.0 and found["peer"] == {"transformers": "5"}
    only = found["raw_rounds"][0]
    assert rows["eager"]["engine_is_times_as_fast"] == 5.0 / only[bench_mix.ENGINE]["seconds"]
    assert "cannot: ValueError" in bench_mix.markdown(found) and "cannot: ValueError" in "\n".join(
        bench_mix.table(found)
    )


def test_a_peer_that_is_none(tmp_path: Path) -> None:
    """No such program, and one that ends at once."""
    flags = BenchServe(mix="tiny")
    with pytest.raises(UserError, match="--peer-python: cannot run"):
        Peer(tmp_path / "none", flags, model_config("tiny"), [])
    with pytest.raises(UserError, match="--peer-python: the peer ended"):
        Peer(fake_python(tmp_path), flags, model_config("tiny"), [])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mix-requests", "0"], "--mix-requests: must be positive"),
        (["--at-once", "-1"], "--at-once: must be positive"),
        (["--rate", "-1"], "--rate: must not be negative"),
        (["--rate", "nan"], "--rate: must not be negative"),
        (["--device", "cuda"], "--mix: this measurement is of a CPU"),
        (["--mix", "huge"], "huge: no such recipe"),
    ],
)
def test_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line."""
    assert main(["bench", "serve", *FEW, *words]) == 2
    assert message in capsys.readouterr().err


class FakeModel:
    """Generates zeros, one call of the streamer for the prompts and one for each token."""

    def __init__(self, config: Any = None) -> None:
        self.config, self.ways, self.shapes = config, list[str](), list[tuple[int, int]]()

    def to(self, dtype: torch.dtype) -> FakeModel:
        assert dtype == torch.float32
        return self

    def eval(self) -> FakeModel:
        return self

    def requires_grad_(self, on: bool) -> FakeModel:
        assert not on
        return self

    def num_parameters(self) -> int:
        return 7

    def set_experts_implementation(self, way: str) -> None:
        self.ways.append(way)

    def generate(
        self, ids: torch.Tensor, *, attention_mask: torch.Tensor, generation_config: Any, streamer: Any
    ) -> Any:
        self.shapes.append((ids.shape[1], generation_config.max_new_tokens))
        assert attention_mask.sum(1).tolist() == [int((row != 0).sum()) for row in ids]
        assert (attention_mask[:, -1] == 1).all(), "padding belongs on the left"
        for _ in range(1 + generation_config.max_new_tokens):
            streamer.put(ids[:, -1])
        streamer.end()
        return torch.nn.functional.pad(ids, (0, generation_config.max_new_tokens))


def test_what_the_peer_does(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Batches as asked, padded on the left, until the longest answer ends; only a request's own tokens count."""
    fake = types.ModuleType("transformers")
    model = FakeModel()
    fake.__dict__.update(
        __version__="0",
        logging=types.SimpleNamespace(set_verbosity_error=lambda: None),
        KimiLinearConfig=lambda **options: types.SimpleNamespace(**options),
        KimiLinearForCausalLM=lambda config: model,
        GenerationConfig=lambda **options: types.SimpleNamespace(**options),
    )
    monkeypatch.setitem(sys.modules, "transformers", fake)
    requests = [{"prompt": [1] * size, "answer": count} for size, count in ((3, 2), (5, 7), (1, 1))]
    work = {"config": peer_config(model_config("tiny")), "threads": torch.get_num_threads(), "dtype": "float32"}
    work |= {"seed": 0, "batch": 2, "requests": requests}
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(work) + "\neager\ncontinuous\n"))
    bench_peer.main()
    hello, static, continuous = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert hello["parameters"] == 7 and model.ways == ["eager"] and model.shapes == [(5, 7), (1, 1)]
    assert static["tokens"] == 10 and len(static["first_token_s"]) == 3 and static["seconds"] > 0
    assert "AttributeError" in continuous["error"]


def test_the_peer_has_the_shapes() -> None:
    """Layer kinds, widths and experts of the recipe."""
    config = peer_config(model_config("quickstart"))
    assert config["layer_types"].count("linear_attention") == 4 and config["mlp_layer_types"][0] == "dense"
    assert (config["hidden_size"], config["num_local_experts"], config["linear_head_dim"]) == (128, 16, 32)
