"""Quantile Balancing: reference vectors, histogram against exact, timing of the bias, and what must not move it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from small_models import random_batch, small_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from openk3.config.train import BalanceConfig
from openk3.model.k3 import K3
from openk3.ops.routing import route
from openk3.optim.quantile_balance import BalanceTrace, Histogram, exact_bias, histogram_bias

OPS = Path(__file__).parent.parent / "golden" / "ops"


def histogram_of(scores: torch.Tensor, bias: torch.Tensor, threshold: torch.Tensor, bins: int = 1000) -> Histogram:
    """A histogram that has counted one batch."""
    histogram = Histogram(torch.zeros(scores.shape[1], bins, dtype=torch.int64))
    histogram.add(scores, bias, threshold)
    return histogram


@pytest.mark.parametrize("case", ["a", "b"])
def test_reference_vectors(case: str) -> None:
    """Cut-off, exact bias and 1000-bin histogram bias of the stored cases (eqs. 13-14, Appendix D)."""
    inputs, expected = load_file(OPS / "inputs.safetensors"), load_file(OPS / "expected.safetensors")
    scores, bias, k = (inputs[f"qb.{case}.{name}"] for name in ("scores", "bias", "k"))
    threshold = route(scores, bias, int(k)).threshold_T
    torch.testing.assert_close(threshold, expected[f"qb.{case}.cutoff"], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        exact_bias(scores, threshold, int(k)), expected[f"qb.{case}.new_bias"], rtol=1e-6, atol=1e-6
    )
    # Against the cut-off, every expert's bias admits the same number of tokens: its share.
    load, margin = int(expected[f"qb.{case}.target_load"]), scores.double() - threshold.double().unsqueeze(1)
    assert load == len(scores) * int(k) / scores.shape[1]
    border = (margin + exact_bias(scores.double(), threshold.double(), int(k))).sort(0, descending=True).values
    torch.testing.assert_close(border[load], border[load].mean().expand(scores.shape[1]), rtol=0, atol=1e-12)
    assert bool((border[load - 1] > border[load]).all())
    found = histogram_of(scores, bias, threshold).bias(int(k)).float()
    torch.testing.assert_close(found, expected[f"qb.{case}.hist_bias_B1000"], rtol=1e-6, atol=1e-6)


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(2, 12), st.integers(1, 80), st.integers(1, 64), st.data())
def test_histogram_is_within_one_bin_of_the_quantile(
    seed: int, experts: int, tokens: int, bins: int, data: st.DataObject
) -> None:
    """For any scores and bias: within one bin of the k/n quantile of the required biases, before centring.

    The quantile of a finite sample is the gap between two neighbours where q = m k / n is whole, else one value.
    """
    k = data.draw(st.integers(1, experts - 1))
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, experts, generator=generator, dtype=torch.float64) ** 3
    bias = torch.randn(experts, generator=generator, dtype=torch.float64) * 0.2
    threshold = route(scores, bias, k).threshold_T
    histogram = histogram_of(scores, bias, threshold, bins)
    required = (threshold.unsqueeze(1) - scores).sort(0).values
    q = tokens * k / experts
    low, high = required[math.ceil(q) - 1], required[min(math.floor(q), tokens - 1)]
    centred = histogram.bias(k)
    raw = raw_bias(histogram, k)
    slack = histogram.width * (1 + 1e-9) + 1e-12
    assert bool((raw >= low - slack).all()) and bool((raw <= high + slack).all())
    torch.testing.assert_close(centred, raw - raw.mean())


def raw_bias(histogram: Histogram, k: int) -> torch.Tensor:
    """The estimate before mean-centring, expert by expert, in plain Python."""
    found = []
    for counts in histogram.counts_EB.tolist():
        q, before = sum(counts) * k / len(histogram.counts_EB), 0
        for place, count in enumerate(counts):
            if before + count >= math.ceil(q):
                found.append(histogram.low + (place + min(max((q - before) / count, 0), 1)) * histogram.width)
                break
            before += count
    return torch.tensor(found, dtype=torch.float64)


def test_many_tokens_make_both_forms_agree() -> None:
    """4096 tokens, 32 experts: histogram and exact bias differ by less than a bin."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.sigmoid(torch.randn(4096, 32, generator=generator) + torch.linspace(-1, 1, 32))
    bias = torch.zeros(32)
    threshold = route(scores, bias, 4).threshold_T
    histogram = histogram_of(scores, bias, threshold)
    exact = exact_bias(scores, threshold, 4)
    assert (histogram.bias(4) - exact).abs().max() < 2 * histogram.width


