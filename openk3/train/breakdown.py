"""Where the time of a training step goes: one profiled step, its kernels sorted by the operation that launched them.

Forward passes of modules are marked with the names of `model/roofline.py`. A kernel belongs to the innermost mark
around its launch; in the backward pass, to that of the forward operation whose gradient it computes. Names of kernels
and operations then tell apart what one module does. On a CPU the operations' own times take the place of kernels.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from openk3.model.k3 import K3
from openk3.model.kda import KimiDeltaAttention
from openk3.model.layer import Layer
from openk3.model.mla import GatedMLA
from openk3.model.moe import DenseFFN, LatentMoE
from openk3.model.mtp import MTPLayer
from openk3.model.norm import RMSNorm

MARK = "k3:"
BACKWARD = "autograd::engine::evaluate_function"
OTHER = "other"
# (mark, pattern of names, operation): the first that fits; what fits none keeps its mark.
RULES = (
    ("KDA", r"conv", "short convolutions"),
    ("KDA", r"gated|rms", "KDA output norm and gate"),
    ("KDA", r"kda|prepare|scan|gradient|reverse|fold", "KDA"),
    ("KDA", r"linear|mm\b|gemm|nvjet|cutlass", "KDA projections"),
    ("MLA", r"attention|flash|fmha|sdpa|softmax|cudnn", "MLA attention"),
    ("MLA", r"rms|norm", "MLA norms and gates"),
    ("MLA", r"linear|mm\b|gemm|nvjet|cutlass", "MLA projections"),
    ("MoE", r"situ", "expert activations"),
    ("MoE", r"grouped|expert", "experts"),
    ("MoE", r"route|topk|sort|sigmoid|bincount|cumsum|histogram", "router"),
    ("MoE", r"gather|scatter|index|combine|dispatch", "dispatch and combine"),
    ("MoE", r"linear|mm\b|gemm|nvjet|cutlass|norm", "latent projections"),
    ("experts", r"situ", "expert activations"),
    *((mark, r"foreach_(copy|add)", "gradient sums") for mark in (OTHER, "head and loss")),
    (OTHER, r"momentum_kernel|rescale_kernel|symmetric_kernel|chain_kernel|adamw", "optimizer"),
)


def breakdown(model: K3, step: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Seconds by operation of one call of `step`, the longest first; on a GPU of its kernels."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with tempfile.TemporaryDirectory() as folder, marked(model):
        with profile(activities=activities) as profiler:
            step()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return by_operation(events)


@contextmanager
def mark(name: str) -> Generator[None]:
    """What runs inside belongs to the operation `name`."""
    with record_function(MARK + name):
        yield


@contextmanager
def marked(model: K3) -> Generator[None]:
    """While entered, forward passes of the model's modules are marked."""
    open_marks: list[ExitStack] = []
    handles = []

    def before(name: str) -> Callable[..., None]:
        def enter(*_: object) -> None:
            open_marks.append(ExitStack())
            open_marks[-1].enter_context(mark(name))

        return enter

    def leave(*_: object) -> None:
        open_marks.pop().close()

    for module, name in names_of(model):
        handles.append(module.register_forward_pre_hook(before(name)))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def names_of(model: K3) -> list[tuple[nn.Module, str]]:
    """Modules and the operation that their forward pass belongs to, where no module inside says otherwise."""
    found: dict[nn.Module, str] = {model.embed: "embedding"}
    for module in model.modules():
        if isinstance(module, Layer):
            found[module] = "depth reads and norms"
        elif isinstance(module, MTPLayer):
            found[module] = "MTP projection"
        elif isinstance(module, KimiDeltaAttention | GatedMLA):
            kind = "KDA" if isinstance(module, KimiDeltaAttention) else "MLA"
            found[module] = f"{kind}, rest"
            found |= {part: f"{kind} projections" for part in module.children() if isinstance(part, nn.Linear)}
            found |= {part: f"{kind}, rest" for part in module.children() if isinstance(part, RMSNorm)}
        elif isinstance(module, LatentMoE):
            found[module] = "MoE, rest"
            found |= {module.router: "router", module.experts: "experts"}
            found |= dict.fromkeys((module.down_proj, module.latent_norm, module.up_proj), "latent projections")
            found |= {} if module.shared is None else {module.shared: "shared experts"}
        elif isinstance(module, DenseFFN):
            found.setdefault(module, "dense FFN")
    if model.vision is not None and model.projector is not None:
        found |= dict.fromkeys((model.vision, model.projector), "vision")
    return list(found.items())


