"""Depth reads by kernels, in Triton's interpreter: sums, reads and norms in one pass give what three passes give."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from openk3.model import depth as depth_module
from openk3.model.depth import DepthQuery, DepthStream
from openk3.model.norm import RMSNorm
from openk3.model.trace import Recorder, Trace

WIDTH, EPS = 24, 1e-5


class Depths(Trace):
    """Keeps the weights of each read, in order."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def depth(self, layer: int, site: str, probs_TL: Tensor) -> None:
        """Keep."""
        self.kept.append(probs_TL.detach())


def parts(count: int) -> tuple[list[DepthQuery], list[RMSNorm], Tensor]:
    """Queries, norms and the embedding, all with gradients."""
    generator = torch.Generator().manual_seed(count)
    queries = [DepthQuery(WIDTH, EPS, i // 2, "mixer" if i % 2 == 0 else "ffn") for i in range(count)]
    norms = [RMSNorm(WIDTH, EPS) for _ in range(count)]
    for part in (*(query.norm for query in queries), *(norm.weight for norm in norms)):
        torch.nn.init.normal_(part, mean=1.0, std=0.1, generator=generator)
    for query in queries:
        torch.nn.init.normal_(query.proj, generator=generator)
    return queries, norms, torch.randn(3, WIDTH, generator=generator).requires_grad_()


def run(stream: DepthStream, queries: list[DepthQuery], norms: list[RMSNorm]) -> list[Tensor]:
    """Reads through norms, with a write of a fixed function after each, as layers do; the last one is bare."""
    got = []
    for query, norm in zip(queries[:-1], norms):
        got.append(stream.read_normed(query, norm))
        stream.write(torch.sin(got[-1]) + 0.1)
    return [*got, stream.read(queries[-1]), stream.prefix_TD]


def by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams opened from here on read by kernels."""
    monkeypatch.setenv("OPENK3_BACKEND", "triton")


@pytest.mark.parametrize("writes_per_block", [1, 2, 4])
def test_training(writes_per_block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every read, the last sum, the weights and every gradient; blocks end at, before and after the last write."""
    queries, norms, x_TD = parts(8)
    leaves = [x_TD, *(p for query in queries[1:] for p in query.parameters()), *(norm.weight for norm in norms[:-1])]
    found = []
    for kernels in (False, True):
        if kernels:
            by_kernels(monkeypatch)
        trace = Depths()
        reads = run(DepthStream(x_TD, writes_per_block, trace=trace), queries, norms)
        loss = sum((read * (1 + n)).square().sum() for n, read in enumerate(reads))
        found.append([*reads, *trace.kept, *torch.autograd.grad(loss, leaves)])
    assert len(found[0]) == 9 + 7 + len(leaves)
    for want, got in zip(*found, strict=True):
        assert float((got - want).detach().norm() / want.detach().norm()) < 2e-3


@pytest.mark.parametrize(("room", "phases"), [(1 << 20, 1), (5 * 3 * WIDTH, 2)])
def test_two_phases(room: int, phases: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Phase one where it is worth it, also for a few reads at a time; the same reads."""
    queries, norms, x_TD = parts(13)
    by_kernels(monkeypatch)
    called = []
    for name in ("inter_block", "merge_normed", "mix_depth_normed"):
        function = getattr(depth_module, name)
        spy = lambda *a, f=function, n=name, **k: called.append(n) or f(*a, **k)  # noqa: E731
        monkeypatch.setattr(depth_module, name, spy)
    with torch.no_grad():
        want = run(DepthStream(x_TD, 4), queries, norms)
        assert set(called) == {"mix_depth_normed"}
        run(DepthStream(x_TD, 4, upcoming=queries), queries, norms)
        assert set(called) == {"mix_depth_normed"}  # a few tokens: not worth it
        monkeypatch.setattr(depth_module, "FUSED_PHASE_ONE_TOKENS", 3)
        monkeypatch.setattr(depth_module, "FUSED_PHASE_ONE_ELEMENTS", room)
        called.clear()
        got = run(DepthStream(x_TD, 4, upcoming=queries), queries, norms)
    assert called.count("merge_normed") == 3 and called.count("inter_block") == phases
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_a_look_at_the_prefix_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking for the running sum makes it at once; later reads are the same."""
    by_kernels(monkeypatch)
    queries, norms, x_TD = parts(6)
    looked: list[Tensor] = []

    class Looking(DepthStream):
        def write(self, y_TD: Tensor) -> None:
            super().write(y_TD)
            looked.append(self.prefix_TD)

    want = run(DepthStream(x_TD, 4), queries, norms)
    got = run(Looking(x_TD, 4), queries, norms)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert torch.equal(looked[-1], got[-1]) and len(looked) == 5
    assert Recorder().wants("layer_out")
