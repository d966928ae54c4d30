"""Decoding without a server: one CUDA graph a step, by batch and context, beside the floor of weights and cache.

    python benchmarks/decode.py                       # recipes small and medium
    python benchmarks/decode.py --rows "small, batch 1,"
    python benchmarks/decode.py --device cpu --small  # tries the script: recipe tiny, plain PyTorch

Random weights and caches of the given length. The floor is what a step must move at the copy rate of the same run: the
weights of the experts that the tokens choose (so many different ones as even choices give) and all others once, states
read and written, latents read.
"""

from __future__ import annotations

import gc
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import row_flags  # noqa: E402
import torch  # noqa: E402
from kda_timing import Protocol, copy_rate, median_ms  # noqa: E402

from openk3 import recipes  # noqa: E402
from openk3.commands.bench import random_model  # noqa: E402
from openk3.config.train import PretrainConfig  # noqa: E402
from openk3.model.accounting import account, expert_size  # noqa: E402
from openk3.model.decoder import Decoder  # noqa: E402
from openk3.model.k3 import K3  # noqa: E402

GOAL = 0.65  # of the floor's speed, at batch 1 of recipe small


@dataclass(frozen=True)
class Row:
    """A step of `batch` sequences that have `context` tokens each."""

    recipe: str
    batch: int
    context: int

    @property
    def name(self) -> str:
        """As in results."""
        return f"decode {self.recipe}, batch {self.batch}, context {self.context}"

    def moved(self) -> dict[str, float]:
        """Bytes of weights, of states and of latents, bfloat16 and float32 states."""
        config = recipes.model(self.recipe)
        text, books = config.text, account(config)
        layers = sum(text.is_moe_layer(i) for i in range(text.num_hidden_layers))
        chosen = text.num_experts * (1 - (1 - text.num_experts_per_token / text.num_experts) ** self.batch)
        weights = books.activated + layers * (chosen - text.num_experts_per_token) * expert_size(text)
        states = 2 * self.batch * books.state_bytes_per_request()
        return {
            "weights_gb": 2 * weights / 1e9,
            "states_gb": states / 1e9,
            "latents_gb": self.batch * self.context * books.latent_bytes_per_token() / 1e9,
        }


SMALL = [(batch, 4096) for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256)]
SMALL += [(batch, 32768) for batch in (1, 8, 64, 256)] + [(1, 131072), (1, 1048576)]
MEDIUM = [(batch, 4096) for batch in (1, 8, 64, 256)] + [(1, 32768)]
ROWS = [Row("small", *sizes) for sizes in SMALL] + [Row("medium", *sizes) for sizes in MEDIUM]
TRIAL = [Row("tiny", 1, 32), Row("tiny", 3, 32)]


@torch.no_grad()
def measure(row: Row, device: torch.device, protocol: Protocol, rate: float, model: K3) -> dict[str, Any]:
    """Milliseconds of a step, and its floor."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    steps = protocol.repeats + protocol.warmups + 2
    decoder = Decoder(model, slots=row.batch, max_tokens=row.context + steps)
    decoder.cache.length_R[: row.batch] = row.context
    decoder.lengths = [row.context] * row.batch
    slots = list(range(row.batch))
    decoder.step(slots, [0] * row.batch)
    took = median_ms([lambda: decoder.step(slots)], device, protocol)
    moved = row.moved()
    floor = 1e12 * sum(moved.values()) / rate
    goal = floor / GOAL if (row.recipe, row.batch) == ("small", 1) else None
    found = {"work": row.name, "ours_ms": took, "floor_ms": floor, "goal_ms": goal}
    found |= {"tokens_per_s": 1e3 * row.batch / took, "of_floor": floor / took, **moved}
    if device.type == "cuda":
        found["peak_gb"] = torch.cuda.max_memory_allocated(device) / 1e9
    return found


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; write the rows as JSON if asked to."""
    options = row_flags.parse(__doc__, arguments, small="recipe tiny, to try the script")
    device = torch.device(options.device)
    protocol = Protocol(5, 2) if options.quick or options.small else Protocol()
    rate = copy_rate(device, protocol)
    results: list[dict[str, Any]] = []
    built, model = "", None
    for row in [row for row in (TRIAL if options.small else ROWS) if any(part in row.name for part in options.rows)]:
        if row.recipe != built:
            built, model = row.recipe, None
            config = recipes.pretrain(row.recipe)
            changes = {"device": options.device, "dtype": "bfloat16" if device.type == "cuda" else "float32"}
            model = random_model(PretrainConfig.from_dict(config.to_dict() | changes))
        assert model is not None
        try:
            found = measure(row, device, protocol, rate, model)
            print(f"{row.name}: {found['ours_ms']:.3f} ms, {found['of_floor']:.1%} of the floor", flush=True)
        except RuntimeError as error:  # a fault of one row must not cost the others
            found = {"work": row.name, "ours_ms": None, "floor_ms": None, "goal_ms": None, "error": str(error)[:300]}
            print(f"{row.name}: {found['error']}", flush=True)
        results.append(found)
        gc.collect()
    if options.json:
        options.json.write_text(json.dumps({"copy_tb_s": rate / 1e12, "rows": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