def by_operation(events: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Seconds by operation from the events of a Chrome trace, the longest first."""
    spans = [_Span(event) for event in events if event.get("ph") == "X" and event.get("cat") in _CATEGORIES]
    calls = [span for span in spans if span.category in _CALLS]
    kernels = [span for span in spans if span.category in _DEVICE]
    _nest(calls)
    forward = {
        span.sequence: name
        for span in sorted(calls, key=lambda span: span.start)
        if span.sequence >= 0 and not span.inside(BACKWARD) and (name := span.nearest_mark())
    }
    seconds: dict[str, float] = defaultdict(float)
    launches = {span.correlation: span for span in calls if span.category in _LAUNCHES}
    for kernel in kernels:
        launch = launches.get(kernel.correlation)
        found = OTHER if launch is None else launch.operation(forward)
        names = kernel.name if launch is None else f"{kernel.name} {launch.path()}"
        seconds[_refined(found, names)] += kernel.duration / 1e6
    for span in () if kernels else calls:
        if span.category == "cpu_op":
            seconds[_refined(span.operation(forward), span.path())] += span.own_time() / 1e6
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


_LAUNCHES, _DEVICE = {"cuda_runtime", "cuda_driver"}, {"kernel", "gpu_memcpy", "gpu_memset"}
_CALLS = {"cpu_op", "user_annotation"} | _LAUNCHES
_CATEGORIES = _CALLS | _DEVICE


class _Span:
    """One event of a trace, with the one around it on its thread."""

    def __init__(self, event: dict[str, Any]) -> None:
        details = event.get("args", {})
        self.name, self.category, self.thread = event["name"], event["cat"], event["tid"]
        self.start, self.duration = float(event["ts"]), float(event.get("dur", 0))
        self.sequence, self.correlation = int(details.get("Sequence number", -1)), details.get("correlation")
        self.parent: _Span | None = None
        self.inner = 0.0  # time of the events directly inside

    def around(self) -> Generator[_Span]:
        """This event and those around it, from the inside out."""
        span: _Span | None = self
        while span is not None:
            yield span
            span = span.parent

    def inside(self, name: str) -> bool:
        """Whether it or an event around it has a name that begins so."""
        return any(span.name.startswith(name) for span in self.around())

    def nearest_mark(self) -> str:
        """The innermost mark around it, or an empty string."""
        return next((span.name[len(MARK) :] for span in self.around() if span.name.startswith(MARK)), "")

    def operation(self, forward: dict[int, str]) -> str:
        """Where it belongs; `forward` has the marks of forward operations by their sequence number."""
        for span in self.around():
            if span.name.startswith(MARK):
                return span.name[len(MARK) :]
            if span.name.startswith(BACKWARD):
                return "gradient sums" if "AccumulateGrad" in span.name else forward.get(span.sequence, OTHER)
        return OTHER

    def path(self) -> str:
        """Its name and those around it, without marks."""
        return " ".join(span.name for span in self.around() if not span.name.startswith(MARK))

    def own_time(self) -> float:
        """Without the events inside."""
        return max(0.0, self.duration - self.inner)


def _nest(spans: list[_Span]) -> None:
    """Find the parent of every event: the innermost one of its thread that contains it."""
    threads: dict[Any, list[_Span]] = defaultdict(list)
    for span in spans:
        threads[span.thread].append(span)
    for members in threads.values():
        stack: list[_Span] = []
        for span in sorted(members, key=lambda span: (span.start, -span.duration)):
            while stack and stack[-1].start + stack[-1].duration <= span.start:
                stack.pop()
            if stack:
                span.parent = stack[-1]
                stack[-1].inner += span.duration
            stack.append(span)


def _refined(operation: str, names: str) -> str:
    """The operation, told apart by the names of kernel and calls."""
    for mark_name, pattern, refined in RULES:
        rest = operation == mark_name or operation == f"{mark_name}, rest"
        if rest and re.search(pattern, names, re.IGNORECASE):
            return refined
    return operation
