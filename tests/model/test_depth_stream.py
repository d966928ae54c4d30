"""Attention Residuals in the model: schedules, uniform start, two phases, full form, recomputation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_model import close, random_ids, tiny_config, tiny_model
from torch.utils.checkpoint import checkpoint

from openk3 import K3, Packed
from openk3.model import depth as depth_module
from openk3.model.depth import DepthQuery, DepthStream, ResidualStream
from openk3.model.trace import Recorder
from openk3.ops.attn_res import mix_depth


def queries(count: int, width: int = 8, scale: float = 1.0) -> list[DepthQuery]:
    """Read points with random float64 queries."""
    out = [DepthQuery(width, 1e-5, i // 2, "mixer" if i % 2 == 0 else "ffn").double() for i in range(count)]
    generator = torch.Generator().manual_seed(count)
    for query in out:
        torch.nn.init.normal_(query.norm, mean=1.0, std=0.1, generator=generator)
        torch.nn.init.normal_(query.proj, std=scale, generator=generator)
    return out


def run(stream: DepthStream, reads: list[DepthQuery], tokens: int) -> list[torch.Tensor]:
    """Reads with a write of a fixed nonlinear function after each, as layers do."""
    got = []
    for query in reads[:-1]:
        got.append(stream.read(query))
        stream.write(torch.sin(3 * got[-1]) + 0.1)
    return [*got, stream.read(reads[-1])]


@settings(max_examples=15)
@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 4))
def test_two_phases_equal_one(layers: int, block: int, tokens: int) -> None:
    """Finished blocks mixed once per block, then the running block: the same softmax, at every read."""
    reads = queries(2 * layers + 1)
    x_TD = torch.randn(tokens, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        one = run(DepthStream(x_TD, 2 * block), reads, tokens)
        two = run(DepthStream(x_TD, 2 * block, upcoming=reads), reads, tokens)
    for got, want in zip(two, one, strict=True):
        close(got, want, 1e-13)


@pytest.mark.parametrize("budget", [1, 16, 70, 96, 1 << 20])
def test_two_phases_within_a_memory_budget(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few reads fit into phase one at once, the result is the same."""
    reads, x_TD = queries(15), torch.randn(2, 8, dtype=torch.float64)
    with torch.no_grad():
        want = run(DepthStream(x_TD, 6), reads, 2)
        monkeypatch.setattr(depth_module, "PHASE_ONE_ELEMENTS", budget)
        inter_block, held = depth_module.inter_block, [0]

        def counted(sources: Any, vectors_QD: Any, eps: float) -> Any:
            held.append((len(sources) + len(vectors_QD)) * x_TD.numel())
            return inter_block(sources, vectors_QD, eps)

        monkeypatch.setattr(depth_module, "inter_block", counted)
        got = run(DepthStream(x_TD, 6, upcoming=reads), reads, 2)
    for one, two in zip(got, want, strict=True):
        close(one, two, 1e-13)
    assert max(held) <= budget and (budget < 100 or len(held) == 3)


