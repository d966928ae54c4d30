"""Kimi Delta Attention by kernels with all gradients, in Triton's interpreter, against the recurrence in float64."""

from __future__ import annotations

import gc

import pytest
import torch
from kda_checks import NAMES, kda_inputs, run, run_with_gradients
from torch import Tensor
from torch.autograd import forward_ad

from openk3.ops import KdaGate, recurrent_kda
from openk3.ops.kda import fused_backward, workspace
from openk3.ops.kda.fused import Plan
from openk3.ops.kda.fused_backward import checkpointed_kda, fused_kda
from openk3.ops.kda.tiles import tile_table

LENGTHS = [33, 0, 7, 70, 0]


def narrow(inputs: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Tokens in this format, parameters and states in float32."""
    return {name: x.to(dtype if name in NAMES[:5] else torch.float32) for name, x in inputs.items()}


def assert_near(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    """Every value and gradient, by the norm of its error relative to its own."""
    assert got.keys() == want.keys()
    for name, expected in want.items():
        assert got[name].isfinite().all(), name
        assert (got[name].double() - expected).norm() <= tolerance * expected.norm(), name


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_packed_sequences(dtype: torch.dtype, tolerance: float) -> None:
    """Values, states and all eight gradients of packed sequences, empty ones among them, with a state in and out."""
    inputs = narrow(kda_inputs(LENGTHS, H=2, K=16, V=32), dtype)
    want = run_with_gradients(recurrent_kda, {n: x.double() for n, x in inputs.items()}, LENGTHS)
    assert_near(run_with_gradients(fused_kda, inputs, LENGTHS), want, tolerance)


def test_without_state() -> None:
    """One sequence that starts from nothing, only its outputs used."""
    inputs = narrow(kda_inputs([50], H=2, K=16, V=16), torch.float32)
    del inputs["state"]
    grads = []
    for op, values in ((fused_kda, inputs), (recurrent_kda, {n: x.double() for n, x in inputs.items()})):
        leaves = {name: x.clone().requires_grad_() for name, x in values.items()}
        loss = run(op, leaves)[0].square().sum()
        grads.append(dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())))))
    assert_near(*grads, 1e-5)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    ("tiles", "dtype", "few"),
    [(1, torch.float32, 0), (3, torch.float32, 0), (3, torch.bfloat16, 0), (3, torch.bfloat16, 100)],
)
def test_slabs(monkeypatch: pytest.MonkeyPatch, tiles: int, dtype: torch.dtype, few: int, split: bool) -> None:
    """However few tiles a slab has, and whether or not parts are scanned at once: gradients of the recurrence.

    In bfloat16 without and with what few heads keep in two parts.
    """
    monkeypatch.setattr(fused_backward, "SLAB_TILES", 2 * tiles)
    monkeypatch.setattr(workspace, "FEW_TILES", few)

    def plan(bounds: tuple[int, ...], q: Tensor, checkpoints: tuple[int, ...], keep: bool) -> Plan:
        assert keep
        part_tiles = max(1, tiles // 2) if split else tiles
        return Plan(tile_table(bounds, q.device, checkpoints=checkpoints, part_tiles=part_tiles), split)

    monkeypatch.setattr(fused_backward, "_plan", plan)
    lengths = [33, 0, 7, 170, 0]
    inputs = narrow(kda_inputs(lengths, H=2, K=16, V=16), dtype)
    want = run_with_gradients(recurrent_kda, {n: x.double() for n, x in inputs.items()}, lengths)
    assert_near(run_with_gradients(fused_kda, inputs, lengths), want, 1e-5 if dtype == torch.float32 else 1e-2)


def test_same_bits_twice() -> None:
    """Nothing depends on the order in which programs run."""
    inputs = narrow(kda_inputs(LENGTHS, H=2, K=16, V=16), torch.bfloat16)
    first, second = (run_with_gradients(fused_kda, inputs, LENGTHS) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_no_tokens(lengths: list[int]) -> None:
    """No token at all, or no sequence: states and their gradients pass through."""
    inputs = narrow(kda_inputs(lengths, H=2, K=16, V=16), torch.float32)
    got = run_with_gradients(fused_kda, inputs, lengths)
    assert got["o"].shape == (0, 2, 16) and torch.equal(got["final"], inputs["state"])
    assert got["d_state"].shape == inputs["state"].shape and not got["d_A_log"].any()


def test_without_gradients() -> None:
    """Under no_grad the same bits, and nothing is kept; checkpoints are the states of the sequences cut there."""
    inputs = narrow(kda_inputs([70, 40], H=2, K=16, V=16), torch.float32)
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    o, state = run(fused_kda, leaves, [70, 40])
    assert o.requires_grad and state.requires_grad
    with torch.no_grad():
        again, state_again = run(fused_kda, leaves, [70, 40])
        assert torch.equal(again, o) and torch.equal(state_again, state) and not again.requires_grad
        q, k, v, z, beta, A_log, dt_bias, first = (inputs[name] for name in NAMES)
        gate, cu_seqlens = KdaGate(A_log, dt_bias), torch.tensor([0, 70, 110], dtype=torch.int32)
        tokens, positions = (q, k, v, z, beta), (20, 64, 70, 90)
        _, _, states = checkpointed_kda(tokens, gate, positions, state_NHKV=first, cu_seqlens=cu_seqlens)
        for row, (start, end, n) in zip(states, ((0, 20, 0), (0, 64, 0), (0, 70, 0), (70, 90, 1))):
            part = (x[start:end] for x in (q, k, v, z, beta))
            torch.testing.assert_close(row, recurrent_kda(*part, gate, state_NHKV=first[n : n + 1])[1][0])


def test_gradients_with_checkpoints() -> None:
    """Tiles cut at checkpoints give the same gradients."""
    inputs = narrow(kda_inputs([70], H=1, K=16, V=16), torch.float32)

    def cut(*arguments: Tensor, **named: Tensor) -> tuple[Tensor, Tensor]:
        o, state, checkpoints = checkpointed_kda(arguments[:5], arguments[5], (5, 37), **named)
        assert not checkpoints.requires_grad
        return o, state

    want = run_with_gradients(recurrent_kda, {n: x.double() for n, x in inputs.items()})
    assert_near(run_with_gradients(cut, inputs), want, 1e-4)


def test_frozen_gate_and_frozen_tokens() -> None:
    """Gradients come whether the gate's parameters or only they are trained."""
    inputs = narrow(kda_inputs([40], H=2, K=16, V=16), torch.float32)
    want = run_with_gradients(fused_kda, inputs)
    generator = torch.Generator().manual_seed(99)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in (want["o"], want["final"])]
    for trained in (NAMES[5:7], NAMES[:5]):
        leaves = {name: x.clone().requires_grad_(name in trained) for name, x in inputs.items()}
        loss = sum((x.double() * w).sum() for x, w in zip(run(fused_kda, leaves), weights))
        grads = torch.autograd.grad(loss, [leaves[name] for name in trained])
        for name, grad in zip(trained, grads):
            assert torch.equal(grad, want[f"d_{name}"]), name


