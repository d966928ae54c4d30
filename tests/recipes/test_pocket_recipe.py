"""pocket: the model fits its files, the run its time, and every part of the architecture but MTP is there."""

from __future__ import annotations

from openk3 import recipes
from openk3.model.accounting import account
from openk3.recipes import pocket


def test_model_fits_into_25_megabytes() -> None:
    """Experts in MXFP4, the rest in bfloat16; a tokenizer and the files' headers come to 0.4 MB more."""
    books = account(pocket.model())
    experts = next(part.total for part in books.components if part.name == "routed experts")
    assert experts * 17 / 32 + (books.total - experts) * 2 < 24_400_000


def test_run_reads_three_sources_and_ends_rounded() -> None:
    """One weight a source, at most nine minutes, and MXFP4 before the end."""
    config = recipes.pretrain("pocket")
    assert len(config.data.weights) == len(pocket.SOURCES) == 3 and abs(sum(config.data.weights) - 1) < 1e-9
    assert config.minutes <= 9 and config.mxfp4_from < 1 and config.checkpoint.experts == "mxfp4"


def test_has_every_part_but_mtp() -> None:
    """KDA, MLA, experts, depth blocks and a tower."""
    text = pocket.model().text
    assert {"kda", "mla"} == set(text.layer_kinds()) and text.num_experts > text.num_experts_per_token
    assert text.num_hidden_layers > text.attn_res_block_size and text.num_nextn_predict_layers == 0
    assert pocket.model().vision is not None
