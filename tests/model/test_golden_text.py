"""Golden text models: forward, states, decoding, left padding and gradients, in float32 and float64."""

from __future__ import annotations

import pytest
import torch
from golden_checks import (
    DTYPES,
    GOLDEN,
    TEXT_MODELS,
    Golden,
    check_decode,
    check_forward,
    check_leftpad,
    check_logits,
    golden,
)
from safetensors.torch import load_file

from openk3.model.hf_names import units

each_model = pytest.mark.parametrize("name", TEXT_MODELS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])


@each_dtype
@each_model
def test_full_forward(name: str, dtype: torch.dtype) -> None:
    """Two sequences of 37 tokens: logits, loss, block sums, depth weights, routes and final states."""
    check_forward(golden(name, dtype), "full")
    check_logits(golden(name, dtype), "full")


@each_dtype
@pytest.mark.parametrize("name", ["text_a", "text_b"])
def test_long_forward(name: str, dtype: torch.dtype) -> None:
    """150 tokens: two chunk borders of the chunkwise form."""
    check_forward(golden(name, dtype), "long")


@each_dtype
@each_model
def test_decoding(name: str, dtype: torch.dtype) -> None:
    """Prefill of 21 tokens, then 9 single tokens from the cache."""
    check_decode(golden(name, dtype))


@each_dtype
@each_model
def test_left_padding(name: str, dtype: torch.dtype) -> None:
    """Rows of 5, 12 and 19 tokens, padded on the left."""
    check_leftpad(golden(name, dtype))


@each_dtype
def test_gradients(dtype: torch.dtype) -> None:
    """Every parameter's gradient of the loss, released names; no other parameter gets one."""
    case = Golden("text_a", dtype)
    case.model.loss(case.packed("full")).total.backward()
    want = load_file(GOLDEN / "text_a" / "grads.safetensors")
    parameters, found = dict(case.model.named_parameters()), set()
    for tensor in [tensor for unit in units(case.model.config) for tensor in unit.tensors]:
        parameter = parameters.get(tensor.ours)
        got = None if parameter is None else parameter.grad
        if got is not None and tensor.expert is not None:
            got = got[tensor.expert]
        if tensor.released not in want:
            assert got is None or not got.any(), tensor.released
            continue
        assert got is not None, tensor.released
        expected = want[tensor.released]
        size = float(expected.abs().max())
        close = (
            {"atol": 1e-6 + 1e-6 * size, "rtol": 1e-6} if dtype == torch.float64 else {"atol": 1e-4 * size, "rtol": 0}
        )
        torch.testing.assert_close(
            got.reshape(expected.shape).double(), expected.double(), **close, msg=tensor.released
        )
        found.add(tensor.released)
    assert found == set(want)
