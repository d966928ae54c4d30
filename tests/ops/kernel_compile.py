"""Compile the project's GPU kernels without a GPU, and say what each one needs of the machine.

python tests/ops/kernel_compile.py [MODULE ...] [--arch 90] [--sass FOLDER]

Modules are named by a part of their name, or by the path of any file that has `compile_cases`: what the launchers
compile at K = V = 128 in bfloat16.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import io
import json
import multiprocessing
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import barrier_memory
import machine_code
import product_pipelines
import wgmma_descriptors

ROOT = Path(__file__).resolve().parent.parent.parent
OPS = ROOT / "openk3" / "ops"
RULES = (barrier_memory, machine_code, product_pipelines, wgmma_descriptors)
# Shared memory that one block may have, in bytes, by compute capability.
SHARED_LIMITS = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 120: 99 * 1024}
MNEMONICS = ("HGMMA", "HMMA", "BAR", "LDS", "STS", "LDSM", "STSM", "LDL", "STL", "UTMALDG", "SYNCS")


def kernel_files() -> list[Path]:
    """Every module of kernels, by its name."""
    return sorted([*OPS.rglob("*_kernel.py"), *OPS.rglob("*_gluon.py")])


def load(path: Path) -> ModuleType:
    """Import a module of the package, or a file from elsewhere."""
    if path.is_relative_to(ROOT / "openk3"):
        return importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def is_gluon(path: Path) -> bool:
    """Whether a file's kernels are written for Hopper alone."""
    return path.stem.endswith("_gluon")


def cases(paths: list[Path], archs: list[int]) -> Iterator[tuple[Path, int, int]]:
    """(file, arch, number of the case): on sm_90 all cases, on the others the first one of each kernel."""
    for path in paths:
        module = load(path)
        for arch in archs:
            if arch != 90 and is_gluon(path):
                continue
            seen = set()
            for number, (kernel, _, _) in enumerate(module.compile_cases(arch)):
                if arch == 90 or kernel not in seen:
                    yield path, arch, number
                seen.add(kernel)


def source_of(kernel: Any, arguments: dict[str, Any]) -> Any:
    """What the compiler takes: types, constants, and which arguments are divisible by 16."""
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    names = [parameter.name for parameter in kernel.params]
    if set(names) != set(arguments):
        raise ValueError(f"{kernel.__name__}: missing or unknown arguments {sorted(set(names) ^ set(arguments))}")
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}

    def kind_of(value: Any, path: tuple[int, ...], constant: bool) -> Any:
        if isinstance(value, tuple) and not constant:
            return tuple(kind_of(part, (*path, i), constant) for i, part in enumerate(value))
        if constant or not isinstance(value, str):
            constants[path] = value
            return "constexpr"
        kind, divisor = re.fullmatch(r"(.*?)(?::(\d+))?", value).groups()
        if divisor == "16" or (kind.startswith("*") and divisor is None):
            attributes[path] = [["tt.divisibility", 16]]
        return kind

    signature = {p.name: kind_of(arguments[p.name], (i,), p.is_constexpr) for i, p in enumerate(kernel.params)}
    source = GluonASTSource if kernel.is_gluon() else ASTSource
    return source(kernel, signature, constants, attributes)