def test_memory_is_freed_by_the_backward_pass() -> None:
    """Autograd holds the inputs and the states entering parts, nothing else, until it has used them."""
    inputs = narrow(kda_inputs([100], H=2, K=16, V=16), torch.float32)
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}

    def values() -> int:
        gc.collect()
        tensors = [x for x in gc.get_objects() if type(x) is Tensor and x.is_floating_point()]
        return sum({x.untyped_storage().data_ptr(): x.numel() for x in tensors}.values())

    torch.autograd.grad(run(fused_kda, leaves)[0].sum(), list(leaves.values()))
    before = values()
    o, state = run(fused_kda, leaves)
    assert values() - before == o.numel() + state.numel()


def test_refusals() -> None:
    """A gate without a bound, and shapes that do not fit, are named."""
    inputs = narrow(kda_inputs([5], H=1, K=16, V=16), torch.float32)
    with pytest.raises(ValueError, match="lower bound"):
        run(fused_kda, inputs, bound=None)
    with pytest.raises(ValueError, match="v_THV"):
        run(fused_kda, inputs | {"v": inputs["v"][:4]})


REFUSED = {
    "float64": (
        {n: x.double() for n, x in kda_inputs([5], K=16, V=16).items()},
        "for this: q_THK is torch.float64",
    ),
    "channels": (kda_inputs([5], K=24, V=16, dtype=torch.float32), "24 and 16 channels"),
    "heads of A_log": ({"A_log": torch.zeros(1)}, "A_log_H must be"),
    "flat biases": ({"dt_bias": torch.zeros(32)}, "dt_bias_HK must be"),
    "integer A_log": ({"A_log": torch.zeros(2, dtype=torch.int64)}, "A_log_H must be floating point"),
    "gate elsewhere": ({"dt_bias": torch.zeros(2, 16, device="meta")}, "floating point on cpu"),
    "keys elsewhere": ({"k": torch.zeros(5, 2, 16, device="meta")}, "k_THK: on meta"),
    "state elsewhere": ({"state": torch.zeros(1, 2, 16, 16, device="meta")}, "state_NHKV: must be .* on cpu"),
    "complex state": ({"state": torch.zeros(1, 2, 16, 16, dtype=torch.complex64)}, "must be floating point"),
    "no head": (kda_inputs([5], H=0, K=16, V=16, dtype=torch.float32), "needs a head"),
    "no channel": (kda_inputs([5], K=16, V=0, dtype=torch.float32), "needs a head and a channel"),
    "eight bits": ({"q": torch.zeros(5, 2, 16).to(torch.float8_e4m3fn)}, "of 16 bits or more"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_kernels_read_nothing_that_does_not_fit(name: str) -> None:
    """What kernels would read past its end, or in a format that they lack, is refused before they run."""
    change, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        run(fused_kda, kda_inputs([5], K=16, V=16, dtype=torch.float32) | change)


def test_checkpoints_in_any_sequence() -> None:
    """A list or a tensor of positions is as good as a tuple; what is no position is named."""
    q, k, v, z, beta, A_log, dt_bias, _ = kda_inputs([5], K=16, V=16, dtype=torch.float32).values()
    given = ((q, k, v, z, beta), KdaGate(A_log, dt_bias))
    want = checkpointed_kda(*given, (2, 5))[2]
    assert len(want) == 2
    for positions in ([2, 5], torch.tensor([2, 5])):
        assert torch.equal(checkpointed_kda(*given, positions)[2], want)
    with pytest.raises(ValueError, match="checkpoints: expected whole numbers"):
        checkpointed_kda(*given, [2.0])


def test_forward_derivatives_are_not_lost() -> None:
    """Kernels have none: they say so, where they once returned values without."""
    q, k, v, z, beta, A_log, dt_bias, _ = kda_inputs([5], K=16, V=16, dtype=torch.float32).values()
    with forward_ad.dual_level(), pytest.raises(ValueError, match="no forward-mode derivatives"):
        fused_kda(forward_ad.make_dual(q, q), k, v, z, beta, KdaGate(A_log, dt_bias))
