"""PagedRows: the tensors that pages stand for, and attention that reads pages in place by kernels."""

from __future__ import annotations

import pytest
import torch
from op_checks import random
from torch import Tensor

from openk3.ops.mla import latent_kernel  # where there is no triton, this file is left out
from openk3.ops.mla.paged_rows import PagedRows, PageTables
from openk3.ops.mla.reference import absorbed_attention

LENGTHS, SIZE = (1, 4, 5, 11, 0), 4
assert latent_kernel


def paged(dtype: torch.dtype) -> tuple[list[Tensor], PagedRows]:
    """Rows of five requests, and the same in pages in disorder, NaN around, tables longer than needed."""
    rows = [random(length, 12, seed=length).to(dtype) for length in LENGTHS]
    memory = torch.full((12, 2, SIZE + 1, 12), float("nan"), dtype=dtype)[:, 1, :SIZE]
    tables, free = [], [7, 0, 3, 9, 11, 5, 2, 8, 1, 4]
    for row in rows:
        tables.append([free.pop() for _ in range(-(-len(row) // SIZE))])
        for page, part in zip(tables[-1], row.split(SIZE)):
            memory[page, : len(part)] = part
    tables[0] = [*tables[0], 10]
    return rows, PagedRows(memory, PageTables(tuple(tables), LENGTHS, SIZE, torch.device("cpu")))


def test_they_are_the_rows() -> None:
    """One by one, in slices of slices, as views where one page is enough; tables for kernels have page 0 at ends."""
    rows, pages = paged(torch.float64)
    assert len(pages) == 5 and all(torch.equal(a, b) for a, b in zip(pages, rows, strict=True))
    part = pages[1:5][1:3]
    assert part.lengths == (5, 11) and all(torch.equal(a, b) for a, b in zip(part, rows[2:4], strict=True))
    assert part.where is pages.where.part(slice(1, 5)).part(slice(1, 3))
    assert pages[1].data_ptr() == pages.latent_PTC[pages.where.tables[1][0]].data_ptr()
    assert pages.where.page_NP.shape == (5, 3) and pages.where.page_NP[0, 1:].tolist() == [0, 0]
    assert pages[4:].where.page_NP.tolist() == [[0]] and pages.where.length_N.tolist() == list(LENGTHS)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_attention_reads_them_in_place(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As from tensors: by the definition in float64, and by the kernels in float32."""
    monkeypatch.setenv("OPENK3_BACKEND", backend)
    dtype = torch.float64 if backend == "reference" else torch.float32
    rows, pages = paged(dtype)
    bounds = torch.tensor([0, 1, 2, 4, 7, 7], dtype=torch.int32)
    q_latent, q_shared = random(7, 3, 8, seed=1).to(dtype), random(7, 3, 4, seed=2).to(dtype)
    got = absorbed_attention(q_latent, q_shared, pages, bounds, scale=0.3)
    monkeypatch.setenv("OPENK3_BACKEND", "reference")
    want = absorbed_attention(q_latent, q_shared, rows, bounds, scale=0.3)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12 if dtype == torch.float64 else 1e-5)
    with pytest.raises(ValueError):
        absorbed_attention(q_latent, q_shared, pages[:4], bounds, scale=0.3)
