"""Kernels of Attention Residuals on a GPU: against float64 at full width, the same bits each time, past 2^31 values."""

from __future__ import annotations

import os

import pytest
import torch
from kda_kernel_checks import errors, poisoned_memory, same_bits
from torch import Tensor

from openk3.ops.attn_res import inter_block, merge_normed, mix_depth, mix_depth_normed

pytestmark = pytest.mark.gpu
EPS = 1e-5
VECTORS = ("d_query", "d_norm_weight", "d_out_weight")


@pytest.fixture(params=["gluon", "triton"])
def twin(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both implementations; on anything but Hopper they are the same."""
    monkeypatch.setenv("OPENK3_GLUON", "1" if request.param == "gluon" else "0")
    return request.param


def draw(L: int, T: int, D: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Sources of very different sizes, what is still to be added, weights, and gradients of what comes out."""
    generator = torch.Generator("cuda").manual_seed(T + D + L)
    normal = lambda *shape: torch.randn(*shape, generator=generator, device="cuda")  # noqa: E731
    values = {"query": 0.05 * normal(D), "norm_weight": 1 + 0.1 * normal(D), "out_weight": 1 + 0.1 * normal(D)}
    values |= {f"v{i}": normal(T, D) * 4.0 ** (i % 4 - 2) for i in range(L)}
    values |= {"addend": normal(T, D), "d_normed": normal(T, D), "d_newest": normal(T, D)}
    return {name: x.to(dtype) for name, x in values.items()}


def everything(values: dict[str, Tensor], added: bool = True) -> dict[str, Tensor]:
    """Norm of the mixture, newest source, weights and all gradients."""
    leaves = {n: x.detach().clone().requires_grad_() for n, x in values.items() if not n.startswith("d_")}
    sources = [x for name, x in leaves.items() if name[0] == "v"]
    addend = leaves["addend"] if added else None
    weights = leaves["query"], leaves["norm_weight"], leaves["out_weight"]
    found = mix_depth_normed(sources, *weights, EPS, addend_TD=addend)
    outputs, upstream = [found.normed_TD], [values["d_normed"]]
    if added:
        outputs, upstream = [*outputs, found.newest_TD], [*upstream, values["d_newest"]]
    wanted = {name: x for name, x in leaves.items() if added or name != "addend"}
    grads = torch.autograd.grad(outputs, list(wanted.values()), upstream)
    results = {"normed": found.normed_TD.detach(), "newest": found.newest_TD.detach(), "probs": found.probs_TL}
    return results | dict(zip((f"d_{name}" for name in wanted), grads))


def exactly(values: dict[str, Tensor], added: bool = True) -> dict[str, Tensor]:
    """`everything` in float64; what is rounded before it is mixed is rounded here too."""
    wide = {name: x.double() for name, x in values.items()}
    if added:
        last = max(name for name in values if name[0] == "v")
        wide[last] = (values[last] + values["addend"]).double()
        wide["addend"] = torch.zeros_like(wide["addend"])
    return everything(wide, added)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "shape", [(9, 300, 7168), (2, 1031, 7168), (5, 33, 2560), (1, 7, 256), (10, 500, 1000), (3, 1, 300)]
)
def test_against_float64(shape: tuple[int, int, int], dtype: torch.dtype, twin: str, measured: list) -> None:
    """Results and gradients at the widths of recipes and odd ones, with and without a sum before.

    In bfloat16 a result costs its own roundings and nothing else: 2^-9 / sqrt(3) each for values spread evenly over
    powers of two, 1.7e-3 for normal ones. The norm has three (mixture, quotient, product), a gradient one.
    """
    for added in (True, False):
        values = draw(*shape, dtype)
        found = errors(everything(values, added), exactly(values, added))
        measured.append((twin, f"attn_res {shape} {str(dtype)[6:]} {'added' if added else ''}", found))
        for name, error in found.items():
            limit = 3.2e-3 if name == "normed" else 2.2e-3
            assert error < (limit if dtype == torch.bfloat16 else 5e-6), (name, found)


