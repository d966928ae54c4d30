"""Every GPU kernel compiles for every supported kind of GPU, without one: no spills, and shared memory that fits."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kernel_compile import OPS, ROOT, SHARED_LIMITS, is_gluon, kernel_files

SCRIPT = Path(__file__).parent / "kernel_compile.py"
pytestmark = pytest.mark.timeout(1200)  # a cold cache on a loaded machine; some 200 s on an idle one
# Two cases: the first needs some hundred values for each of its 32 threads, the second few.
TWO_CASES = '''
"""A kernel that spills with one warp and does not with four."""
import triton
import triton.language as tl


@triton.jit
def square(x, y, B: tl.constexpr):
    at = tl.arange(0, B)[:, None] * B + tl.arange(0, B)[None, :]
    tile = tl.load(x + at)
    tl.store(y + at, tl.exp(tl.dot(tile, tl.trans(tile))) * tile)


def compile_cases(arch):
    return [(square, {"x": "*bf16", "y": "*fp32", "B": b}, {"num_warps": w}) for b, w in ((128, 1), (64, 4))]
'''
# The exchange between warps needs scratch memory; kept alive or not, the barrier is not used after it.
TWO_BARRIERS = '''
"""A kernel whose barrier is dead when scratch memory is placed, and one whose barrier is not."""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def exchange(x, y, KEEP: gl.constexpr):
    rows: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    columns: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, 4], [0, 1])
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    gl.thread_barrier()
    mbarrier.arrive(bar, count=1)
    mbarrier.wait(bar, 0)
    i, j = gl.arange(0, 64, layout=gl.SliceLayout(1, rows)), gl.arange(0, 64, layout=gl.SliceLayout(0, rows))
    tile = gl.convert_layout(gl.load(x + i[:, None] * 64 + j[None, :]), columns)
    i, j = gl.arange(0, 64, layout=gl.SliceLayout(1, columns)), gl.arange(0, 64, layout=gl.SliceLayout(0, columns))
    gl.store(y + i[:, None] * 64 + j[None, :], tile)
    if KEEP:
        bar._keep_alive()


def compile_cases(arch):
    return [(exchange, {"x": "*fp32", "y": "*fp32", "KEEP": keep}, {"num_warps": 4}) for keep in (False, True)]
'''


def compiled(cache: Path, *arguments: str) -> list[dict[str, Any]]:
    """What the script finds, in a process that does not interpret kernels."""
    out = cache / f"{os.getpid()}.json"
    command = [sys.executable, str(SCRIPT), *arguments, "--json", str(out), "--cache", str(cache)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=1150)
    assert result.returncode == 0, result.stdout + result.stderr
    try:
        return json.loads(out.read_text())
    finally:
        out.unlink()


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """All kernels for all kinds of GPU."""
    return compiled(request.config.cache.mkdir("kernel_compile"))


def named(results: list[dict[str, Any]], *keys: str) -> list[tuple[Any, ...]]:
    """The place of each result, and some of its figures."""
    return [(r["module"], r["kernel"], r["case"], r["arch"], *(r[key] for key in keys)) for r in results]


def jitted(path: Path) -> dict[str, set[str]]:
    """Names that each jitted function of a file mentions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    marked = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and any_jit(n))
    return {f.name: {n.id for n in ast.walk(f) if isinstance(n, ast.Name)} - {f.name} for f in marked}


def any_jit(function: ast.FunctionDef) -> bool:
    """Whether a decorator compiles the function."""
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def test_no_kernel_is_forgotten(results: list[dict[str, Any]]) -> None:
    """Each jitted function that no other one calls is compiled for all GPUs that it is for (Gluon: Hopper)."""
    files = {path: jitted(path) for path in sorted((ROOT / "openk3").rglob("*.py"))}
    assert {path for path, names in files.items() if names} <= set(kernel_files())
    assert all(path.is_relative_to(OPS) for path in kernel_files())
    called = set().union(*(used for names in files.values() for used in names.values()))
    wanted = {
        (path.stem, name, arch)
        for path, names in files.items()
        for name in names.keys() - called
        for arch in ([90] if is_gluon(path) else SHARED_LIMITS)
    }
    assert wanted == {(r["module"], r["kernel"], r["arch"]) for r in results}


