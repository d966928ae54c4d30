"""PageTransfer: what leaves pages comes back bit for bit, into other pages, and nothing else moves either way."""

from __future__ import annotations

import pytest
import torch
from engine_model import engine_config
from test_page_memory import everything, memory
from torch import Tensor

from openk3.config.serve import kda_row_bytes
from openk3.engine.host_memory import Entry
from openk3.engine.page_memory import PageMemory
from openk3.engine.page_plans import CopyPlan, PageLoad, TailLoad
from openk3.engine.page_transfer import PageTransfer

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
HEADER = 96


def filled(dtype: torch.dtype) -> tuple[PageMemory, PageTransfer]:
    """Random numbers everywhere; the model has three KDA layers in two groups of two rows."""
    pages = memory(8, dtype)
    generator = torch.Generator().manual_seed(0)
    for page in range(8):
        for values in everything(pages, page):
            values.copy_(torch.randn(values.shape, generator=generator, dtype=torch.float64))
    return pages, PageTransfer(pages, engine_config())


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit: states seen as latents may be NaN."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def entry(transfer: PageTransfer, num_bytes: int) -> Entry:
    """Room for a payload behind a header."""
    return Entry(b"", "page", transfer.buffer(HEADER + num_bytes).fill_(255), pins=1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_page_goes_and_comes_back(dtype: torch.dtype) -> None:
    """All rows, the MTP layer's too; pages beside it and what lies behind its latents stay as they are."""
    pages, transfer = filled(dtype)
    assert transfer.page_bytes() == 2 * 8 * 24 * dtype.itemsize
    before, kept = pages.words_PRB.clone(), entry(transfer, transfer.page_bytes())
    transfer.read_page(3, kept.data[HEADER:])
    assert same(pages.words_PRB, before) and (kept.data[:HEADER] == 255).all()
    assert transfer.load(CopyPlan((), page_loads=(PageLoad(kept, 5),)), HEADER) == transfer.page_bytes()
    for row in range(2):
        assert same(pages.latents(row)[5], pages.latents(row)[3])
    words = 8 * 24 * dtype.itemsize // 8
    assert same(pages.words_PRB[5, :, words:], before[5, :, words:])
    assert same(pages.words_PRB[[0, 1, 2, 3, 4, 6, 7]], before[[0, 1, 2, 3, 4, 6, 7]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [0, 1, 5, 7])
def test_a_state_goes_and_comes_back(dtype: torch.dtype, num_rows: int) -> None:
    """States of three layers, what belongs to them, and the first latents; not the row that no layer uses."""
    pages, transfer = filled(dtype)
    latents = 2 * -(-num_rows * 24 * dtype.itemsize // 8) * 8
    assert transfer.tail_bytes(num_rows) == 3 * pages.state_words * 8 + latents
    assert pages.state_words * 8 >= kda_row_bytes(engine_config().text, dtype.itemsize)
    before, kept = pages.words_PRB.clone(), entry(transfer, transfer.tail_bytes(num_rows))
    transfer.read_tail([1, 2], 3 if num_rows else None, num_rows, kept.data[HEADER:])
    assert same(pages.words_PRB, before)
    load = TailLoad(kept, (4, 5), 6, num_rows)
    assert transfer.load(CopyPlan((), tail_load=load), HEADER) == transfer.tail_bytes(num_rows)
    for row, (source, target) in ((0, (1, 4)), (1, (1, 4)), (0, (2, 5))):
        assert same(pages.states(row).state_PHKV[target], pages.states(row).state_PHKV[source])
        for inputs_PCW in pages.states(row).inputs_PCW:
            assert same(inputs_PCW[target], inputs_PCW[source])
    for row in range(2):
        assert same(pages.latents(row)[6, :num_rows], pages.latents(row)[3, :num_rows])
        assert same(
            pages.latents(row)[6, num_rows + 1 :],
            before.clone().view(dtype)[6, row, : 8 * 24].view(8, 24)[num_rows + 1 :],
        )
    assert same(pages.words_PRB[5, 1], before[5, 1]), "a row that no layer uses"
    assert same(pages.words_PRB[[0, 1, 2, 3, 7]], before[[0, 1, 2, 3, 7]])