def test_loads_even_out() -> None:
    """One update removes most of a heavy imbalance, a few bring the busiest expert to within 5 % of the mean."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.sigmoid(torch.randn(4096, 32, generator=generator) + torch.linspace(-1, 1, 32))
    bias, worst = torch.zeros(32), []
    for _ in range(6):
        routes = route(scores, bias, 4)
        load = routes.expert_ids_Tk.flatten().bincount(minlength=32).double()
        worst.append(float(load.max() / load.mean()))
        bias = histogram_of(scores, bias, routes.threshold_T).bias(4)
    assert worst[0] > 2.5 and worst[1] < 1.25 and worst[-1] < 1.05


def test_counts_add_up_over_micro_batches() -> None:
    """Splitting the tokens changes no count; all counts are integers that sum to the tokens."""
    generator = torch.Generator().manual_seed(3)
    scores, bias = torch.rand(96, 8, generator=generator), torch.randn(8, generator=generator) * 0.1
    threshold = route(scores, bias, 2).threshold_T
    whole = histogram_of(scores, bias, threshold)
    parts = Histogram(torch.zeros(8, 1000, dtype=torch.int64))
    for rows in torch.arange(96).split([5, 40, 51]):
        parts.add(scores[rows], bias, threshold[rows])
    assert torch.equal(parts.counts_EB, whole.counts_EB) and not whole.counts_EB.is_floating_point()
    assert (whole.counts_EB.sum(1) == 96).all() and whole.num_tokens == 96
    assert torch.equal(histogram_bias(parts.counts_EB, parts.low, parts.width, 2), whole.bias(2))


@pytest.mark.parametrize("method", ["histogram", "exact"])
def test_bias_moves_only_in_update(method: str) -> None:
    """Counting changes no bias; `update` changes every router's, mean zero, MTP's included; then nothing is left."""
    model = K3.build(small_model(), seed=0)
    trace = BalanceTrace(model, BalanceConfig(method=method))
    assert sorted(trace.routers) == [1, 2]
    trace.open()
    model.loss(random_batch(0), trace)
    trace.close()
    assert all(not router.bias.any() for router in trace.routers.values())
    trace.update()
    for router in trace.routers.values():
        assert router.bias.any() and abs(float(router.bias.mean())) < 1e-6
    biases = [router.bias.clone() for router in trace.routers.values()]
    trace.update()
    assert all(torch.equal(a, router.bias) for a, router in zip(biases, trace.routers.values()))


def test_moving_average_keeps_a_share_of_the_earlier_bias() -> None:
    """Appendix D's option: with ema 0.75 the new bias has a quarter of the step's own quantiles; 0 takes them whole.

    The first updates are a plain mean: update n has weight 1/n until that is less than a quarter.
    """
    model = K3.build(small_model(), seed=0)
    plain, smooth = BalanceTrace(model, BalanceConfig()), BalanceTrace(model, BalanceConfig(ema=0.75))
    router, earlier = plain.routers[1], torch.tensor([0.03, -0.01, -0.01, -0.01])
    found = []
    for trace, updates in ((plain, 0), (smooth, 9), (smooth, 0), (smooth, 1)):
        trace.num_updates = updates
        router.bias.copy_(earlier)
        trace.open()
        model.loss(random_batch(0), trace)
        trace.update()
        found.append(router.bias.clone())
    torch.testing.assert_close(found[1], 0.75 * earlier + 0.25 * found[0])
    assert torch.equal(found[2], found[0])
    torch.testing.assert_close(found[3], 0.5 * earlier + 0.5 * found[0])


def test_only_open_forward_passes_count() -> None:
    """Evaluation (no trace), a closed trace (recomputation in backward) and a second reset leave no statistics."""
    model = K3.build(small_model(), seed=0)
    trace = BalanceTrace(model, BalanceConfig())
    batch = random_batch(0)
    model.loss(batch)
    model.loss(batch, trace)
    assert all(statistic.num_tokens == 0 for statistic in trace.statistics.values())
    assert not trace.wants("max_logit")
    trace.open()
    assert trace.wants("max_logit") and not trace.wants("depth")
    model.loss(batch, trace)
    trace.close()
    counts = {layer: statistic.num_tokens for layer, statistic in trace.statistics.items()}
    assert counts == {1: 64, 2: 62}  # the MTP layer has no last position of either sequence
    model.loss(batch, trace)
    assert counts == {layer: statistic.num_tokens for layer, statistic in trace.statistics.items()}
    assert set(trace.max_logits) == {1, 2} and trace.imbalance()[0] >= trace.imbalance()[1] >= 1
    trace.reset()
    assert all(statistic.num_tokens == 0 for statistic in trace.statistics.values()) and not trace.max_logits


def test_every_expert_chosen_needs_no_balance() -> None:
    """k = n: there is no (k+1)-th score and the bias stays zero."""
    model = K3.build(small_model(num_experts_per_token=4), seed=0)
    trace = BalanceTrace(model, BalanceConfig())
    trace.open()
    model.loss(random_batch(0), trace)
    trace.update()
    assert all(not router.bias.any() for router in trace.routers.values())


def test_state_round_trip_inside_a_step() -> None:
    """A half-counted step can be saved and goes on elsewhere."""
    model = K3.build(small_model(), seed=0)
    trace, copy = BalanceTrace(model, BalanceConfig(bins=50)), BalanceTrace(model, BalanceConfig(bins=50))
    trace.open()
    model.loss(random_batch(0), trace)
    copy.load_state_dict({name: value.clone() for name, value in trace.state_dict().items()})
    for layer, statistic in trace.statistics.items():
        other = copy.statistics[layer]
        assert isinstance(statistic, Histogram) and isinstance(other, Histogram)
        assert torch.equal(statistic.counts_EB, other.counts_EB)
        assert (statistic.low, statistic.width) == (other.low, other.width)


class Written(TorchDispatchMode):
    """Counts operations, and the numbers that they give."""

    num_calls = num_values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation."""
        result = func(*args, **(kwargs or {}))
        self.num_calls += 1
        self.num_values += sum(each.numel() for each in tree_leaves(result) if isinstance(each, torch.Tensor))
        return result


def test_counting_is_cheap() -> None:
    """A few numbers per score, and no loop over experts: far below the layer's own work."""
    num_calls = set()
    for experts in (32, 64):
        scores, bias = torch.rand(4096, experts), torch.zeros(experts)
        threshold = route(scores, bias, 4).threshold_T
        histogram = histogram_of(scores, bias, threshold)
        with Written() as written:
            histogram.add(scores, bias, threshold)
        assert 0 < written.num_values < 12 * scores.numel() + 4 * histogram.counts_EB.numel()
        num_calls.add(written.num_calls)
    assert len(num_calls) == 1 and max(num_calls) < 40