def test_no_kernel_spills(results: list[dict[str, Any]]) -> None:
    """No register lies in memory, ptxas has nothing to complain about (products made one after another, say), and its
    products read where they should."""
    bad = [r for r in results if r["spills"] or r["warnings"]]
    assert named(bad, "registers", "spills", "warnings") == []


def test_shared_memory_fits(results: list[dict[str, Any]]) -> None:
    """No block asks for more than the GPU gives to one."""
    assert named([r for r in results if r["shared"] > SHARED_LIMITS[r["arch"]]], "shared") == []


def test_hopper_kernels_use_its_tensor_cores(results: list[dict[str, Any]]) -> None:
    """Every Gluon kernel of a module with matrix products makes them with the instructions of a warp group."""
    files = {path.stem: path.read_text(encoding="utf-8") for path in kernel_files() if is_gluon(path)}
    products = {name for name, text in files.items() if "warpgroup_mma" in text}
    assert named([r for r in results if r["module"] in products and not r["sass"].get("HGMMA")]) == []


def test_products_are_followed(results: list[dict[str, Any]]) -> None:
    """The address of every product's right operand is compared with that in PTX, of a slot with what is added to it."""
    found = [r for r in results if r["sass"].get("HGMMA")]
    assert {"gradient_kernel", "scan_gluon", "prepare_gluon"} <= {r["module"] for r in found}
    assert named([r for r in found if r["descriptors"] < r["sass"]["HGMMA"]], "descriptors", "sass") == []


def test_spills_are_seen_and_results_remembered(tmp_path: Path) -> None:
    """A kernel that needs more registers than there are is found out, also when its result is read back."""
    source = tmp_path / "square_kernel.py"
    source.write_text(TWO_CASES)
    first = compiled(tmp_path, str(source), "--arch", "80", "--arch", "90")
    assert [(r["arch"], r["case"], r["spills"] > 0) for r in first] == [(80, 0, True), (90, 0, True), (90, 1, False)]
    assert first[2]["sass"]["HGMMA"] > 0
    for path in tmp_path.glob("*.json"):
        path.write_text(path.read_text().replace('"arch": 80', '"arch": 81'))
    second = compiled(tmp_path, str(source), "--arch", "80", "--arch", "90")
    assert [r["arch"] for r in second] == [81, 90, 90]
    assert named(second, "spills")[1:] == named(first, "spills")[1:]


def test_memory_of_barriers_is_theirs(tmp_path: Path) -> None:
    """Scratch memory over a barrier is found out, and only where the barrier may lie there."""
    source = tmp_path / "exchange_gluon.py"
    source.write_text(TWO_BARRIERS)
    dead, kept = compiled(tmp_path, str(source), "--arch", "90")
    assert len(dead["warnings"]) == 1 and "the barrier at 0 may share its memory" in dead["warnings"][0]
    assert kept["warnings"] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no_such"], "no_such: no module of kernels has that in its name"),
        (["prepare_kernel", "no_such"], "no_such: no module of kernels has that in its name"),
        (["no/such.py"], "no/such.py: no such file"),
        ([str(ROOT / "openk3" / "ops" / "norm.py")], "norm.py: has no compile_cases"),
        (["prepare_gluon", "--arch", "80"], "prepare_gluon: nothing is compiled for these kinds of GPU"),
    ],
)
def test_names_that_lead_nowhere(arguments: list[str], words: str) -> None:
    """One line and exit code 2: nothing to compile is no success."""
    result = subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=60)
    assert result.returncode == 2 and result.stdout == ""
    assert words in result.stderr.splitlines()[-1] and "Traceback" not in result.stderr