def compile_case(path: Path, arch: int, number: int, cache: Path | None, sass: Path | None) -> dict[str, Any]:
    """Compile one case; the results of unchanged sources are read from the folder `cache`."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget

    kernel, arguments, options = load(path).compile_cases(arch)[number]
    source = source_of(kernel, arguments)
    rules = [Path(str(module.__file__)).read_text() for module in (sys.modules[__name__], *RULES)]
    key = [source.hash(), arch, sorted(options.items()), triton.__version__, *rules]
    stored = cache and cache / f"{hashlib.sha256(repr(key).encode()).hexdigest()}.json"
    if stored and not sass and stored.exists():
        return json.loads(stored.read_text())
    knobs.compilation.always_compile = knobs.nvidia.dump_ptxas_log = True
    log = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(log):
        knobs.cache.dir = folder
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        code = machine_code.disassembled(compiled.asm["cubin"]) if arch == 90 or sass else ""
    followed, wrong = wgmma_descriptors.compare(compiled.asm["ptx"], code) if arch == 90 else (0, [])
    wrong += machine_code.unwritten(code)
    wrong += product_pipelines.overwritten(compiled.asm["ttgir"])
    wrong += barrier_memory.reused(compiled.asm["ttgir"]) if kernel.is_gluon() else []
    found = usage(log.getvalue())
    result = {
        "module": path.stem,
        "kernel": kernel.__name__,
        "case": number,
        "arch": arch,
        "gluon": kernel.is_gluon(),
        "shared": compiled.metadata.shared,
        "descriptors": followed,
        **found,
        "warnings": found["warnings"] + wrong,
        "sass": dict(Counter(re.findall(rf"\b({'|'.join(MNEMONICS)})\b", code))),
    }
    if sass:
        for kind, text in (("ptx", compiled.asm["ptx"]), ("ttgir", compiled.asm["ttgir"]), ("sass", code)):
            (sass / f"{kernel.__name__}.{number}.sm_{arch}.{kind}").write_text(text)
    if stored:
        partial = stored.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(result))
        os.replace(partial, stored)
    return result


def usage(log: str) -> dict[str, Any]:
    """Registers, bytes of the stack and spills, and warnings, from what ptxas says (all of a file's functions)."""
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", log)]
    if not frames or not registers:
        raise ValueError(f"ptxas said nothing of registers and spills: {log!r}")
    stack, stores, loads = (sum(map(int, column)) for column in zip(*frames))
    warnings = sorted({line.strip() for line in log.splitlines() if "Performance Loss" in line or "warning" in line})
    return {"registers": max(registers), "stack": stack, "spills": stores + loads, "warnings": warnings}


def describe(result: dict[str, Any]) -> str:
    """One line of a report."""
    name = f"{result['module']}.{result['kernel']}[{result['case']}]"
    counts = " ".join(f"{key} {value}" for key, value in sorted(result["sass"].items()))
    line = f"{name:<58} sm_{result['arch']:<3} {result['registers']:>3} registers, {result['spills']:>4} bytes spilled,"
    return " ".join([f"{line} {result['shared']:>6} bytes shared", counts, *result["warnings"]]).rstrip()


def _compile(task: tuple[Any, ...]) -> dict[str, Any]:
    return compile_case(*task)


def chosen(parser: argparse.ArgumentParser, names: list[str]) -> list[Path]:
    """The files that are meant; exit code 2 and one line for a name that leads nowhere."""
    paths: dict[Path, None] = {}
    for name in names:
        found = [Path(name).resolve()] if name.endswith(".py") else [p for p in kernel_files() if name in p.stem]
        if name.endswith(".py") and not found[0].is_file():
            parser.error(f"{name}: no such file")
        if name.endswith(".py") and "def compile_cases(" not in found[0].read_text(encoding="utf-8"):
            parser.error(f"{name}: has no compile_cases, which says what is compiled")
        if not found:
            parser.error(f"{name}: no module of kernels has that in its name, such as {kernel_files()[0].stem}")
        paths |= dict.fromkeys(found)
    return list(paths) if names else kernel_files()


def main() -> None:
    """Compile what is asked for in two processes and print, or write as JSON, what it needs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*")
    parser.add_argument("--arch", type=int, choices=list(SHARED_LIMITS), action="append")
    parser.add_argument("--sass", type=Path, help="write PTX, TTGIR and SASS here")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--cache", type=Path, help="read and write results of unchanged kernels here")
    arguments = parser.parse_args()
    paths = chosen(parser, arguments.modules)
    if arguments.sass:
        arguments.sass.mkdir(parents=True, exist_ok=True)
    tasks = [(*case, arguments.cache, arguments.sass) for case in cases(paths, arguments.arch or list(SHARED_LIMITS))]
    if not tasks:
        parser.error(f"{', '.join(p.stem for p in paths)}: nothing is compiled for these kinds of GPU; Gluon's need 90")
    results = []
    with multiprocessing.get_context("fork").Pool(2) as pool:
        for result in pool.imap(_compile, tasks):
            print(describe(result), flush=True)
            results.append(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(results))


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "0"
    sys.path.insert(0, str(ROOT))
    main()