def test_mixture_alone(twin: str) -> None:
    """`mix_depth`, whose gradient needs no norm's."""
    values = draw(9, 200, 7168)
    results = []
    for kind in (torch.bfloat16, torch.float64):
        leaves = [
            values[name].to(kind).requires_grad_() for name in ("query", "norm_weight", *(f"v{i}" for i in range(9)))
        ]
        mixed, probs = mix_depth(leaves[2:], leaves[0], leaves[1], EPS)
        grads = torch.autograd.grad(mixed, leaves, values["d_normed"].to(kind))
        results.append({"mixed": mixed.detach(), "probs": probs} | {str(i): x for i, x in enumerate(grads)})
    found = errors(*results)
    assert max(found.values()) < 2.2e-3, found


def test_same_bits_every_time(twin: str) -> None:
    """Two runs, one of them amid NaN; and a token's results do not depend on the others."""
    values = draw(9, 700, 7168)
    want = everything(values)
    with poisoned_memory():
        assert same_bits(want, everything(values)) == []
    some = everything({name: x[300:333] if x.ndim == 2 else x for name, x in values.items()})
    for name, x in some.items():
        assert name in VECTORS or torch.equal(x, want[name][300:333]), name


def test_more_than_2_to_the_31_values(twin: str) -> None:
    """The last 64 of 300,100 tokens of width 7168 give what they give alone, gradients too."""
    T, alone = 300_100, draw(2, 64, 7168)
    whole = {name: x if x.ndim == 1 else x.new_zeros(T, 7168) for name, x in alone.items()}
    for name, x in alone.items():
        if x.ndim == 2:
            whole[name][-64:] = x
    want, got = everything(alone), everything(whole)
    for name, x in want.items():
        if name not in VECTORS:
            assert torch.equal(got[name][-64:], x), name
    assert max(errors({n: got[n] for n in VECTORS}, {n: want[n] for n in VECTORS}).values()) < 5e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_two_phases(dtype: torch.dtype, measured: list) -> None:
    """Phase one of 24 queries over eight blocks, and a merge with the sum before it and the norm after it.

    Sums of 7168 products are as good as those of float32 in both formats: no long sum is left to tensor cores.
    """
    values = draw(9, 333, 7168, dtype)
    sources = [values[f"v{i}"] for i in range(8)]
    vectors = 0.05 * torch.randn(24, 7168, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    with torch.no_grad():
        one = inter_block(sources, vectors, EPS)
        exact = inter_block([x.double() for x in sources], vectors.double(), EPS)
        named = lambda found: dict(zip(("o", "max", "sum"), found))  # noqa: E731
        found = errors(named(one), named(exact))
        measured.append(("phases", f"attn_res {str(dtype)[6:]}", found))
        assert max(found.values()) < 1e-5, found
        row, exact_row = (one[0][5], one[1][5], one[2][5]), (exact[0][5], exact[1][5], exact[2][5])
        weight, partial = values["out_weight"], values["v8"]
        normed, newest = merge_normed(row, partial, vectors[5], weight, eps=EPS, addend_TD=values["addend"])
        assert torch.equal(newest, partial + values["addend"])
        want, _ = merge_normed(exact_row, newest.double(), vectors[5].double(), weight.double(), eps=EPS)
    assert max(errors({"n": normed}, {"n": want}).values()) < (5e-3 if dtype == torch.bfloat16 else 5e-6)


def test_a_model_reads_depth_by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and gradients of a small model in float32: kernels against the definition, both on the GPU."""
    from openk3 import K3
    from openk3.inputs.packed import Packed
    from openk3.recipes import model as recipe

    assert os.environ.get("OPENK3_BACKEND") is None
    model = K3.build(recipe("tiny"), seed=1, device="cuda")
    packed = Packed.join([torch.arange(5, 60), torch.arange(9, 30)]).to("cuda")
    found = []
    for backend in ("reference", None):
        if backend:
            monkeypatch.setenv("OPENK3_BACKEND", backend)
        else:
            monkeypatch.delenv("OPENK3_BACKEND")
        model.zero_grad()
        loss = model.loss(packed).total
        loss.backward()
        gradients = [p.grad for query in model.depth_queries()[1:] for p in query.parameters()]
        queries = [x.clone() for x in gradients if x is not None]
        assert len(queries) == len(gradients)
        found.append({"loss": loss.detach()} | {str(n): x for n, x in enumerate(queries)})
    worst = errors(found[1], found[0])
    assert max(worst.values()) < 1e-3, worst
