"""The roofline counts the same FLOPs as the books, and its bytes by hand for one operation."""

from __future__ import annotations

import dataclasses

import pytest

from openk3 import recipes
from openk3.model.accounting import account
from openk3.model.roofline import H200, WEIGHT_BYTES, Operation, roofline


@pytest.mark.parametrize("name", recipes.NAMES)
@pytest.mark.parametrize("length", [1024, 65536])
def test_flops_are_those_of_the_books(name: str, length: int) -> None:
    """All operations together, within the vectors that have no operation of their own."""
    config = recipes.model(name)
    found = roofline(config, length=length)
    assert found.model_flops == account(config).training_flops(length).total
    tolerance = {"tiny": 1e-2, "pocket": 5e-3}.get(name, 2e-3)
    assert sum(operation.flops for operation in found.operations) == pytest.approx(found.model_flops, rel=tolerance)


def test_without_mtp_shared_experts_and_gates() -> None:
    """Parts that a configuration lacks cost nothing."""
    config = recipes.model("small")
    text = dataclasses.replace(config.text, num_nextn_predict_layers=0, num_shared_experts=0, mla_use_output_gate=False)
    config = dataclasses.replace(config, text=text, vision=None)
    found = roofline(config)
    assert not {"MTP projection", "shared experts"} & {operation.name for operation in found.operations}
    assert sum(operation.flops for operation in found.operations) == pytest.approx(found.model_flops, rel=2e-3)


def test_bytes_of_one_operation() -> None:
    """The head of small: logits five times, hidden states and their gradients six times, weights once a micro-batch."""
    found = roofline(recipes.model("small"), micro_batch=1000)
    head = next(operation for operation in found.operations if operation.name == "head and loss")
    once = 2 * (5 * 32768 + 6 * 768) + WEIGHT_BYTES * 32768 * 768 / 1000
    assert head.bytes == pytest.approx(2 * once)  # the MTP layer reads the head, too
    assert head.flops == 2 * 6 * 32768 * 768


def test_larger_micro_batches_move_fewer_bytes() -> None:
    """And the time of a token falls towards that of the activations; the bound of utilisation lies below 1."""
    times = [roofline(recipes.model("medium"), micro_batch=n).seconds() for n in (1024, 8192, 65536)]
    assert times[0] > times[1] > times[2]
    assert 0.3 < roofline(recipes.model("small")).mfu() < roofline(recipes.model("medium")).mfu() < 0.71


def test_what_binds() -> None:
    """The slower of both."""
    assert (Operation("x", 7e12, 1.0).seconds(H200), Operation("x", 7e12, 1.0).binds(H200)) == (0.01, "FLOPs")
    assert Operation("x", 1.0, 4.28e9).seconds(H200) == pytest.approx(1e-3)
    assert Operation("x", 1.0, 4.28e9).binds(H200) == "bytes"
