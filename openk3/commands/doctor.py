"""`openk3 doctor`: what this machine has, what is installed, and which backend each operator will use."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from pathlib import Path

import torch

from openk3.commands.flags import Doctor
from openk3.commands.memory import GIB
from openk3.commands.runs import RUNS, SHIPPED, is_model, newest_run
from openk3.config.model import ConfigError
from openk3.ops import backend
from openk3.runtime.memory import total_memory

PACKAGES = ("numpy", "safetensors", "tiktoken", "tokenizers", "pillow", "tyro", "tqdm")
OPTIONAL = {
    "triton": "GPU kernels (comes with CUDA builds of torch)",
    "av": "video files (pip install av)",
}


def run(flags: Doctor) -> None:
    """Print the report. Nothing here fails on a machine that can run openk3 at all."""
    for title, rows in (("Machine", machine()), ("Packages", packages()), ("Backends", backends()), ("Runs", runs())):
        print(title)
        for name, value in rows:
            print(f"  {name:<16}{value}")


def machine() -> list[tuple[str, str]]:
    """Processor, memory, disk and accelerators."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    limit = f" (limited to {quota:g} by the container)" if quota is not None and quota < cores else ""
    threads = f"{cores} usable{limit}; torch uses {torch.get_num_threads()} threads"
    disk = shutil.disk_usage(Path.cwd())
    return [
        ("system", f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"),
        ("cores", threads),
        ("memory", memory()),
        ("disk here", f"{disk.free / GIB:.1f} GiB free"),
        ("GPU", gpus()),
    ]


def cpu_quota() -> float | None:
    """Cores that a container's limit allows, or None without one."""
    limits = Path("/sys/fs/cgroup/cpu.max")
    if not limits.is_file():
        return None
    quota, period = limits.read_text().split()[:2]
    return None if quota == "max" else int(quota) / int(period)


def memory() -> str:
    """Total and free memory in words."""
    total, table = total_memory(torch.device("cpu")), Path("/proc/meminfo")
    if total is None:
        return "unknown on this system"
    rows = dict(line.split(":", 1) for line in table.read_text().splitlines())
    free = min(total, int(rows["MemAvailable"].split()[0]) * 1024)
    return f"{total / GIB:.1f} GiB, {free / GIB:.1f} GiB available"


def gpus() -> str:
    """The CUDA devices in words."""
    if not torch.cuda.is_available():
        return "none; everything runs on the CPU"
    names = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return "; ".join(f"{gpu.name}, {gpu.total_memory / GIB:.0f} GiB" for gpu in names)


def packages() -> list[tuple[str, str]]:
    """Installed versions of what openk3 imports, and of what it can do more with."""
    ours = version("openk3") or "not installed (running from its sources)"
    rows = [("openk3", ours), ("torch", torch.__version__)]
    rows += [(name, version(name) or "MISSING: pip install .") for name in PACKAGES]
    return rows + [(name, version(name) or f"not installed; needed only for {use}") for name, use in OPTIONAL.items()]


def version(package: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def backends() -> list[tuple[str, str]]:
    """The backend that each operator picks for a tensor on this machine's default device, or why it can pick none."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sample = torch.zeros(1, device=device)
    return [(op, choice(op, sample)) for op in backend.IMPLEMENTATIONS]


def choice(op: str, sample: torch.Tensor) -> str:
    """The operator's backend in words; a choice of the environment that cannot be had is part of the report."""
    try:
        return f"{backend.pick(op, sample, name='the tensor')} on {sample.device.type}"
    except ConfigError as error:
        return f"ERROR: {error}"


def runs() -> list[tuple[str, str]]:
    """The run that commands use when none is named."""
    newest = newest_run()
    instead = f": {SHIPPED.name}, which comes with openk3, is used" if is_model(SHIPPED) else ""
    return [("newest", str(newest) if newest else f"none under {RUNS}/{instead}; `openk3 quickstart` makes one")]
