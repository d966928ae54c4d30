"""transformers' Kimi Linear beside ours: a forward pass, a training pass and decoding of the same shapes, in one run.

    python benchmarks/kimi_linear.py --peers FOLDER...    # folders that hold transformers 5.17 and fla-core
    python benchmarks/kimi_linear.py --device cpu --small # tries the script; the peer too where it can be imported

Recipe `small` with random weights in bfloat16, and the peer with the same widths, layers, heads, experts and
vocabulary (`DIFFERENCES` of `openk3/commands/bench_mix.py` names what it has otherwise: its experts are wider, 1.8
times the parameters). It uses fla-core's KDA where that can be imported, grouped products for its experts, and SDPA.
Training passes are forward and backward of equally long sequences, without an optimizer's step, ours with the MTP
layer; losses are means over next tokens. Decoding: ours as a graph replayed for each step; the peer's `generate`,
whose milliseconds of a step follow from answers of 8 and of 24 tokens. Median of 5 after 2; `tokens_per_s` is ours.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from kda_timing import Protocol, median_ms, peak_growth  # noqa: E402

from openk3.commands import bench_mix, bench_peer  # noqa: E402
from openk3.commands.bench import complete, random_batches, random_model  # noqa: E402
from openk3.commands.bench_flags import BenchTrain  # noqa: E402
from openk3.config.train import PretrainConfig  # noqa: E402
from openk3.model.decoder import Decoder  # noqa: E402
from openk3.model.k3 import K3  # noqa: E402
from openk3.ops.sequences import remember_integers  # noqa: E402

FEW, MORE = 8, 24  # tokens of the peer's answers
WAY = "grouped_mm"  # of its experts


@dataclass(frozen=True)
class Row:
    """`batch` sequences of `tokens`: a pass over them ("forward", "training"), or a step behind them ("decode")."""

    kind: str
    batch: int
    tokens: int

    @property
    def name(self) -> str:
        """As in results."""
        what = "a step behind" if self.kind == "decode" else f"{self.kind} pass of"
        return f"kimi linear, {what} {self.batch} x {self.tokens}"


ROWS = [Row("forward", 4, 8192), Row("training", 2, 8192), Row("decode", 1, 4096), Row("decode", 64, 512)]
TRIAL = [Row("forward", 2, 16), Row("training", 2, 16), Row("decode", 2, 16)]


def configuration(row: Row, options: argparse.Namespace) -> PretrainConfig:
    """The recipe with the row's micro-batch."""
    sizes = {"micro_batch": row.batch * row.tokens, "micro_batches": 1, "context": row.tokens}
    return complete(BenchTrain("tiny" if options.small else "small", **sizes, device=options.device))


def our_pass(model: K3, config: PretrainConfig, training: bool) -> Callable[[], Any]:
    """A call that computes the logits of the last tokens, or the loss and all gradients."""
    device = model.embed.weight.device
    (plain,) = random_batches(config)
    plain = plain.expand(config.model.media_placeholder_token_id)  # on a GPU that would wait for its work
    packed = plain.to(device)
    remember_integers(packed.cu_seqlens, plain.cu_seqlens.tolist())
    last_N = (packed.cu_seqlens[1:] - 1).long()

    def forward() -> Any:
        with torch.no_grad():
            return model.logits(model.backbone(model.embed(packed.token_ids_T), packed.cu_seqlens)[last_N])

    def train() -> Any:
        model.zero_grad(set_to_none=True)
        return model.loss(packed).total.backward()

    return train if training else forward


def peer_pass(model: Any, row: Row, device: torch.device) -> Callable[[], Any]:
    """The same of the peer."""
    ids_NT = torch.randint(1, model.config.vocab_size - 256, (row.batch, row.tokens), device=device)

    def forward() -> Any:
        with torch.no_grad():
            return model(ids_NT, use_cache=False, logits_to_keep=1).logits

    def train() -> Any:
        model.zero_grad(set_to_none=True)
        return model(ids_NT, labels=ids_NT, use_cache=False).loss.backward()

    return train if row.kind == "training" else forward


@torch.no_grad()
def our_step_ms(model: K3, row: Row, device: torch.device, protocol: Protocol) -> float:
    """Milliseconds of a decoding step."""
    decoder = Decoder(model, slots=row.batch, max_tokens=row.tokens + protocol.repeats + protocol.warmups + 2)
    decoder.cache.length_R[: row.batch] = row.tokens
    decoder.lengths = [row.tokens] * row.batch
    slots = list(range(row.batch))
    decoder.step(slots, [0] * row.batch)
    return median_ms([lambda: decoder.step(slots)], device, protocol)


