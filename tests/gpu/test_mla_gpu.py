"""Attention of Gated MLA on a GPU: values and gradients against float64, the same bits each time, past 2^31 values."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from kda_kernel_checks import poisoned_memory, same_bits
from mla_checks import Case, errors
from torch import Tensor

from openk3.ops.mla.latent_decode import LatentPages, latent_attention, plan_latents
from openk3.ops.mla.reference import absorbed_attention, joint_attention, mla_attention

pytestmark = pytest.mark.gpu
K3 = {"own": 128, "shared": 64, "V": 128}
SMALL = {"own": 64, "shared": 32, "V": 64}
BFLOAT16 = {"o": 4e-3, "peaks": 1e-5} | {f"d_{name}": 1e-2 for name in ("q", "kv", "shared", "k", "v")}
NAN = float("nan")


@pytest.fixture(params=["gluon", "triton"])
def twin(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both implementations; on anything but Hopper they are the same."""
    monkeypatch.setenv("OPENK3_GLUON", "1" if request.param == "gluon" else "0")
    return request.param


CASES = [
    Case((1,), (0,), **K3),
    Case((31,), (0,), **K3),
    Case((2048,), (0,), H=4, **K3),
    Case((700, 0, 333, 1, 129), (0, 5, 1000, 64, 0), H=3, **K3),
    Case((130, 5, 128), (7, 900, 128), **K3, joint=False),
    Case((1500, 40), (0, 100), H=8, **SMALL),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_float64(case: Case, twin: str, measured: list[Any]) -> None:
    """bfloat16: outputs, largest scores and all gradients."""
    case = Case(**vars(case) | {"dtype": torch.bfloat16})
    values = case.draw("cuda")
    found = errors(case.run(values), case.run({name: x.double() for name, x in values.items()}))
    measured.append((twin, f"{case.new} {case.old} H{case.H} {case.own}+{case.shared}", found))
    assert {name: x for name, x in found.items() if x > BFLOAT16[name]} == {}


@pytest.mark.parametrize("case", [CASES[3], Case((300,), (50,), own=16, shared=8, V=16)], ids=str)
def test_float32(case: Case, twin: str) -> None:
    """Products in three parts of tensor-core precision each."""
    values = case.draw("cuda")
    found = errors(case.run(values), case.run({name: x.double() for name, x in values.items()}))
    assert max(found.values()) < 2e-5, found


def test_same_bits_every_time_and_amid_nan(twin: str) -> None:
    """Three runs, one of them where fresh memory is NaN; and in slabs."""
    case = Case((3000, 77), (0, 500), H=6, **K3, dtype=torch.bfloat16)
    values = case.draw("cuda")
    want = case.run(values)
    assert same_bits(want, case.run(values)) == []
    with poisoned_memory():
        assert same_bits(want, case.run(values)) == []
    with pytest.MonkeyPatch.context() as patch:
        from openk3.ops.mla import attention_fused

        patch.setattr(attention_fused, "_multiprocessors", lambda device: 1)
        patch.setattr(attention_fused, "ROOM", 2**23)
        got = case.run(values)
    assert same_bits({name: x for name, x in want.items() if name != "d_q"}, got) == []
    assert errors({"d_q": got["d_q"]}, {"d_q": want["d_q"]})["d_q"] < 4e-3


def test_more_than_2_to_the_31_values(twin: str) -> None:
    """120,000 tokens of 96 heads: the last ones are those that 64 queries behind all keys give."""
    case = Case((120_000,), (0,), H=96, **K3, dtype=torch.bfloat16)
    values = case.draw("cuda")
    with torch.no_grad():
        q, kv, shared = values["q"], values["kv"], values["shared"]
        cu = torch.tensor([0, 120_000], dtype=torch.int32)
        o, _ = joint_attention(q, kv, shared, cu, scale=case.scale)
        some = slice(94, 96)
        k = torch.cat((kv[:, some, :128], shared[:, None].expand(-1, 2, -1)), -1)
        last = torch.tensor([0, 64], dtype=torch.int32)
        want = mla_attention(q[-64:, some].double(), k.double(), kv[:, some, 128:].double(), last, cu, scale=case.scale)
    assert errors({"o": o[-64:, some]}, {"o": want})["o"] < 4e-3


def test_the_library_on_request(monkeypatch: pytest.MonkeyPatch, measured: list[Any]) -> None:
    """cuDNN gives the same within the rounding of its outputs; packed documents stay with the kernels."""
    monkeypatch.setenv("OPENK3_LIBRARY_ATTENTION", "1")
    for new, close in (((1024,), 1e-2), ((500, 524), 4e-3)):
        case = Case(new, (0,) * len(new), H=4, **K3, dtype=torch.bfloat16)
        values = case.draw("cuda")
        leaves = [values[name].requires_grad_() for name in ("q", "kv", "shared")]
        o, peaks = joint_attention(*leaves, case.bounds()[0], scale=case.scale)
        assert peaks is None and o.dtype == torch.float32
        grads = torch.autograd.grad(o, leaves, values["d_o"].float())
        got = {"o": o.detach()} | dict(zip(("d_q", "d_kv", "d_shared"), grads))
        found = errors(got, case.run({name: x.detach().double() for name, x in values.items()}))
        measured.append(("cudnn" if len(new) == 1 else "ours", str(new), found))
        assert found["o"] < close and max(found.values()) < 2e-2, found


class Requests:
    """Requests of `new` tokens behind `old` ones over latents of 512 + 64 values in pages amid NaN."""

    def __init__(self, new: list[int], old: list[int], H: int, page: int = 512) -> None:
        generator = torch.Generator("cuda").manual_seed(sum(new) + H)
        normal = lambda *shape: torch.randn(*shape, generator=generator, device="cuda").bfloat16()  # noqa: E731
        self.lengths = [a + b for a, b in zip(new, old)]
        self.bounds = torch.tensor([0, *accumulate(new)], dtype=torch.int32, device="cuda")
        self.q_latent, self.q_shared = normal(sum(new), H, 512), normal(sum(new), H, 192)[..., 128:]
        self.latents = [normal(n, 576) for n in self.lengths]
        counts = [-(-n // page) for n in self.lengths]
        memory = torch.full((sum(counts) + 3, 2, page + 8, 576), NAN, device="cuda", dtype=torch.bfloat16)[:, 1, :page]
        order = torch.randperm(len(memory)).tolist()
        table = torch.full((len(new), max(counts)), 2**30, dtype=torch.int32)
        for n, (rows, count) in enumerate(zip(self.latents, counts)):
            for i in range(count):
                table[n, i] = order.pop()
                part = rows[i * page : (i + 1) * page]
                memory[table[n, i], : len(part)] = part
        lengths = torch.tensor(self.lengths, dtype=torch.int32, device="cuda")
        self.pages = LatentPages.of_pages(memory, table.cuda(), lengths)
        self.scale, self.most = 0.02, max(new)

    def run(self, **options: Any) -> Tensor:
        """By the kernels."""
        return latent_attention(self.q_latent, self.q_shared, self.pages, self.bounds, scale=self.scale, **options)

    def exact(self) -> Tensor:
        """By definition in float64."""
        wide = [x.double() for x in (self.q_latent, self.q_shared)]
        return absorbed_attention(*wide, [x.double() for x in self.latents], self.bounds, scale=self.scale)


@pytest.mark.parametrize("H", [8, 24, 96])
@pytest.mark.parametrize("new", [[1] * 7, [4, 1, 0, 3, 2, 5, 1]], ids=str)
def test_decoding_against_float64(H: int, new: list[int], twin: str, measured: list[Any]) -> None:
    """Requests of unequal length, one new token each or several; pages anywhere, NaN wherever nothing was written."""
    requests = Requests(new, [0, 700, 5, 64, 3000, 511, 20_000], H)
    found = errors({"o": requests.run()}, {"o": requests.exact()})
    measured.append((twin, f"decode H{H} {new}", found))
    assert found["o"] < 4e-3, found


def test_decoding_in_a_graph(twin: str) -> None:
    """With a plan and the most new tokens nothing is waited for; replays follow lengths that change on the device."""
    requests = Requests([1] * 5, [100, 2000, 1, 600, 5000], 24)
    eager = requests.run()
    assert torch.equal(eager, requests.run(new_tokens=1))
    pages = requests.pages

    def step() -> Tensor:
        plan = plan_latents(pages, requests.bounds, 24, 1)
        return requests.run(new_tokens=1, plan=plan)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    graph.replay()
    assert torch.equal(out, eager)
    pages.length_N.sub_(torch.tensor([50, 1000, 0, 1, 4999], dtype=torch.int32, device="cuda"))
    graph.replay()
    requests.latents = [rows[:n] for rows, n in zip(requests.latents, pages.length_N.tolist())]
    assert errors({"o": out}, {"o": requests.exact()})["o"] < 4e-3


def test_decoding_from_other_places(twin: str) -> None:
    """One piece of memory a request, and tensors of their own through the public call."""
    requests = Requests([1, 2, 1], [1000, 10, 333], 24)
    want = requests.exact()
    memory = torch.full((3, 1100, 576), NAN, device="cuda", dtype=torch.bfloat16)
    for n, rows in enumerate(requests.latents):
        memory[n, : len(rows)] = rows
    requests.pages = LatentPages.contiguous(memory, requests.pages.length_N)
    assert errors({"o": requests.run()}, {"o": want})["o"] < 4e-3
    with torch.no_grad():
        tensors = (requests.q_latent, requests.q_shared, requests.latents, requests.bounds)
        got = absorbed_attention(*tensors, scale=requests.scale)
    assert errors({"o": got}, {"o": want})["o"] < 4e-3
