"""Two-phase reads of depth in training, in Triton's interpreter: against the definition in float64, all gradients."""

from __future__ import annotations

import pytest
import torch
from op_checks import random
from torch import Tensor

from openk3.ops.attn_res import mix_depth_normed
from openk3.ops.attn_res_join_fused import begin_reads, join, obstacle

EPS = 1e-5


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The public calls run the kernels."""
    monkeypatch.setenv("OPENK3_BACKEND", "triton")


def draw(
    L: int, T: int, D: int, Q: int, dtype: torch.dtype = torch.float32, device: str = "cpu", query: float = 1.0
) -> list[Tensor]:
    """Three vectors for each read, blocks of very different sizes, the running one, and what each sub-layer adds."""
    vectors = [random(D, seed=s) * (query if s < Q else 1.0) for s in range(3 * Q)]
    rows = [random(T, D, seed=100 + i) * 4.0 ** (i % 4 - 2) for i in range(L)]
    return [x.to(device, dtype) for x in (*vectors, *rows, *(random(T, D, seed=200 + i) for i in range(Q)))]


def results(inputs: list[Tensor], L: int, Q: int, phases: bool) -> list[Tensor]:
    """Norms that a block's reads give, and gradients of a combination of them.

    What a read gives enters the block after it, as it does in a model.
    """
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    queries, norms, outs = leaves[:Q], leaves[Q : 2 * Q], leaves[2 * Q : 3 * Q]
    blocks, (partial, *adds) = leaves[3 * Q : 3 * Q + L], leaves[3 * Q + L :]
    reads = begin_reads(blocks, list(zip(queries, norms)), EPS) if phases else []
    found: list[Tensor] = []
    addend = None
    for n in range(Q):
        if phases:
            normed, partial = join(reads[n], outs[n], EPS, partial, addend)
        else:
            mixed = mix_depth_normed([*blocks, partial], queries[n], norms[n], outs[n], EPS, addend_TD=addend)
            normed, partial = mixed.normed_TD, mixed.newest_TD
        found.append(normed)
        addend = torch.sin(normed) + adds[n] if n < Q - 1 else None
    factors = [random(*x.shape, seed=40 + n).bfloat16().to(x) for n, x in enumerate(found)]
    return [*found, *torch.autograd.grad(found, leaves, factors)]


def definition(inputs: list[Tensor], L: int, Q: int) -> list[Tensor]:
    """`results` of single reads in float64 on the PyTorch path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENK3_BACKEND", "reference")
        return results([x.double() for x in inputs], L, Q, False)


def apart(inputs: list[Tensor], L: int, Q: int) -> tuple[list[float], list[float]]:
    """Norm ratios of all results against float64: of single reads, of joined ones."""
    want, errors = definition(inputs, L, Q), ([], [])
    for phases in (False, True):
        for a, b in zip(results(inputs, L, Q, phases), want, strict=True):
            errors[phases].append(float(((a - b).norm() / b.norm()).detach()))
    return errors


@pytest.mark.parametrize(("L", "T", "D", "Q"), [(1, 2, 5, 2), (2, 7, 40, 2), (5, 3, 16, 4), (9, 1, 40, 3)])
def test_equals_the_definition(L: int, T: int, D: int, Q: int) -> None:
    """Norms and every gradient, those of blocks, of what is added to the running one, and of all vectors."""
    inputs = draw(L, T, D, Q)
    for a, b in zip(results(inputs, L, Q, True), definition(inputs, L, Q), strict=True):
        assert a.dtype == torch.float32 and a.shape == b.shape
        torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-5 * max(1.0, float(b.detach().abs().max())))


def test_bfloat16_is_as_close_as_single_reads() -> None:
    """Two more roundings beside two, of mixtures and of their gradients, and none that queries or small blocks feel."""
    inputs = draw(4, 4, 256, 3, torch.bfloat16)
    want = definition(inputs, 4, 3)
    apart = [
        [float(((a - b).norm() / b.norm()).detach()) for a, b in zip(results(inputs, 4, 3, x), want)] for x in (0, 1)
    ]
    for single, phases in zip(*apart, strict=True):
        assert phases < max(1.3 * single, 3.5e-3), apart


def test_reads_that_nothing_comes_of() -> None:
    """Reads whose results are not used have no gradients, the others are as ever; a block may be frozen."""
    L, Q = 3, 3
    inputs = draw(L, 4, 16, Q)
    leaves = [x.clone().requires_grad_() for x in inputs]
    blocks = leaves[3 * Q : 3 * Q + L]
    blocks[1] = blocks[1].detach()
    reads = begin_reads(blocks, list(zip(leaves[:Q], leaves[Q : 2 * Q])), EPS)
    partial = leaves[-1]
    normed, newest = join(reads[1], leaves[2 * Q], EPS, partial)
    assert newest is partial
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        got = torch.autograd.grad(
            normed.sum(), [blocks[0], blocks[2], leaves[1], leaves[0], partial], allow_unused=True
        )
    finally:
        torch.use_deterministic_algorithms(False)
    wide = [x.detach().double().requires_grad_() for x in (*leaves[3 * Q : 3 * Q + L], partial, leaves[1])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENK3_BACKEND", "reference")
        norm, out = leaves[Q + 1].detach().double(), leaves[2 * Q].detach().double()
        found = mix_depth_normed(wide[:4], wide[4], norm, out, EPS)
    want = torch.autograd.grad(found.normed_TD.sum(), [wide[0], wide[2], wide[4], wide[3]])
    for a, b in zip((got[0], got[1], got[2], got[4]), want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-5)
    assert got[3] is not None and not got[3].any()


def test_no_tokens_and_what_cannot_be() -> None:
    """Empty results with gradients; two joins of one read are refused; limits."""
    inputs = draw(2, 0, 8, 2)
    got = results(inputs, 2, 2, True)
    assert [tuple(x.shape) for x in got[:2]] == [(0, 8), (0, 8)] and not any(x.any() for x in got[2:])
    *vectors, block, partial = (x.requires_grad_() for x in draw(1, 1, 8, 1))
    (read,) = begin_reads([block], [(vectors[0], vectors[1])], EPS)
    twice = join(read, vectors[2], EPS, partial)[0] + join(read, vectors[2], EPS, partial)[0]
    with pytest.raises(RuntimeError, match="each of its reads is for one join"):
        twice.sum().backward()
    assert obstacle([block], 2) is None and obstacle([block] * 17, 2) == "17 blocks and 2 reads, not 1 to 16 and 32"
    assert obstacle([block, block.double()], 2) == "blocks have several formats"
