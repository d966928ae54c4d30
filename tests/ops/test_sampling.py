"""Sampling: exact candidate sets, right frequencies, and every edge of the parameters."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import random
from torch import Tensor

from openk3.ops.sampling import sample


def seeded(seed: int = 0) -> torch.Generator:
    """A fresh generator."""
    return torch.Generator().manual_seed(seed)


def draws(logits_V: Tensor, count: int = 4000, **options: Any) -> Tensor:
    """Frequencies of each id among `count` independent rows."""
    ids_N = sample(logits_V.expand(count, -1), seeded(1), **options)
    return torch.bincount(ids_N, minlength=logits_V.shape[0]) / count


def candidates(logits: list[float], temperature: float, top_k: int, top_p: float) -> dict[int, float]:
    """The ids that may be drawn and their probabilities, by definition."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    order = [i for i in order[: top_k or None] if logits[i] > float("-inf")]
    weights = [math.exp((logits[i] - logits[order[0]]) / temperature) for i in order]
    kept, before = {}, 0.0
    for i, weight in zip(order, weights):
        if kept and top_p < 1 and before >= top_p:
            break
        kept[i] = weight
        before += weight / sum(weights)
    return {i: weight / sum(kept.values()) for i, weight in kept.items()}


@settings(max_examples=25)
@given(
    logits=st.lists(st.integers(-4, 4), min_size=1, max_size=7),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.integers(0, 8),
    top_p=st.sampled_from([0.0, 0.31, 0.77, 0.999, 1.0]),
)
def test_frequencies(logits: list[int], temperature: float, top_k: int, top_p: float) -> None:
    """Exactly the allowed ids come up, with their probabilities (6 standard deviations)."""
    wanted = candidates([float(x) for x in logits], temperature, top_k, top_p)
    got = draws(torch.tensor(logits, dtype=torch.float64), temperature=temperature, top_k=top_k, top_p=top_p)
    for i, frequency in enumerate(got.tolist()):
        probability = wanted.get(i, 0.0)
        assert probability > 0 or frequency == 0
        assert abs(frequency - probability) <= 6 * math.sqrt(probability * (1 - probability) / 4000) + 1e-9


def test_greedy() -> None:
    """Temperature 0: the largest logit, the lowest id among equals, and nothing is drawn."""
    logits_NV = torch.tensor([[1.0, 3.0, 3.0], [5.0, 5.0, 5.0], [-float("inf"), -2.0, -3.0]])
    generator = seeded()
    state = generator.get_state()
    assert sample(logits_NV, generator, temperature=0).tolist() == [1, 0, 1]
    assert torch.equal(generator.get_state(), state)
    assert sample(logits_NV, None, temperature=0, top_k=2, top_p=0.1).tolist() == [1, 0, 1]
    for options in ({"top_k": 1}, {"top_p": 0.0}, {"temperature": 1e-30}):
        assert sample(logits_NV[::2], seeded(), **options).tolist()[1] == 1
    assert sample(logits_NV, seeded(), top_k=1).tolist() == [1, 0, 1]


def test_reproducible_and_one_number_per_row() -> None:
    """The same seed gives the same ids; a row's draw does not depend on its parameters or its neighbours' logits."""
    logits_NV = random(50, 30, seed=1)
    first = sample(logits_NV, seeded(3), temperature=0.9, top_p=0.8)
    assert torch.equal(first, sample(logits_NV, seeded(3), temperature=0.9, top_p=0.8))
    other_NV = logits_NV.clone()
    other_NV[::2] += random(25, 30, seed=2)
    assert torch.equal(sample(other_NV, seeded(3), temperature=0.9, top_p=0.8)[1::2], first[1::2])
    generators = [seeded(4), seeded(4)]
    for generator, options in zip(generators, ({"temperature": 2.0}, {"top_k": 3, "top_p": 0.5})):
        sample(logits_NV, generator, **options)
    assert torch.equal(generators[0].get_state(), generators[1].get_state())


def test_one_parameter_set_per_row() -> None:
    """Each row may have its own temperature, top-k and top-p, greedy rows among them."""
    logits_V = torch.tensor([0.0, 1.0, 2.0, 3.0])
    rows = 3000
    temperature = torch.tensor([0.0, 1.0, 2.0]).repeat(rows)
    top_k, top_p = torch.tensor([0, 2, 0]).repeat(rows), torch.tensor([1.0, 1.0, 0.5]).repeat(rows)
    ids_N = sample(logits_V.expand(3 * rows, 4), seeded(5), temperature=temperature, top_k=top_k, top_p=top_p)
    assert (ids_N[::3] == 3).all()
    assert set(ids_N[1::3].tolist()) == {2, 3}
    assert set(ids_N[2::3].tolist()) == set(candidates(logits_V.tolist(), 2.0, 0, 0.5))
    assert abs((ids_N[1::3] == 3).double().mean().item() - 1 / (1 + math.exp(-1))) < 0.05


