"""Choosing an implementation: the device's, a forced one, each rule of the kernels, and clear errors."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from openk3.config.model import ConfigError
from openk3.ops import backend


class OnDevice:
    """What `pick` looks at of a tensor on some other device."""

    def __init__(self, device: str, dtype: torch.dtype = torch.bfloat16) -> None:
        self.device, self.dtype = torch.device(device), dtype


def pick(op: str, x: Any, **facts: Any) -> str:
    """`backend.pick` of something like a tensor."""
    return backend.pick(op, x, **facts)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> OnDevice:
    """A bfloat16 tensor on a GPU on which all kernels run; nothing forced."""
    monkeypatch.delenv("OPENK3_BACKEND", raising=False)
    monkeypatch.setattr(backend, "_importable", lambda name: True)
    monkeypatch.setattr(backend, "_capability", lambda device: (9, 0))
    return OnDevice("cuda:0")


def test_a_cpu_runs_the_definitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU every operation runs its definition, interpreter or not."""
    monkeypatch.delenv("OPENK3_BACKEND", raising=False)
    for interpret in ("0", "1"):
        monkeypatch.setenv("TRITON_INTERPRET", interpret)
        assert {backend.pick(op, torch.ones(1)) for op in backend.IMPLEMENTATIONS} == {"reference"}


def test_a_gpu_runs_the_kernels_there_are(gpu: OnDevice) -> None:
    """Operations with kernels use them, the others their definition."""
    kernels = {op for op in backend.IMPLEMENTATIONS if pick(op, gpu) == "triton"}
    assert (
        kernels == {op for op, names in backend.IMPLEMENTATIONS.items() if "triton" in names} >= {"kda", "short_conv"}
    )


@pytest.mark.parametrize("channels", [(16, 16), (32, 64), (128, 128), (128, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_supported_by_the_kda_kernels(gpu: OnDevice, channels: tuple[int, int], dtype: torch.dtype) -> None:
    """Each size of a head in each dtype."""
    assert pick("kda", OnDevice("cuda:0", dtype), channels=channels) == "triton"


def test_gluon_is_for_hopper(gpu: OnDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """On compute capability 9.0 alone, and not where it is ruled out."""
    assert backend.prefers_gluon(gpu.device) and not backend.prefers_gluon(torch.device("cpu"))
    monkeypatch.setenv("OPENK3_GLUON", "0")
    assert not backend.prefers_gluon(gpu.device)
    monkeypatch.setenv("OPENK3_GLUON", "off")
    with pytest.raises(ConfigError, match="OPENK3_GLUON=off: must be 0 or 1"):
        backend.prefers_gluon(gpu.device)
    monkeypatch.delenv("OPENK3_GLUON")
    monkeypatch.setattr(backend, "_capability", lambda device: (12, 0))
    assert not backend.prefers_gluon(gpu.device)


RULES = [
    ({"dtype": torch.float64}, {}, "x is torch.float64, not one of torch.float32, torch.bfloat16, torch.float16"),
    ({}, {"channels": (128, 256)}, "a head has 128 and 256 channels, not 16, 32, 64, 128"),
    ({}, {"channels": (8, 16)}, "a head has 8 and 16 channels"),
    ({}, {"bounded": False}, r"they need the bounded gate \(gate_lower_bound\)"),
    ({"device": "meta"}, {}, "x is on meta, not on a CUDA device"),
]


@pytest.mark.parametrize(("kind", "facts", "message"), RULES)
def test_each_rule(
    gpu: OnDevice, monkeypatch: pytest.MonkeyPatch, kind: dict[str, Any], facts: dict[str, Any], message: str
) -> None:
    """What the kernels cannot do goes to the definition, and is an error where they are forced."""
    x = OnDevice(**({"device": "cuda:0"} | kind))
    assert pick("kda", x, **facts) == "reference"
    monkeypatch.setenv("OPENK3_BACKEND", "triton")
    with pytest.raises(ConfigError, match=f"^OPENK3_BACKEND=triton: kda cannot use its kernels here: {message}"):
        pick("kda", x, **facts)


def test_rules_of_the_machine(gpu: OnDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without triton, or on an old GPU, the definition runs."""
    with monkeypatch.context() as patch:
        patch.setattr(backend, "_importable", lambda name: False)
        assert pick("short_conv", gpu) == "reference"
        patch.setenv("OPENK3_BACKEND", "triton")
        with pytest.raises(ConfigError, match="short_conv cannot use its kernels here: triton is not installed"):
            pick("short_conv", gpu)
    monkeypatch.setattr(backend, "_capability", lambda device: (7, 5))
    assert pick("short_conv", gpu) == "reference"
    monkeypatch.setenv("OPENK3_BACKEND", "triton")
    with pytest.raises(ConfigError, match="need compute capability 8.0, cuda:0 has 7.5"):
        pick("short_conv", gpu)


def test_forced_definitions(gpu: OnDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """OPENK3_BACKEND=reference turns the kernels off."""
    monkeypatch.setenv("OPENK3_BACKEND", "reference")
    assert {pick(op, gpu) for op in backend.IMPLEMENTATIONS} == {"reference"}


def test_forced_kernels_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter runs them; operations without kernels keep their definition."""
    monkeypatch.setattr(backend, "_importable", lambda name: True)
    monkeypatch.setenv("OPENK3_BACKEND", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert backend.pick("kda", torch.ones(1), channels=(16, 32)) == "triton"
    assert backend.pick("routing", torch.ones(1)) == "reference"
    with pytest.raises(ConfigError, match="x is torch.float64"):
        backend.pick("kda", torch.ones(1, dtype=torch.float64))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ConfigError, match="x is on the CPU, where only Triton's interpreter runs them"):
        backend.pick("kda", torch.ones(1))


def test_errors_name_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown operation and an implementation that does not exist."""
    with pytest.raises(ValueError, match="no operation named 'kdaa'; known: kda"):
        backend.pick("kdaa", torch.ones(1))
    monkeypatch.setenv("OPENK3_BACKEND", "abacus")
    with pytest.raises(ConfigError, match="OPENK3_BACKEND=abacus: kda on cpu has reference, triton"):
        backend.pick("kda", torch.ones(1))


def test_the_package_imports_without_triton() -> None:
    """Training and generating on a CPU never import triton, and work where it is not installed."""
    script = """
import sys
sys.modules["triton"] = None  # any import of it fails
import torch
import openk3.model.k3, openk3.ops, openk3.train.pretrain
from openk3.ops.short_conv import short_conv
x = torch.ones(5, 16, requires_grad=True)
y, _ = short_conv(x, torch.ones(16, 4))
y.sum().backward()
print(float(x.grad.sum()) > 0)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "True", done.stderr
