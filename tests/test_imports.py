"""What must stay light never imports torch, and the package exports its names lazily."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LIGHT = ("openk3", "openk3.config", "openk3.recipes", "openk3.cli", "openk3.commands.flags", "openk3.inputs.chat")
ROOT = Path(__file__).resolve().parent.parent


def run_python(code: str) -> str:
    """Standard output of a fresh interpreter."""
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT).stdout


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_never_import_torch(module: str) -> None:
    """The flags, the recipes and the configuration answer before torch could be loaded."""
    code = f"import sys, pkgutil, importlib; m = importlib.import_module({module!r})\n"
    if module in ("openk3.config", "openk3.recipes"):
        code += "[importlib.import_module(m.__name__ + '.' + i.name) for i in pkgutil.iter_modules(m.__path__)]\n"
    code += "print('torch' in sys.modules)"
    assert run_python(code).strip() == "False"


def test_exports_are_lazy_and_complete() -> None:
    """Every exported name exists, and naming one is what imports torch."""
    code = (
        "import sys, openk3\n"
        "assert 'torch' not in sys.modules\n"
        "missing = [n for n in openk3.__all__ if getattr(openk3, n, None) is None]\n"
        "print(missing, 'torch' in sys.modules, set(openk3.__all__) <= set(dir(openk3)))"
    )
    assert run_python(code).strip() == "[] True True"


def test_unknown_export_is_an_attribute_error() -> None:
    """A misspelt name fails as for any module."""
    code = "import openk3\ntry:\n    openk3.K4\nexcept AttributeError as error:\n    print(error)"
    assert "K4" in run_python(code)
