"""`openk3 fleet`: a trace made, simulated with every policy, sent to a server; flags that are refused; no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from openk3.cli import main
from openk3.commands.errors import UserError
from openk3.commands.fleet import death, probe_lines, require_httpx, scaled_budgets
from openk3.config.fleet import FleetConfig
from openk3.fleet.baselines import POLICIES
from openk3.fleet.outcomes import Outcome
from openk3.fleet.pass_costs import K3_RECKONED
from openk3.fleet.simulate import Death
from openk3.fleet.simulated_replica import ReplicaShape
from openk3.fleet.trace import read_trace

MIX = [
    "--mix.seconds",
    "60",
    "--mix.coding-sessions",
    "3",
    "--mix.chats-per-second",
    "0.2",
    "--mix.burst-requests",
    "2",
]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small one."""
    path = tmp_path_factory.mktemp("fleet") / "trace.jsonl"
    assert main(["fleet", "trace", str(path), *MIX, "--seed", "4"]) == 0
    return path


def test_a_trace_is_made_and_described(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same for the same seed, and scaled."""
    small = tmp_path / "small.jsonl"
    assert main(["fleet", "trace", str(small), *MIX, "--seed", "4", "--scale-tokens", "0.01"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{small}: ") and "6 burst" in shown and "can be cached" in shown
    whole, scaled = read_trace(trace), read_trace(small)
    assert [entry.at for entry in whole] == [entry.at for entry in scaled]
    assert sum(e.prompt_tokens for e in scaled) == pytest.approx(0.01 * sum(e.prompt_tokens for e in whole), rel=0.01)


def test_a_simulation_shows_every_policy_and_is_recorded(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table has them all, the file what the numbers mean nothing without; twice the same."""
    out, again = tmp_path / "sim.json", tmp_path / "again.json"
    words = ["fleet", "simulate", str(trace), "--replicas", "2", "--deaths", "r1:20:40"]
    assert main([*words, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("2 replicas: ") and all(policy in shown for policy in POLICIES) and "####" in shown
    assert main([*words, "--out", str(again), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(again.read_text()) and set(found["policies"]) == set(POLICIES)
    assert found["policies"] == json.loads(out.read_text())["policies"]
    assert {"commit", "hardware", "versions", "costs", "costs_from", "shape", "router", "deaths"} <= found.keys()


def test_no_trace_is_the_usual_mix_and_scaling_scales_budgets(capsys: pytest.CaptureFixture[str]) -> None:
    """One policy, everything a thousandth as long."""
    words = ["fleet", "simulate", "--policies", "affinity+budgets", "--scale-tokens", "0.001", "--queue-seconds", "5"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["router"]["queue_seconds"] == 5 and found["router"]["classes"][0]["most_tokens"] == 8
    config = scaled_budgets(FleetConfig(), 0.5)
    assert [one.replica_tokens * 2 for one in config.classes] == [one.replica_tokens for one in FleetConfig().classes]
    assert config.classes[-1].most_tokens == 0


def test_a_trace_is_sent(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the key of the environment; the record has a row for each request."""
    given = dict[str, Any]()

    class Said:
        def __init__(self, entries: Any, servers: Any, chooser: Any, **more: Any) -> None:
            given.update(entries=entries, servers=servers, chooser=chooser, **more)

    def replayed(live: Said, progress: Any) -> list[Outcome]:
        progress(1)
        return [Outcome(given["entries"][0], 0.0, "x", 0.0, 0.5, 1.0, 10, 100, 5, "done")]

    monkeypatch.setattr("openk3.fleet.replay.Replay", Said)
    monkeypatch.setattr("openk3.fleet.replay.replayed", replayed)
    monkeypatch.setenv("OPENK3_API_KEY", "sk-something-long-enough")
    out = tmp_path / "live.json"
    assert main(["fleet", "replay", str(trace), "http://a", "http://b", "--out", str(out)]) == 0
    assert given["key"] == "sk-something-long-enough" and given["chooser"] is not None
    found = json.loads(out.read_text())
    assert found["policies"]["affinity+budgets"]["all"]["hit_rate"] == 0.1 and len(found["requests"]) == 1
    assert main(["fleet", "replay", str(trace), "http://a"]) == 0
    assert given["chooser"] is None


def test_a_probe_is_fitted_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file is one that simulate reads."""
    from openk3.fleet.probe import Sample, decode_counts, first_token_counts

    samples = [Sample("prompt", first_token_counts(n, 0, ReplicaShape()), 0.01 + n * 1e-4) for n in (100, 1000, 5000)]
    samples.append(Sample("answer", decode_counts(100, 30, 1), 0.3))
    monkeypatch.setattr("openk3.fleet.probe.probe", lambda *words, **more: samples)
    out = tmp_path / "costs.json"
    assert main(["fleet", "probe", "http://a", "--out", str(out)]) == 0
    assert main(["fleet", "simulate", "--costs", str(out), "--scale-tokens", "0.001", "--policies", "random"]) == 0
    assert any("prompt" in line for line in probe_lines(K3_RECKONED, json.loads(out.read_text())["measured"]))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["simulate", "--replicas", "0"], "--replicas: must be 1 to 4,096, got 0"),
        (["simulate", "--replicas", "100000000"], "--replicas: must be 1 to 4,096"),
        (["simulate", "--scale-tokens", "1e9"], "at most 1,099,511,627,776"),
        (["replay", "trace.jsonl"], "URL: name at least one server"),
        (["probe", "http://127.0.0.1:99999"], "http://127.0.0.1:99999: no server that lists its models"),
        (["trace", "x.jsonl", "--mix.seconds", "1e300"], "openk3: seconds: must be positive and at most"),
        (["simulate", "--policies"], "--policies: name at least one"),
        (["simulate", "--deaths", "r9:1"], "death of r9: no such replica"),
        (["simulate", "--deaths", "r1:soon"], "--deaths r1:soon: must be NAME:SECOND"),
        (["simulate", "--deaths", "r1:5:4"], "must come before it is back"),
        (["simulate", "--shape.capacity", "0"], "capacity: must be positive"),
        (["simulate", "--scale-tokens", "0"], "scale of tokens: must be positive"),
        (["simulate", "nowhere.jsonl"], "nowhere.jsonl: No such file"),
        (["probe", "http://a", "--rounds", "0"], "must be positive"),
        (["trace", "x.jsonl", "--mix.coding-pause", "-1"], "coding_pause: must be positive"),
    ],
)
def test_bad_flags_are_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is wrong, and exit code 2."""
    monkeypatch.chdir(tmp_path)
    try:
        code = main(["fleet", *words])
    except SystemExit as end:  # the parser's own
        code = end.code
    error = capsys.readouterr().err
    assert code == 2 and message in error and error.count("\n") == 1, error


def test_deaths_are_read() -> None:
    """For good, or for a time."""
    assert death("r1:5") == Death("r1", 5.0) and death("r1:5:9.5") == Death("r1", 5.0, 9.5)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """What to install."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"openk3 fleet probe needs the package httpx; pip install 'openk3\[serve\]'"):
        require_httpx("probe")


def test_simulating_needs_no_torch() -> None:
    """A router's machine may have none."""
    code = (
        "import sys; from openk3.cli import main; "
        "main(['fleet', 'simulate', '--scale-tokens', '0.001', '--policies', 'random']); "
        "assert 'torch' not in sys.modules"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
