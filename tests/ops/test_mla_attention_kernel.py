"""The kernels of causal attention in Triton's interpreter, against the definition in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mla_checks import Case, Found, errors
from torch import Tensor

from openk3.config.model import ConfigError
from openk3.ops.mla import attention_fused, attention_gradient_kernel, attention_kernel
from openk3.ops.mla.attention_kernel import Settings
from openk3.ops.mla.reference import joint_attention, mla_attention


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The public calls run the kernels, with blocks so small that sequences take several."""
    monkeypatch.setenv("OPENK3_BACKEND", "triton")
    monkeypatch.setattr(attention_kernel, "settings", lambda *_: Settings(16, 16, 4, 1))
    small = {"scores": Settings(16, 32, 4, 1)} | dict.fromkeys(("keys", "queries"), Settings(32, 32, 4, 1))
    monkeypatch.setattr(attention_gradient_kernel, "settings", lambda *_: small)


def definition(case: Case, values: Found) -> Found:
    """In float64 on the PyTorch path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENK3_BACKEND", "reference")
        return case.run({name: x.double() for name, x in values.items()})


def check(case: Case, limit: float) -> None:
    """Everything within `limit` of float64's."""
    values = case.draw()
    got = case.run(values)
    assert got["o"].dtype == torch.float32 and got["d_q"].dtype == case.dtype
    found = errors(got, definition(case, values))
    assert max(found.values()) < limit, found


@settings(max_examples=6)
@given(
    pairs=st.lists(st.tuples(st.sampled_from([0, 1, 15, 33, 40]), st.sampled_from([0, 1, 31, 50])), max_size=3),
    joint=st.booleans(),
)
def test_equals_the_definition(pairs: list[tuple[int, int]], joint: bool) -> None:
    """Sequences empty, of one token, with and without earlier keys, across the borders of tiles."""
    check(Case(tuple(new for new, _ in pairs), tuple(old for _, old in pairs), joint=joint), 2e-6)


@pytest.mark.parametrize("widths", [(16, 16, 16), (128, 64, 128), (5, 0, 3), (24, 8, 20)], ids=str)
def test_widths(widths: tuple[int, int, int]) -> None:
    """Those of the models, keys in one part, and odd ones."""
    own, shared, V = widths
    check(Case((33,), (9,), own=own, shared=shared, V=V, joint=shared > 0), 2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    """Products of rounded probabilities and score gradients: errors of a few thousandths, output in float32."""
    check(Case((40, 7), (0, 20), dtype=dtype), 6e-3 if dtype == torch.bfloat16 else 1e-3)


def test_slabs_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One head at a time, or a head cut between its key tiles: the same bits for keys and values, sums for queries."""
    case = Case((70, 20), (5, 0))
    values = case.draw()
    whole = case.run(values)
    monkeypatch.setattr(attention_fused, "_multiprocessors", lambda device: 1)
    for tiles in (6, 2):
        monkeypatch.setattr(attention_fused, "ROOM", tiles * 32 * 32 * 4)
        got = case.run(values)
        assert all(torch.equal(got[name], whole[name]) for name in ("o", "d_kv", "d_shared"))
        torch.testing.assert_close(got["d_q"], whole["d_q"], rtol=1e-5, atol=1e-6)


def test_same_bits_and_nothing_read_that_nobody_wrote() -> None:
    """Twice the same, with NaN in fresh memory the second time; strides of any kind."""
    case = Case((50, 3), (0, 20), joint=False)
    values = case.draw()
    want = case.run(values)
    apart = {name: x.transpose(0, 1).contiguous().transpose(0, 1) for name, x in values.items()}
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            patch.setattr(owner, name, poisoned(getattr(owner, name)))
        got = case.run(apart)
    assert all(torch.equal(got[name], want[name]) for name in want)


def poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same, with NaN in floating-point memory."""

    def allocate_nan(*args: Any, **options: Any) -> Tensor:
        found = allocate(*args, **options)
        return found.fill_(float("nan")) if found.is_floating_point() else found

    return allocate_nan


def test_sequences_and_time_are_kept_apart() -> None:
    """What comes later, or belongs to another sequence, changes not a bit; gradients included."""
    case = Case((30, 35), (7, 0))
    values = case.draw()
    want = case.run(values)
    alone = dataclasses.replace(case, new=(30,), old=(7,))
    first = {name: x[: 37 if name in ("kv", "shared") else 30] for name, x in values.items()}
    got = alone.run(first)
    for name in ("o", "d_q", "d_kv", "d_shared"):
        assert torch.equal(got[name], want[name][: len(got[name])])
    later = {name: x.clone() for name, x in values.items()}
    for name, at in (("q", 50), ("kv", 57), ("shared", 57)):
        later[name][at:] += 3
    assert torch.equal(case.run(later)["o"][:50], want["o"][:50])


def test_large_scores() -> None:
    """Scores far beyond what 2^x holds: one key takes all."""
    case = Case((20,), (0,), joint=False)
    values = case.draw()
    values["q"], values["k"] = values["q"] * 100, values["k"] * 100
    found = errors(case.run(values), definition(case, values))
    assert found["o"] < 1e-4 and found["peaks"] < 1e-6


def test_what_the_kernels_do_not_take() -> None:
    """Too many channels, scales that are not positive, formats that differ: said clearly if kernels are forced."""
    q, k, v = torch.ones(4, 1, 200), torch.ones(4, 1, 200), torch.ones(4, 1, 16)
    cu = torch.tensor([0, 4])
    with pytest.raises(ConfigError, match="200 channels of keys and 16 of values; they take up to 192 and 128"):
        mla_attention(q, k, v, cu, scale=1.0)
    with pytest.raises(ConfigError, match="the scale is -1.0, not positive"):
        mla_attention(q[..., :16], k[..., :16], v, cu, scale=-1.0)
    with pytest.raises(ConfigError, match="queries, keys and values differ in format or device"):
        mla_attention(q[..., :16], k[..., :16], v.bfloat16(), cu, scale=1.0)
    with pytest.raises(ValueError, match="joint_attention: queries, keys and values, shared keys of shapes"):
        joint_attention(q, v, torch.ones(4, 200), cu, scale=1.0)
