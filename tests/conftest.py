"""The whole suite: one thread per worker, the same examples in every property test, and one tiny trained run."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression
from hypothesis import HealthCheck, settings

import openk3

# Read by torch when it is imported, which no test module has done yet: two workers must not fight over two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

HAS_TRITON = find_spec("triton") is not None
IMPORTS_KERNELS = re.compile(
    r"^ *(from|import) (triton|kernel_compile|openk3\.ops.*(_kernel|_gluon|fused))", re.MULTILINE
)


def pytest_configure(config: pytest.Config) -> None:
    """Kernels run in Triton's interpreter, on the CPU; where tests of the GPU are asked for, they are compiled.

    Triton reads the choice when a kernel is defined. The tests can work with no other, so it is not left to the user.
    """
    expression = Expression.compile(config.option.markexpr or "not gpu")
    compiled = expression.evaluate(lambda name, **_: name == "gpu")
    os.environ["TRITON_INTERPRET"] = "0" if compiled else "1"
    if not compiled and HAS_TRITON:
        import_module("triton_interpreter").repair()


def pytest_collection_finish() -> None:
    """Modules and thousands of tests stay: a collection of garbage that looks at them takes ten times as long."""
    gc.collect()
    gc.freeze()


def pytest_report_header() -> str:
    """Says what a machine cannot test."""
    return "" if HAS_TRITON else "triton is not installed here: tests of GPU kernels are left out"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Files that import kernels need triton, which is not to be had for every machine."""
    if HAS_TRITON or not collection_path.name.startswith("test_"):
        return None
    return bool(IMPORTS_KERNELS.search(collection_path.read_text(encoding="utf-8"))) or None


settings.register_profile(
    "openk3",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],  # of a busy machine
)
settings.load_profile("openk3")


@pytest.fixture(scope="session")
def small_text() -> Path:
    """A folder with some 80 kB of Python."""
    return Path(openk3.__file__).parent / "config"


@pytest.fixture(scope="session")
def shared_process() -> Iterator[None]:
    """Training commands leave alone how this process multiplies matrices: all tests share it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("openk3.commands.pretrain.tune_cpu", dict)
        yield


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory, small_text: Path, shared_process: None) -> Path:
    """A run of two steps, made by the command itself; who changes it copies it first."""
    from openk3.cli import main  # of the tests of a GPU none needs what the command line needs

    run = tmp_path_factory.mktemp("runs") / "tiny"
    assert main(["pretrain", "tiny", "--data", str(small_text), "--out", str(run), "--steps", "2"]) == 0
    return run