def peer_step_ms(transformers: Any, model: Any, row: Row, device: torch.device) -> float:
    """Milliseconds of a further token, from answers of few and of more tokens."""

    def seconds(answer: int) -> float:
        requests = [{"prompt": [n + 1] * row.tokens, "answer": answer} for n in range(row.batch)]
        began = time.perf_counter()
        bench_peer.static(transformers, model, {"requests": requests, "batch": row.batch})
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    torch.set_default_device(device)
    try:
        with torch.inference_mode():
            seconds(2)
            few = seconds(FEW)
            return max(0.0, 1e3 * (seconds(MORE) - few) / (MORE - FEW))
    finally:
        torch.set_default_device(None)


class Peer:
    """transformers' model of one configuration, built when it is first asked for."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._model: Any = None
        self.transformers = importlib.import_module("transformers")
        self.transformers.logging.set_verbosity_error()
        self.versions = {"transformers": self.transformers.__version__}
        try:
            importlib.import_module("fla.ops.kda")
            self.versions["KDA of transformers"] = f"fla {importlib.import_module('fla').__version__}"
        except (ImportError, AttributeError) as error:
            self.versions["KDA of transformers"] = f"its own PyTorch: {error}"

    def model(self, config: PretrainConfig) -> Any:
        """With random weights, drawn on the device."""
        if self._model is None:
            kind = self.transformers.KimiLinearConfig(**bench_mix.peer_config(config.model))
            kind._attn_implementation = "sdpa"
            torch.set_default_device(self._options.device)
            torch.set_default_dtype(torch.bfloat16 if self._options.device == "cuda" else torch.float32)
            try:
                self._model = self.transformers.KimiLinearForCausalLM(kind)
            finally:
                torch.set_default_dtype(torch.float32)
                torch.set_default_device(None)
            if self._options.device == "cuda":
                self._model.set_experts_implementation(WAY)
        return self._model


def measure(row: Row, peer: Peer | None, model: K3, options: argparse.Namespace) -> dict[str, Any]:
    """Times and memory of both; the peer's fault is named in the row."""
    device, config = torch.device(options.device), configuration(row, options)
    protocol = Protocol(3, 1) if options.quick or options.small else Protocol(5, 2)
    tokens = row.batch * (1 if row.kind == "decode" else row.tokens)
    found: dict[str, Any] = {"work": row.name, "ours_ms": None, "floor_ms": None, "goal_ms": None}
    found |= {"peak_gb": {}, "failed": {}}
    model.requires_grad_(row.kind == "training")
    if row.kind == "decode":
        found["ours_ms"] = our_step_ms(model, row, device, protocol)
    else:
        call = our_pass(model, config, row.kind == "training")
        _timed("ours", call, found, device, protocol)
    model.zero_grad(set_to_none=True)
    found["tokens_per_s"] = 1e3 * tokens / found["ours_ms"]
    if peer is not None:
        try:
            other = peer.model(config).requires_grad_(row.kind == "training")
            if row.kind == "decode":
                found["transformers_ms"] = peer_step_ms(peer.transformers, other, row, device)
            else:
                _timed("transformers", peer_pass(other, row, device), found, device, protocol)
            other.zero_grad(set_to_none=True)
        except Exception as error:  # its fault is no end of the others' rows
            found["failed"]["transformers"] = f"{type(error).__name__}: {str(error)[:300]}"
        found |= {"versions": peer.versions, "differences": bench_mix.DIFFERENCES}
    return found


def _timed(name: str, call: Callable[[], Any], found: dict[str, Any], device: Any, protocol: Protocol) -> None:
    call()
    growth = peak_growth(call, device)
    found["peak_gb"][name] = None if growth is None else growth / 1e9
    found[f"{name}_ms"] = median_ms([call], device, protocol)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; write the rows as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=[""], help="parts of names; rows that contain one are measured")
    parser.add_argument("--peers", nargs="+", type=Path, default=[], help="folders with packages of peers")
    parser.add_argument("--device", default="cuda", help="cuda (default), or cpu to try the script")
    parser.add_argument("--small", action="store_true", help="recipe tiny, to try the script")
    parser.add_argument("--quick", action="store_true", help="median of 3 after 1")
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args(arguments)
    sys.path.extend(str(folder) for folder in options.peers)
    rows = [row for row in (TRIAL if options.small else ROWS) if any(part in row.name for part in options.rows)]
    peer = None
    try:
        peer = Peer(options)
    except ImportError as error:
        print(f"transformers is left out: {error}")
    results: list[dict[str, Any]] = []
    model = random_model(configuration(rows[0], options)) if rows else None
    for row in rows:
        try:
            found = measure(row, peer, model, options)
        except RuntimeError as error:  # a fault of one row must not cost the others
            found = {"work": row.name, "ours_ms": None, "floor_ms": None, "goal_ms": None, "error": str(error)[:300]}
        results.append(found)
        what = f"{found.get('peak_gb')} GB {found.get('failed')} {found.get('error', '')}"
        print(f"{row.name}: {found['ours_ms']} ms, transformers {found.get('transformers_ms')}, {what}", flush=True)
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
    if options.json:
        options.json.write_text(json.dumps({"rows": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
