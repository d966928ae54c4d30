"""Decoding of a hybrid against all MLA: rows, ratios and limits, on tiny shapes without a GPU."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import hybrid_decode  # noqa: E402

from openk3.model.accounting import account  # noqa: E402

OPTIONS = argparse.Namespace(small=False, device="cuda", contexts=[4096, 1048576], batches=[1, 8], most=True)


def test_both_models_have_the_recipes_sizes() -> None:
    """All but the mixers: depth, width and experts; the baseline has latents in every layer."""
    hybrid, other = (each.model for each in hybrid_decode.configurations(OPTIONS).values())
    assert hybrid.text.layer_kinds().count("mla") == 7 and set(other.text.layer_kinds()) == {"mla"}
    same = ("num_hidden_layers", "hidden_size", "num_experts", "kv_lora_rank", "attn_res_block_size")
    assert all(getattr(hybrid.text, name) == getattr(other.text, name) for name in same)
    assert abs(account(other).total / account(hybrid).total - 1) < 0.02
    ratio = account(other).latent_bytes_per_token() / account(hybrid).latent_bytes_per_token()
    assert ratio == pytest.approx(25 / 7)


def test_what_fits_into_memory() -> None:
    """One more row of latents than sequences; a hybrid has room for more of them."""
    configs = hybrid_decode.configurations(OPTIONS)
    most = {name: hybrid_decode.most_sequences(config, 1048576, 133e9) for name, config in configs.items()}
    assert most["all-mla"] == 6 and most["hybrid"] == 27
    for name, config in configs.items():
        assert hybrid_decode.cache_bytes(config, most[name], 1048576) <= 133e9
        assert hybrid_decode.cache_bytes(config, most[name] + 1, 1048576) > 133e9
        assert hybrid_decode.most_sequences(config, 1048576, 1e9) == 0
    rows = hybrid_decode.rows_of("all-mla", configs["all-mla"], OPTIONS, 133e9)
    assert [(row.batch, row.context) for row in rows][-1] == (6, 1048576) and len(rows) == 5


def test_ratios_and_the_best_batch() -> None:
    """Equal sizes are compared; at the longest context each model has the batch that suits it."""

    def row(model: str, batch: int, context: int, took: float) -> dict:
        return {"model": model, "batch": batch, "context": context, "ours_ms": took, "floor_ms": took / 2} | {
            "ms_per_token": took / batch
        }

    rows = [row("hybrid", 1, 8, 2.0), row("hybrid", 4, 8, 4.0), row("all-mla", 1, 8, 6.0), row("all-mla", 2, 8, 10.0)]
    rows.append(row("hybrid", 1, 4, 1.0))
    assert hybrid_decode.ratios(rows) == [{"batch": 1, "context": 8, "ratio": 3.0, "of_floors": 3.0}]
    best = hybrid_decode.packed_ratio(rows)
    assert best is not None and best["ratio"] == 5.0
    assert (best["hybrid"]["batch"], best["all-mla"]["batch"]) == (4, 2)
    assert hybrid_decode.packed_ratio(rows[:2]) is None


def test_a_whole_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rows, table, plot; a row that fails is named with its reason, and the others go on."""
    real = hybrid_decode.measure

    def measure(model: object, config: object, row: hybrid_decode.Row, *rest: object) -> dict:
        if row.batch == 2 and row.context == 128:
            raise RuntimeError("out of memory")
        return real(model, config, row, *rest)

    monkeypatch.setattr(hybrid_decode, "measure", measure)
    words = ["--device", "cpu", "--small", "--batches", "1", "2", "--no-most", "--out", str(tmp_path)]
    assert hybrid_decode.main(words) == 0
    results = json.loads((tmp_path / "hybrid_decode.json").read_text())
    assert len(results["rows"]) == 6 and len(results["ratios"]) == 3
    failed = {f"{name}, batch 2, context 128" for name in ("hybrid", "all-mla")}
    assert results["left_out"] == dict.fromkeys(failed, "RuntimeError: out of memory")
    assert all(check["largest_difference"] == 0 < check["largest"] for check in results["checks"].values())
    short, long = results["rows"][:2]
    assert long["latents_gb"] == pytest.approx(4 * short["latents_gb"]) and short["ours_ms"] > 0
    text = (tmp_path / "hybrid_decode.md").read_text()
    assert "| batch 1, 32 tokens |" in text and "In the limit of long contexts 2.50" in text
    svg = (tmp_path / "hybrid_decode.svg").read_text()
    assert svg.startswith("<svg") and svg.count("<circle") == 4
