"""`openk3 plan`: the published figures, and every way to name a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from openk3 import recipes
from openk3.cli import main
from openk3.commands.quantities import quantity


def figures(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    """The JSON form of one plan."""
    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_released_model_has_the_published_figures(capsys: pytest.CaptureFixture[str]) -> None:
    """Table 1 of the report, the released index, and the sizes of both caches."""
    assert main(["plan", "k3"]) == 0
    text = capsys.readouterr().out
    for figure in ("2,779,931,837,184", "104,189,532,416", "1,560,860,324,864", " 576\n", "27,648", "6,291,456"):
        assert figure in text
    mtp = next(line for line in text.splitlines() if "MTP layer" in line)
    assert "not in this configuration" in mtp


def test_json_form_holds_the_same_figures(capsys: pytest.CaptureFixture[str]) -> None:
    """For programs."""
    books = figures(capsys, "k3", "--context", "1048576")
    assert (books["parameters"], books["activated"], books["mtp"]) == (2_779_931_837_184, 104_189_532_416, 0)
    assert sum(books["components"].values()) == sum(books["by_dtype"].values()) == books["parameters"]
    assert books["latent_values_per_token_and_layer"] == 576
    assert books["request_bytes"]["bytes"] == 1_048_576 * 27_648 + books["state_bytes_per_request"]


def test_activations(capsys: pytest.CaptureFixture[str]) -> None:
    """By group for the policy that is asked for, in one line for every preset, and what one H200 has room for."""
    books = figures(capsys, "medium", "--activations", "full,ffn=keep,situ=fp8", "--micro-batch", "65536")[
        "activations"
    ]
    assert books["policy"] == "full,situ=fp8,ffn=keep"
    assert list(books["policies"]) == ["none", "selective", "memory", "full", "auto", "full,situ=fp8,ffn=keep"]
    groups = {name: each["held"] for name, each in books["groups"].items()}
    assert groups["situ"] == "fp8" and groups["moe_hidden"] == "keep" and "kda_qkv" not in groups
    asked = books["policies"][books["policy"]]
    assert sum(each["bytes"] for each in books["groups"].values()) == pytest.approx(asked["bytes"])
    auto, selective = books["policies"]["auto"], books["policies"]["selective"]
    assert auto["policy"].startswith("selective,") and auto["peak_bytes"] < 0.85 * 139 * 2**30 < selective["peak_bytes"]
    assert main(["plan", "medium", "--activations", "auto", "--micro-batch", "65536"]) == 0
    assert f"activations under policy {auto['policy']}, bytes of one token" in capsys.readouterr().out


def test_a_policy_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    """One line."""
    assert main(["plan", "tiny", "--activations", "situ=8"]) == 2
    assert "activations: situ can be keep, recompute, fp8, got '8'" in capsys.readouterr().err


@pytest.mark.parametrize("name", recipes.NAMES)
def test_every_recipe_can_be_planned(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Activated never exceeds the total, and the table is complete."""
    books = figures(capsys, name)
    assert 0 < books["activated"] < books["parameters"]
    assert main(["plan", name]) == 0
    assert "FLOPs per token" in capsys.readouterr().out


def test_a_configuration_file_a_model_and_a_run_give_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """config.json by itself, its directory, its run, and the newest run by default."""
    model = tmp_path / "runs" / "a" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text(recipes.model("tiny").to_json())
    monkeypatch.chdir(tmp_path)
    expected = figures(capsys, "tiny")["parameters"]
    for path in ("runs/a/model/config.json", "runs/a/model", "runs/a"):
        assert figures(capsys, path)["parameters"] == expected
    assert figures(capsys)["parameters"] == expected


def test_roofline(capsys: pytest.CaptureFixture[str]) -> None:
    """Every operation with its FLOPs and bytes, the slowest first; larger micro-batches raise the bound."""
    bound = figures(capsys, "small")["roofline"]
    assert sum(each["seconds"] for each in bound["operations"]) == pytest.approx(1 / bound["tokens_per_second"])
    assert figures(capsys, "small", "--micro-batch", "4096")["roofline"]["mfu"] < bound["mfu"] < 1
    assert main(["plan", "small"]) == 0
    text = capsys.readouterr().out
    lines = text[text.index("Roofline") : text.index("\nMemory of training on")].splitlines()
    assert lines[2].startswith("  MLA attention ") and len(lines) == 3 + len(bound["operations"])
    assert f"{bound['tokens_per_second']:,.0f}" in lines[-1] and "FLOPs" in lines[2]
    assert main(["plan", "small", "--micro-batch", "0"]) == 2
    assert "--micro-batch" in capsys.readouterr().err


def test_unknown_name_lists_the_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    """One line."""
    assert main(["plan", "k4"]) == 2
    line = "openk3: k4: neither a file nor a recipe; recipes are tiny, pocket, small, medium, k3\n"
    assert capsys.readouterr().err == line


def test_context_must_be_positive(capsys: pytest.CaptureFixture[str]) -> None:
    """The message names the flag."""
    assert main(["plan", "tiny", "--context", "0"]) == 2
    assert "--context" in capsys.readouterr().err


def test_broken_configuration_names_file_and_field(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong value is refused, not guessed."""
    data = recipes.model("tiny").to_dict()
    data["text_config"]["hidden_size"] = "wide"
    path = tmp_path / "config.json"
    path.write_text(json.dumps(data))
    assert main(["plan", str(path)]) == 2
    error = capsys.readouterr().err
    assert str(path) in error and "hidden_size" in error and error.count("\n") == 1


def test_quantities_are_readable() -> None:
    """Binary prefixes for bytes, decimal ones for FLOPs."""
    assert quantity(1536, "B") == "1.50 KiB"
    assert quantity(221.26e9, "FLOP", 1000) == "221.26 GFLOP"
    assert quantity(7, "B") == "7.00 B"
