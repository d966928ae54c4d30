"""The kernels of attention over latents in pages in Triton's interpreter, against the definition in float64."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import random
from torch import Tensor

from openk3.config.model import ConfigError
from openk3.ops.mla import latent_decode, latent_kernel
from openk3.ops.mla.latent_decode import LatentPages, latent_attention, plan_latents
from openk3.ops.mla.reference import absorbed_attention

C, R, SCALE = 20, 8, 0.4
NAN = float("nan")


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels with small blocks on a machine of few multiprocessors, so that requests are shared among programs."""
    monkeypatch.setenv("OPENK3_BACKEND", "triton")
    monkeypatch.setattr(latent_kernel, "settings", lambda *_: latent_kernel.Settings(16, 16, 1, 4, 1))
    monkeypatch.setattr(latent_decode, "_multiprocessors", lambda device: 5)


class Requests:
    """Requests of `new` tokens behind `old` ones, H heads, in one format."""

    def __init__(self, pairs: list[tuple[int, int]], H: int = 3, dtype: torch.dtype = torch.float32) -> None:
        self.new = [new for new, _ in pairs]
        self.lengths = [new + old for new, old in pairs]
        self.bounds = torch.tensor([0, *accumulate(self.new)], dtype=torch.int32)
        self.q_latent = random(sum(self.new), H, C, seed=1).to(dtype)
        self.q_shared = random(sum(self.new), H, R, seed=2).to(dtype)
        self.latents = [random(n, C + R, seed=10 + i).to(dtype) for i, n in enumerate(self.lengths)]

    def exact(self) -> Tensor:
        """By definition in float64."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OPENK3_BACKEND", "reference")
            wide = [x.double() for x in (self.q_latent, self.q_shared)]
            return absorbed_attention(*wide, [x.double() for x in self.latents], self.bounds, scale=SCALE)

    def pages(self, size: int) -> LatentPages:
        """In pages in disorder with NaN around; a page has room for more than its row, as those of an engine."""
        counts = [-(-n // size) for n in self.lengths]
        memory = torch.full((sum(counts) + 2, 2, size + 3, C + R), NAN, dtype=self.q_latent.dtype)[:, 1, :size]
        order = torch.randperm(len(memory), generator=torch.Generator().manual_seed(0)).tolist()
        table = torch.full((len(counts), max([1, *counts])), 2**30, dtype=torch.int32)
        for n, (rows, count) in enumerate(zip(self.latents, counts)):
            for i in range(count):
                table[n, i] = order.pop()
                part = rows[i * size : (i + 1) * size]
                memory[table[n, i], : len(part)] = part
        return LatentPages.of_pages(memory, table, torch.tensor(self.lengths, dtype=torch.int32))

    def run(self, pages: LatentPages, **options: int) -> Tensor:
        """By the kernels."""
        return latent_attention(self.q_latent, self.q_shared, pages, self.bounds, scale=SCALE, **options)


def close(got: Tensor, want: Tensor, limit: float = 1e-6) -> None:
    """Within `limit` of it by the norm."""
    assert got.dtype == torch.float32 and got.shape == want.shape
    assert float((got.double() - want).norm()) <= limit * (float(want.norm()) + 1e-3)


@settings(max_examples=8)
@given(
    pairs=st.lists(st.tuples(st.integers(0, 6), st.sampled_from([0, 1, 15, 40, 90])), min_size=1, max_size=4),
    size=st.sampled_from([7, 16, 48]),
)
def test_equals_the_definition(pairs: list[tuple[int, int]], size: int) -> None:
    """Decoding and verification of requests of unequal length, also without new tokens; pages of any size."""
    requests = Requests(pairs)
    close(requests.run(requests.pages(size)), requests.exact())


def test_other_places() -> None:
    """One piece of memory for each request, and separate tensors through the public call."""
    requests = Requests([(1, 30), (2, 7), (1, 80)])
    memory = torch.full((3, 100, C + R), NAN)
    for n, rows in enumerate(requests.latents):
        memory[n, : len(rows)] = rows
    lengths = torch.tensor(requests.lengths, dtype=torch.int32)
    close(requests.run(LatentPages.contiguous(memory, lengths)), requests.exact())
    apart = [rows.clone()[:, :] for rows in requests.latents]
    got = absorbed_attention(requests.q_latent, requests.q_shared, apart, requests.bounds, scale=SCALE)
    close(got, requests.exact())
    close(latent_attention(
        requests.q_latent, requests.q_shared, LatentPages.of_sequences([x.T.contiguous().T for x in apart]),
        requests.bounds, scale=SCALE,
    ), requests.exact())  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    """Probabilities are rounded, sums are not."""
    requests = Requests([(1, 60), (4, 20)], dtype=dtype)
    close(requests.run(requests.pages(16)), requests.exact(), 3e-3)


def test_many_rows() -> None:
    """More heads times tokens than a block of rows has, and another number of them for each request."""
    requests = Requests([(5, 40), (1, 20), (0, 9), (3, 0)], H=7)
    close(requests.run(requests.pages(16)), requests.exact())


class Launches:
    """Stands for a kernel, and notes the constants that it would be compiled for."""

    def __init__(self, found: list[dict[str, object]]) -> None:
        self._found = found

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """Of one launch."""
        return lambda *arguments, **constants: self._found.append(constants)


def test_nothing_is_compiled_for_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries whose heads come first and prompts of any length: constants are the same for passes of all sizes."""
    found: list[dict[str, object]] = []
    for pairs in ([(5, 40), (1, 20)], [(9, 0), (13, 90), (2, 7)], [(1, 30)]):
        requests = Requests(pairs, H=7)
        pages, want = requests.pages(16), requests.exact()
        requests.q_latent = requests.q_latent.transpose(0, 1).contiguous().transpose(0, 1)
        close(requests.run(pages), want)
        with monkeypatch.context() as patch:
            patch.setattr(latent_kernel, "latent_kernel", Launches(found))
            requests.run(pages)
    assert len(found) == 3 and found[0] == found[1] == found[2]


