"""`openk3 bench serve`: figures that agree with each other, a record of what they mean, and flags that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from openk3.cli import main
from openk3.commands import bench_serve
from openk3.commands.bench_flags import BenchServe
from openk3.commands.bench_serve import answer_length, keep_under_way, num_requests, prompts, table
from openk3.config.serve import CacheConfig, EngineConfig
from openk3.engine.engine import Engine
from openk3.engine.request import Request, SamplingParams
from openk3.model.k3 import K3

FLAGS = ["--device", "cpu", "--prompt-tokens", "12", "--answer-tokens", "6", "--requests", "3", "--rounds", "1"]


def test_figures_agree(tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each load and draft; what is printed is what is written, and the table shows the same."""
    out = tmp_path / "serve.json"
    assert main(["bench", "serve", str(tiny_run), *FLAGS, "--concurrency", "1", "2", "--out", str(out), "--json"]) == 0
    text = capsys.readouterr().out
    found = json.loads(text[text.index("{") :])
    assert found == json.loads(out.read_text())
    assert {"date", "commit", "hardware", "versions", "dtype", "prompt_tokens"} <= found.keys()
    assert found["versions"]["torch"] == torch.__version__ and found["dtype"] == "float32"
    rows = found["rows"]
    assert [(row["concurrency"], row["draft"]) for row in rows] == [
        (load, draft) for load in (1, 2) for draft in ("off", "ngram", "mtp")
    ]
    for row in rows:
        assert row["tokens_per_s"] == max(row["rounds_tokens_per_s"]) > 0 and row["first_token_s"] > 0
        assert ("accepted_per_turn" in row) == (row["draft"] != "off")
        plain = next(each for each in rows if each["concurrency"] == row["concurrency"])
        assert row["times_as_fast"] == row["tokens_per_s"] / plain["tokens_per_s"]
        assert row["times_as_fast_by_cpu"] == row["tokens_per_cpu_s"] / plain["tokens_per_cpu_s"]
    lines = table(found)
    assert len(lines) == 2 + len(rows) + 1 and "prompts of 12 tokens, answers of about 6" in lines[0]
    assert f"{rows[2]['tokens_per_s']:,.1f}" in lines[4]


def test_as_many_as_asked_for_are_under_way(tiny_run: Path) -> None:
    """Never more, and so many while there are others; each request is answered, and timed to its first token."""
    model = K3.from_pretrained(tiny_run / "model")
    cache = CacheConfig.of(model.config, 1 << 24, value_bytes=4)
    engine, seen = Engine(model, EngineConfig(cache)), list[int]()
    step = engine.step

    def stepping() -> object:
        seen.append(len(engine._streams) + len(engine._arrived))
        return step()

    engine.step = stepping  # pyrefly: ignore
    requests = [Request([1, 2 + n], SamplingParams(max_tokens=3 + n % 2, temperature=0)) for n in range(7)]
    firsts, answers = keep_under_way(engine, requests, 3)
    assert max(seen) == 3 and seen[0] == 3
    assert [len(answer.tokens) for answer in answers] == [3, 4, 3, 4, 3, 4, 3]
    assert len(firsts) == 7 and min(firsts) > 0 and engine.is_idle


def test_prompts_are_pieces_of_the_text() -> None:
    """In order, and from the start again where it ends; enough for the largest load and its first requests."""
    flags = BenchServe(prompt_tokens=4, concurrency=(1, 3), requests=2)
    assert (num_requests(flags, 1), num_requests(flags, 3)) == (6, 18)
    assert prompts(list(range(10)), flags)[:3] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]
    assert len(prompts(list(range(10)), flags)) == 21
    for mean in (1, 2, 7, 64):
        lengths = [answer_length(n, mean) for n in range(mean // 2 * 2 + 1)]
        assert sorted(lengths) == list(range(mean - mean // 2, mean + mean // 2 + 1))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--requests", "0"], "--requests: must be positive"),
        (["--answer-tokens", "-2"], "--answer-tokens: must be positive"),
        (["--concurrency", "0"], "--concurrency: must be positive"),
        (["--drafts", "eagle"], "eagle"),
        (["--text", "no/such/text"], "no/such/text"),
    ],
)
def test_refused(words: list[str], message: str, tiny_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line."""
    code: object
    try:
        code = main(["bench", "serve", str(tiny_run), "--device", "cpu", *words])
    except SystemExit as end:
        code = end.code
    assert code == 2 and message in capsys.readouterr().err


def test_a_model_without_an_mtp_layer(
    tiny_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Is said to have none before anything is measured."""
    load = K3.from_pretrained

    def without(*args: object, **options: object) -> K3:
        model = load(*args, **options)  # pyrefly: ignore
        model.mtp = None
        return model

    monkeypatch.setattr(bench_serve.K3, "from_pretrained", without)
    assert main(["bench", "serve", str(tiny_run), *FLAGS]) == 2
    assert "--drafts mtp" in capsys.readouterr().err
