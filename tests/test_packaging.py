"""The wheel: every package and licence file inside, nothing else, and the names that pip shows."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import openk3

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is built."""
    source = tmp_path_factory.mktemp("source") / "openk3"
    shutil.copytree(ROOT / "openk3", source / "openk3", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "THIRD_PARTY_NOTICES.md"):
        shutil.copy2(ROOT / name, source / name)
    return source


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    """Built without the network."""
    out = source.parent / "out"
    command = [sys.executable, "-m", "pip", "wheel", str(source), "-w", str(out), "--no-deps", "--no-build-isolation"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    (built,) = out.glob("*.whl")
    return built


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    """Every source file and the web chat's, with the licence and the notices."""
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "openk3").rglob("*.py")}
    assert sources <= names
    page = {path.relative_to(ROOT).as_posix() for path in (ROOT / "openk3" / "serve" / "web").iterdir()}
    assert "openk3/serve/web/chat.js" in page and page <= names
    shipped = {path.relative_to(ROOT).as_posix() for path in (ROOT / "openk3" / "shipped").glob("*/*")}
    assert {"openk3/shipped/pocket/LICENSE.WordNet", "openk3/shipped/quality/quality.safetensors"} <= shipped <= names
    assert wheel.stat().st_size <= 28_000_000
    rest = {name for name in names - sources if ".dist-info/" not in name}
    assert all(name.startswith("openk3/") for name in rest)
    assert {name.rpartition("/")[2] for name in names} >= {"LICENSE", "THIRD_PARTY_NOTICES.md", "entry_points.txt"}


def test_wheel_says_what_it_is(wheel: Path) -> None:
    """Name, version, licence, Python versions and the command."""
    archive = zipfile.ZipFile(wheel)
    inside = [name for name in archive.namelist() if ".dist-info/" in name]
    texts = {name.rpartition("/")[2]: archive.read(name).decode() for name in inside}
    metadata = texts["METADATA"].splitlines()
    assert wheel.name == f"openk3-{openk3.__version__}-py3-none-any.whl"
    for line in ("License-Expression: Apache-2.0", "Requires-Python: <3.13,>=3.11", f"Version: {openk3.__version__}"):
        assert line in metadata
    assert "openk3 = openk3.cli:main" in texts["entry_points.txt"]


def test_editable_install_is_found_beside_a_folder_of_the_same_name(source: Path) -> None:
    """A script next to the clone has the clone's folder `openk3` on its path: it must not hide the package."""
    build = "import setuptools.build_meta as b; b.build_editable('../editable')"
    (source.parent / "editable").mkdir()
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True, timeout=120)
    (built,) = (source.parent / "editable").glob("*.whl")
    archive = zipfile.ZipFile(built)
    (link,) = (name for name in archive.namelist() if name.endswith(".pth"))
    path = archive.read(link).decode().strip()
    code = "import openk3; print(openk3.__file__)"
    result = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path[:0] = ['.', {path!r}]; {code}"],
        cwd=source.parent,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert Path(result.stdout.strip()) == source / "openk3" / "__init__.py", result.stderr


def test_constraints_pin_what_is_asked_for() -> None:
    """Each pin lies in the range of pyproject.toml; every dependency of core, server and development has one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    named = ("serve", "data", "dev", "harness", "cluster")
    lines = [*project["dependencies"], *(line for name in named for line in extras[name])]
    assert "openk3[serve,data]" in lines
    wanted = [line.partition(";")[0].replace("[api]", "") for line in lines if line != "openk3[serve,data]"]
    names = {line.partition(">=")[0] for line in wanted}
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    assert names <= set(pins)
    for line in wanted:
        name, _, lowest = line.partition(",")[0].partition(">=")
        assert tuple(map(int, pins[name].split("."))) >= tuple(map(int, lowest.split("."))), line