def test_queries_of_the_kernel_with_constant_strides() -> None:
    """Heads that come first are copied, but for the numbers of places of decoding; others never are."""
    for T in (1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 191, 192, 256):
        first = torch.zeros(7, T, C).transpose(0, 1)
        settled = latent_decode._settled(first)
        assert (settled is first) == (T in (1, 2, 3, 4, 6, 8, 12, 192, 256))
        assert settled is first or settled.stride() == (7 * C, C, 1)
        other = torch.zeros(T, 7, 2 * C)[..., :C]
        assert latent_decode._settled(other) is other


def test_a_plan_serves_every_layer() -> None:
    """The same plan, and the most new tokens told: the same bits, and nothing is read from the device."""
    requests = Requests([(1, 30), (1, 90)])
    pages = requests.pages(16)
    want = requests.run(pages)
    plan = plan_latents(pages, requests.bounds, 3, 1)
    assert plan.before.tolist() == [[0, 2, 8]] and plan.parts == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(latent_decode, "integers", None)
        assert torch.equal(requests.run(pages, plan=plan, new_tokens=1), want)


def test_requests_are_kept_apart() -> None:
    """A request of NaN spoils its own tokens only."""
    requests = Requests([(1, 30), (1, 20), (1, 50)])
    want = requests.run(requests.pages(16))
    requests.latents[1].fill_(NAN)
    got = requests.run(requests.pages(16))
    assert got[1].isnan().all() and torch.equal(got[[0, 2]], want[[0, 2]])


def test_nothing_to_do() -> None:
    """No request, and requests without new tokens."""
    assert Requests([(0, 5), (0, 0)]).run(Requests([(0, 5), (0, 0)]).pages(16)).shape == (0, 3, C)
    empty = torch.zeros(0, 3, C)
    assert absorbed_attention(empty, torch.zeros(0, 3, R), [], torch.tensor([0]), scale=SCALE).shape == (0, 3, C)


def test_what_does_not_fit() -> None:
    """Shapes, formats and scales are checked before a kernel reads memory."""
    requests = Requests([(1, 30)])
    pages, cu = requests.pages(16), requests.bounds
    q, shared = requests.q_latent, requests.q_shared
    for arguments, scale, message in (
        ((q, q, pages, cu), SCALE, "queries of 20 and 20 channels for latents of 28"),
        ((q, shared, pages, cu.long()), SCALE, "cu_seqlens_q must be int32"),
        ((q, shared, pages, cu[:1]), SCALE, "one more bound than there are requests"),
        ((q.bfloat16(), shared.bfloat16(), pages, cu), SCALE, "one format"),
        ((q, shared, pages, cu), 0.0, "the scale must be positive"),
    ):
        with pytest.raises(ValueError, match=message):
            latent_attention(*arguments, scale=scale)
    with pytest.raises(ValueError, match="pages .* needed"):
        LatentPages.of_pages(pages.memory[0], pages.page_NP, pages.length_N)
    with pytest.raises(ValueError, match="length_N int32"):
        LatentPages.of_pages(pages.memory, pages.page_NP, pages.length_N.long())
    with pytest.raises(ConfigError, match="no gradients through cached latents"):
        absorbed_attention(q.requires_grad_(), shared, requests.latents, cu, scale=SCALE)
