"""The Gluon kernels of Gated MLA's attention, run on the CPU: values, barriers, and memory used anew too early."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gluon_interpreter import Descriptor, Machine
from mla_checks import Case, errors
from op_checks import random

from openk3.ops.kda import gluon_launch
from openk3.ops.mla import attention_fused, attention_hopper, latent_decode, latent_gluon
from openk3.ops.mla.attention_views import Job, Views
from openk3.ops.mla.latent_decode import LatentPages, LatentPlan
from openk3.ops.mla.reference import absorbed_attention
from openk3.ops.mla.tiles import Bands

NAN = float("nan")
K3 = {"own": 128, "shared": 64, "V": 128, "dtype": torch.bfloat16}
LIMITS = {"o": 3e-3, "peaks": 1e-6} | {f"d_{name}": 5e-3 for name in ("q", "kv", "shared", "k", "v")}


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Launches of Gluon kernels run here; takes what goes wrong with memory."""
    machines: dict[str, Machine] = {}

    def launch(kernel: Any, programs: int, arguments: list[Any], constants: dict[str, Any], options: Any) -> None:
        path = sys.modules[kernel.fn.__module__].__file__
        assert path is not None
        machine = machines.setdefault(path, machines.get(path) or Machine(Path(path)))
        given = [descriptor(x) if isinstance(x, gluon_launch.Matrix) else x for x in arguments]
        machine.launch(kernel.fn.__name__, programs, given, constants)
        found.extend(machine.faults)
        machine.faults.clear()

    found: list[str] = []
    monkeypatch.setattr(gluon_launch, "launch", launch)
    monkeypatch.setattr(attention_hopper, "launch", launch)
    monkeypatch.setattr(attention_hopper, "fits", lambda views: True)
    yield found


def descriptor(x: gluon_launch.Matrix) -> Descriptor:
    """What the copy engine gets."""
    return Descriptor(x.base.as_strided(x.shape, x.strides), x.block)


CASES = [
    Case((130,), (0,), H=1, **K3),
    Case((300, 0, 5), (40, 9, 0), H=2, **K3),
    Case((129,), (300,), H=1, **K3, joint=False),
    Case((150,), (70,), H=1, own=64, shared=32, V=64, dtype=torch.bfloat16),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention(case: Case, faults: list[str]) -> None:
    """Forward and backward; tiles that end anywhere, on the diagonal and off it."""
    values = case.draw()
    want = case.run({name: x.double() for name, x in values.items()})
    tensors = {name: x for name, x in values.items() if name != "d_o"}
    queries, keys = (tuple(x.tolist()) for x in case.bounds())
    job = Job(Bands(queries, keys), case.scale, case.own if case.joint else None)
    views = Views.of(job, tuple(tensors.values()))
    o_THV, log_HT, peak_H = attention_fused.forward(views, job)
    grads = [torch.full_like(x, NAN) for x in tensors.values()]
    if case.joint:
        grads[2] = grads[2].new_full((len(grads[2]), case.H, case.shared), NAN)
    d_o = values["d_o"]
    delta_HT = torch.full_like(log_HT, NAN)
    for line, start, end in zip(job.bands.lines(), queries, queries[1:]):
        delta_HT[:, line : line + end - start] = (o_THV * d_o).sum(-1)[start:end].T
    attention_fused._Backward(views, Views.of(job, tuple(grads)), (d_o, log_HT, delta_HT), job).run()
    if case.joint:
        grads[2] = grads[2].float().sum(1)
    got = {"o": o_THV, "peaks": peak_H} | {f"d_{name}": x for name, x in zip(tensors, grads)}
    found = errors(got, want)
    assert {name: x for name, x in found.items() if x > LIMITS[name]} == {}
    assert faults == []


@pytest.mark.parametrize(
    ("new", "old", "H", "runs"),
    [
        ([1, 1, 1], [0, 200, 333], 24, 5),
        ([4, 0, 2], [100, 40, 200], 8, 3),
        ([1], [300], 96, 2),
        ([1, 1], [300, 64], 40, 3),
        ([3, 2], [70, 150], 16, 2),
    ],
    ids=str,
)
def test_decoding(new: list[int], old: list[int], H: int, runs: int, faults: list[str]) -> None:
    """Pages in disorder amid NaN; requests within a run, and spread over several."""
    lengths, page, scale = [a + b for a, b in zip(new, old)], 128, 0.05
    latents = [random(n, 576, seed=n).bfloat16() for n in lengths]
    memory = torch.full((12, 2, page + 8, 576), NAN, dtype=torch.bfloat16)[:, 1, :page]
    table, free = torch.full((len(new), 4), 2**30, dtype=torch.int32), list(range(11, -1, -2)) + list(range(0, 12, 2))
    for n, rows in enumerate(latents):
        for i, part in enumerate(rows.split(page)):
            table[n, i] = free.pop()
            memory[table[n, i], : len(part)] = part
    pages = LatentPages.of_pages(memory, table, torch.tensor(lengths, dtype=torch.int32))
    cu = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32)
    queries = random(sum(new), H, 512, seed=1).bfloat16(), random(sum(new), H, 192, seed=2).bfloat16()[..., 128:]
    shape = latent_gluon.settings(H * max(new))
    rows = shape["FIRST"] + shape["SECOND"]
    parts = -(-H * max(new) // rows)
    blocks = torch.tensor([[-(-n // 64) * (m * H > p * rows) for n, m in zip(lengths, new)] for p in range(parts)])
    before = torch.nn.functional.pad(blocks.cumsum(1), (1, 0)).int()
    plan = LatentPlan(before, runs, rows, 64, True)
    out = torch.full((sum(new), H, 512), NAN)
    slots = parts * (runs + len(new)) * rows
    contexts, logs = torch.full((slots, 512), NAN), torch.full((slots,), NAN)
    latent_decode._by_gluon(queries, pages, cu, (out, contexts, logs), scale=scale, plan=plan)
    join(out, contexts, logs, (new, cu.tolist()), plan)
    want = absorbed_attention(*(x.double() for x in queries), [x.double() for x in latents], cu, scale=scale)
    assert errors({"o": out}, {"o": want})["o"] < 3e-3
    # Two warpgroups wipe the same rows behind a request's end, while the other may read what does not count there.
    assert faults == [] or shape["SECOND"]


def join(out: torch.Tensor, contexts: torch.Tensor, logs: torch.Tensor, where: Any, plan: LatentPlan) -> None:
    """What `combine_kernel` does: parts of requests that several runs share."""
    (new, starts), (_, H, _) = where, out.shape
    for n, count in enumerate(new):
        for row in range(count * H):
            before = plan.before[row // plan.rows].tolist()
            used = min(before[-1], plan.runs)
            first, last = (((b + 1) * used - 1) // before[-1] for b in (before[n], before[n + 1] - 1))
            if last > first:
                base = row // plan.rows * (plan.runs + len(new)) + n
                places = [(base + run) * plan.rows + row % plan.rows for run in range(first, last + 1)]
                out[starts[n] + row // H, row % H] = logs[places].mul(0.6931471805599453).softmax(0) @ contexts[places]
