"""Kernels are started from what was compiled, told apart by what Triton specialises on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from openk3.ops import launch  # noqa: E402


class Kernel:
    """Stands for a jitted function of (x, y, size, scale, FLAG = 7): notes what it compiles and what it runs."""

    def __init__(self, raw: bool = True) -> None:
        self.fn, self.pre_run_hooks = self, []
        names = ("x", "y", "size", "scale", "FLAG")
        self.params = [
            SimpleNamespace(name=n, is_constexpr=n == "FLAG", has_default=n == "FLAG", default=7) for n in names
        ]
        self.raw = raw
        self.compiled: list[Any] = []
        self.launched: list[Any] = []

    def run(self, *values: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> Kernel:
        assert warmup
        self.compiled.append((grid, values, options))
        return self

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *values, **options: self.launched.append(("triton", grid, values, options))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """A kernel that nothing is remembered of, on the only device."""

    class Compiled(SimpleNamespace):
        @staticmethod
        def of(found: Kernel) -> Compiled:
            note = lambda grid, device, values: found.launched.append((grid, device, list(values)))  # noqa: E731
            return Compiled(raw=True if found.raw else None, start=note)

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(triton, "JITFunction", Kernel)
    for name, value in {"Compiled": Compiled, "_compiled": {}, "_signatures": {}}.items():
        monkeypatch.setattr(launch, name, value)
    return Kernel()


def test_what_is_passed(kernel: Kernel) -> None:
    """Tensors as addresses, numbers as they are, constants in their places, defaults filled in; up to three sizes."""
    x = torch.zeros(40)
    launch.start(kernel, 3, 2)(x, None, size=5, scale=0.5, num_warps=4)
    assert kernel.compiled == [((3, 2), (x, None, 5, 0.5, 7), {"num_warps": 4})]
    assert kernel.launched == [((3, 2, 1), 0, [x.data_ptr(), None, 5, 0.5, 7])]


def test_what_is_told_apart(kernel: Kernel) -> None:
    """Formats, alignment, None, 1, multiples of 16, large numbers, constants and options; not values and addresses."""
    x = torch.zeros(64)

    def count(*values: Any, **options: Any) -> int:
        launch.start(kernel, 1)(*values, **options)
        return len(kernel.compiled)

    assert count(x, x, 5, 0.5) == 1
    assert count(x[16:], x, 7, 2.5) == 1
    assert count(x, x, 16, 0.5) == 2 and count(x, x, 32, 0.5) == 2
    assert count(x, x, 1, 0.5) == 3
    assert count(x, x, 2**31 + 1, 0.5) == 4
    assert count(x[1:], x, 5, 0.5) == 5 and count(x[2:], x, 5, 0.5) == 5
    assert count(x.bfloat16(), x, 5, 0.5) == 6
    assert count(None, x, 5, 0.5) == 7
    assert count(x, x, 5, 0.5, FLAG=8) == 8 and count(x, x, 5, 0.5, 7) == 8
    assert count(x, x, 5, 0.5, num_warps=8) == 9
    assert len(kernel.launched) == 13
    with pytest.raises(TypeError, match="got str"):
        count("x", x, 5, 0.5)


def test_what_triton_has_to_launch(kernel: Kernel) -> None:
    """A launcher that does not look as expected, hooks before a run, and kernels of the interpreter are left to it."""
    kernel.raw = False
    launch.start(kernel, 2)(torch.zeros(1), None, 5, 0.5)
    assert kernel.launched[-1][:2] == ("triton", (2,))
    kernel.pre_run_hooks = [print]
    launch.start(kernel, 2)(1, 2)
    assert kernel.launched[-1] == ("triton", (2,), (1, 2), {})
    assert launch.start({(4,): "interpreted"}, 4) == "interpreted"  # type: ignore[arg-type]