def test_forbidden_ids_are_never_drawn() -> None:
    """A logit of -inf has no chance, not even when the largest number below 1 is drawn."""
    logits_V = torch.full((40,), float("-inf"))
    logits_V[[3, 17]] = torch.tensor([0.0, -80.0])
    for options in ({}, {"top_k": 30}, {"top_p": 0.9999}):
        assert draws(logits_V, **options)[3] == 1

    class Largest:
        """Replaces torch.rand: the last number below 1."""

        def __call__(self, *shape: int, **_: Any) -> Tensor:
            return torch.full(shape, 1 - 2.0**-53, dtype=torch.float64)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "rand", Largest())
        for seed in range(50):
            row_V = torch.cat((random(9, seed=seed), torch.full((4,), float("-inf"), dtype=torch.float64)))
            assert sample(row_V.unsqueeze(0), None).item() < 9
            assert sample(row_V.unsqueeze(0), None, top_k=5).item() in candidates(row_V.tolist(), 1.0, 5, 1.0)


def test_large_logits_at_low_temperature() -> None:
    """No overflow: the difference to the largest logit is divided, not the logit itself."""
    logits_NV = torch.tensor([[3e38, 2e38, -3e38]])
    assert sample(logits_NV, seeded(), temperature=1e-3).item() == 0
    assert sample(torch.zeros(2, 5, dtype=torch.bfloat16), seeded(), temperature=0.7).shape == (2,)
    assert sample(torch.zeros(0, 5), seeded()).shape == (0,)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_refuses_broken_logits(bad: float) -> None:
    """NaN, +inf, or nothing to choose: the row is named."""
    logits_NV = torch.zeros(3, 4)
    logits_NV[2, 1] = bad
    for temperature in (0.0, 1.0):
        with pytest.raises(ValueError, match="row 2"):
            sample(logits_NV, seeded(), temperature=temperature)
    logits_NV[1] = float("-inf")
    with pytest.raises(ValueError, match="row 1"):
        sample(logits_NV, seeded())


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -0.1), ("temperature", float("nan")), ("top_k", -1), ("top_p", 1.1), ("top_p", -0.1)],
)
def test_refuses_bad_parameters(name: str, value: float) -> None:
    """Each parameter's name and range."""
    with pytest.raises(ValueError, match=f"{name}: must lie between 0"):
        sample(torch.zeros(2, 4), seeded(), **{name: value})
    with pytest.raises(ValueError, match=f"{name}: expected one number or one per row"):
        sample(torch.zeros(2, 4), seeded(), **{name: torch.ones(3)})


def test_a_row_does_not_depend_on_the_others() -> None:
    """The same number draws the same id alone, and beside rows that are greedy, cut or neither."""
    logits_NV = torch.randn(12, 9, generator=seeded(5))
    uniform_N = torch.rand(12, generator=seeded(6), dtype=torch.float64)
    options = {
        "temperature": torch.tensor([0, 0.5, 1, 2] * 3),
        "top_k": torch.tensor([0, 0, 4] * 4),
        "top_p": torch.tensor([1, 1, 1, 0.7, 1, 1] * 2),
    }
    together = sample(logits_NV, None, uniform_N=uniform_N, **options)
    for n in range(12):
        row = slice(n, n + 1)
        alone = sample(logits_NV[row], None, uniform_N=uniform_N[row], **{k: v[row] for k, v in options.items()})
        assert alone == together[row]
    drawn = torch.cat([sample(logits_NV[1:2], None, uniform_N=torch.tensor([u / 64])) for u in range(64)])
    assert torch.equal(drawn, drawn.sort().values) and len(drawn.unique()) > 3


@pytest.mark.parametrize("uniform", [[0.5], [0.5, 1.0], [-0.1, 0.5], [0.5, float("nan")]])
def test_numbers_out_of_range_are_refused(uniform: list[float]) -> None:
    """One per row, from 0 to below 1."""
    with pytest.raises(ValueError, match="uniform_N: expected 2 numbers"):
        sample(torch.zeros(2, 3), None, uniform_N=torch.tensor(uniform))
