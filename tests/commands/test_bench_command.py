"""`openk3 bench train`: figures that agree with each other, and flags that are refused."""

from __future__ import annotations

import json

import pytest

from openk3.cli import main
from openk3.commands.bench import table

FLAGS = ["--steps", "1", "--warmups", "1", "--micro-batch", "128", "--micro-batches", "2", "--context", "64"]


def test_figures_agree(
    shared_process: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens, seconds and operations of tiny; the table shows the same."""
    monkeypatch.setattr("openk3.commands.bench.tune_cpu", dict)
    assert main(["bench", "train", "tiny", "--device", "cpu", *FLAGS, "--json"]) == 0
    text = capsys.readouterr().out
    found = json.loads(text[text.index("{") :])
    assert (found["context"], found["micro_batch"], found["micro_batches"]) == (64, 128, 2)
    assert found["tokens_per_s"] == pytest.approx(256 / found["seconds"]) and found["dtype"] == "float32"
    assert found["busy_seconds"] == pytest.approx(sum(each["seconds"] for each in found["operations"]))
    assert {"KDA", "MLA attention", "experts", "head and loss", "optimizer"} <= {
        each["name"] for each in found["operations"]
    }
    assert "mfu" not in found and all(each["roofline_seconds"] is None for each in found["operations"])
    lines = table(found)
    assert lines[0].startswith("bench train tiny on CPU, float32: 2 micro-batches of 128 tokens")
    assert len(lines) == 8 + len(found["saved_bytes"]) + len(found["operations"])


def test_activations(shared_process: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy and what a token leaves behind, as it is found and as it is counted."""
    monkeypatch.setattr("openk3.commands.bench.tune_cpu", dict)
    flags = [*FLAGS, "--activations", "memory,moe_hidden=keep", "--json"]
    assert main(["bench", "train", "tiny", "--device", "cpu", *flags]) == 0
    text = capsys.readouterr().out
    found = json.loads(text[text.index("{") :])
    assert found["activations"] == "memory,moe_hidden=keep"
    groups = found["saved_bytes"]
    assert groups["ffn_hidden"]["bytes"] < 0.3 * 3584 and "situ" not in groups
    for name in groups.keys() - {"moe_hidden", "moe_latents"}:  # rows that pad experts are not counted
        assert groups[name]["bytes"] == pytest.approx(groups[name]["counted"], rel=0.05), name
    assert "activations             memory,moe_hidden=keep" in "\n".join(table(found))


def test_a_gpu_is_compared_with_its_roofline() -> None:
    """MFU, memory, and what each operation reached of its bound."""
    operations = [{"name": "experts", "seconds": 0.02, "roofline_seconds": 0.01}]
    operations += [{"name": "other", "seconds": 0.02, "roofline_seconds": None}]
    found = {"work": "bench train small", "device": "H200", "dtype": "bfloat16", "micro_batches": 1, "micro_batch": 8}
    found |= {"context": 8, "seconds": 0.05, "tokens_per_s": 160.0, "model_flops_per_s": 1e12, "mfu": 0.25}
    found |= {"peak_gb": 70.0, "roofline_tokens_per_s": 320.0, "operations": operations, "busy_seconds": 0.04}
    found |= {"activations": "none", "saved_bytes": {"situ": {"bytes": 64.0, "counted": 64.0}}}
    text = "\n".join(table(found))
    for part in ("25.0%", "70.0 GB", "reached 50.0%", "10.00      50%", "40.00  of 50.00"):
        assert part in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tinny"], "tinny: no such recipe"),
        (["tiny", "--context", "4096"], "--context: must lie in 2..512"),
        (["tiny", "--steps", "0"], "--steps: must be positive"),
        (["tiny", "--micro-batch", "-5"], "--micro-batch: must be positive"),
        (["tiny", "--activations", "some"], "activations: 'some' is none of none, selective, memory, full, auto"),
    ],
)
def test_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line."""
    assert main(["bench", "train", *words, "--device", "cpu"]) == 2
    assert message in capsys.readouterr().err