def test_model_in_two_phases_equals_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gradients the model takes two phases; with them, or when weights are traced, one."""
    model, packed, calls = tiny_model(), Packed.join(random_ids([9, 4])), []
    inter_block = depth_module.inter_block

    def counted(*args: Any) -> Any:
        calls.append(len(args[1]))
        return inter_block(*args)

    monkeypatch.setattr(depth_module, "inter_block", counted)
    want = model(packed)
    with torch.no_grad():
        traced = model(packed, trace=Recorder())
        assert calls == []
        close(model(packed), want)
    close(traced, want)
    assert calls == [4, 4]  # 6 layers in blocks of 2: blocks 1 and 2 have four reads each, the output read is alone


def test_full_form_reads_every_output() -> None:
    """Report eqs. 8-9 by definition; it is neither block size 1 nor a residual stream."""
    reads, x_TD = queries(7), torch.randn(3, 8, dtype=torch.float64)
    got = run(DepthStream(x_TD, 1), reads, 3)
    sources: list[torch.Tensor] = [x_TD]
    for i, query in enumerate(reads):
        keys = [v * torch.rsqrt(v.square().mean(-1, keepdim=True) + 1e-5) for v in sources]
        scores = torch.stack([(k * query.norm * query.proj).sum(-1) for k in keys], -1)
        want = (scores.softmax(-1).unsqueeze(-1) * torch.stack(sources, 1)).sum(1)
        close(got[i], want, 1e-13)
        sources.append(torch.sin(3 * want) + 0.1)
    by_blocks_of_one = run(DepthStream(x_TD, 2), reads, 3)
    assert (by_blocks_of_one[-1] - got[-1]).abs().max() > 1e-3


@pytest.mark.parametrize("layers", [12, 13, 24, 25, 93])
def test_fresh_model_reads_depth_uniformly(layers: int) -> None:
    """E04: weights are exactly 1/n with the documented number of sources at every read; block size 12."""
    config = tiny_config(layers, vision=False, hidden_size=16, attn_res_block_size=12, num_nextn_predict_layers=0)
    model, recorder = K3.build(config, seed=layers), Recorder()
    packed = Packed.join([[7, 8, 9]])
    with torch.no_grad():
        model.hidden(packed, trace=recorder)
    counts = {(i, "mixer"): math.ceil(i / 12) + 1 for i in range(1, layers)}
    counts |= {(i, "ffn"): i // 12 + 2 for i in range(layers)}
    counts[layers, "output"] = (layers - 1) // 12 + 2
    assert set(recorder.depths) == set(counts)
    for site, n in counts.items():
        assert torch.equal(recorder.depths[site], torch.full((3, n), 1 / n)), site
    for _ in range(2):  # the second pass is no different from the first
        model.zero_grad()
        model.loss(packed).total.backward()
        for query in model.depth_queries():
            first = (query.layer, query.site) == (0, "mixer")  # reads the embedding alone: its weight is always 1
            assert (query.proj.grad is None) if first else bool(query.proj.grad.any())


def test_scaling_a_source_leaves_its_weight() -> None:
    """E04: keys are normalised, so a source a thousand times larger gets the weight it had."""
    for query, tolerance in ((queries(1, 8, 0.0)[0], 0.0), (queries(1)[0], 1e-4)):
        sources = [torch.randn(5, 8, dtype=torch.float64) for _ in range(4)]
        probs_TL = mix_depth(sources, query.proj, query.norm, query.eps)[1]
        scaled = [sources[0], 1000 * sources[1], *sources[2:]]
        torch.testing.assert_close(
            mix_depth(scaled, query.proj, query.norm, query.eps)[1], probs_TL, atol=tolerance, rtol=0
        )


def test_gradients_with_recomputation_are_equal() -> None:
    """E04: a read recomputed in the backward pass gives the same gradients."""
    (query,), sources = queries(1), [torch.randn(5, 8, dtype=torch.float64, requires_grad=True) for _ in range(4)]

    def read(*values: torch.Tensor) -> torch.Tensor:
        return mix_depth(list(values), query.proj, query.norm, query.eps)[0]

    leaves = [*sources, query.proj, query.norm]
    kept = torch.autograd.grad(read(*sources).square().sum(), leaves)
    again = torch.autograd.grad(checkpoint(read, *sources, use_reentrant=False).square().sum(), leaves)
    for one, two in zip(kept, again, strict=True):
        assert torch.equal(one, two) and one.any()


def test_gradients_of_a_model_with_recomputation_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """E04: with every depth read, mixer and feed-forward part recomputed in the backward pass, every gradient of a
    training step is the same."""
    model, packed = tiny_model(), Packed.join(random_ids([20, 9]))
    model.loss(packed).total.backward()
    want = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    calls = []

    def again(sources: list[torch.Tensor], query: torch.Tensor, norm: torch.Tensor, eps: float) -> Any:
        def read(*values: torch.Tensor) -> Any:
            calls.append("read")
            return mix_depth(list(values), query, norm, eps)

        return checkpoint(read, *sources, use_reentrant=False)

    monkeypatch.setattr(depth_module, "mix_depth", again)
    for layer in model.layers:
        for part in (layer.mixer, layer.ffn):
            forward = part.forward
            monkeypatch.setattr(part, "forward", lambda *a, f=forward: checkpoint(f, *a, use_reentrant=False))
    model.loss(packed).total.backward()
    got = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert got.keys() == want.keys() and len(calls) == 2 * (2 * 6)  # every read but the first, forward and backward
    for name, value in want.items():
        assert torch.equal(got[name], value), name


def test_residual_stream_is_a_running_sum() -> None:
    """What the MTP layer reads."""
    (query,), stream = queries(1), ResidualStream(torch.ones(2, 8))
    stream.write(torch.full((2, 8), 2.0))
    assert torch.equal(stream.read(query), torch.full((2, 8), 3.0))
