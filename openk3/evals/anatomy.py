"""What happens inside a model on given text: expert load, depth attention, KDA memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from openk3.inputs.packed import Packed
from openk3.model.k3 import K3
from openk3.model.trace import Recorder


@torch.no_grad()
def look_inside(model: K3, batches: Sequence[Packed]) -> dict[str, Any]:
    """`expert_load`, `depth` and `decay` as plain JSON values, over all tokens of `batches`.

    expert_load: per MoE layer every expert's share of the tokens over the mean share. depth: mean weight of each read
    on each source, None where it does not see it. decay: per KDA layer the tokens in which a state channel halves
    (ln 2 / -g): 10 %, median and 90 % over tokens, heads and channels. Layers are numbered from 1.
    """
    loads: dict[int, torch.Tensor] = {}
    weights: dict[tuple[int, str], torch.Tensor] = {}
    decays: dict[int, torch.Tensor] = {}
    for packed in batches:
        recorder = Recorder()
        model.hidden(packed.to(model.embed.weight.device), trace=recorder)
        for layer, routes in recorder.routes.items():
            experts = recorder.scores[layer].shape[1]
            load_E = torch.bincount(routes.expert_ids_Tk.flatten(), minlength=experts)
            loads[layer] = loads.get(layer, torch.zeros_like(load_E)) + load_E
        for read, probs_TL in recorder.depths.items():
            sums_L = probs_TL.double().sum(0)
            weights[read] = weights.get(read, torch.zeros_like(sums_L)) + sums_L
        for layer, g_THK in recorder.decays.items():
            decays[layer] = g_THK  # one batch holds enough of them
    return {"expert_load": _load(loads), "depth": _depth(weights), "decay": _decay(decays)}


def bias_spread(model: K3) -> float:
    """Largest router bias minus the smallest one, in the layer where that is most; 0 without routers."""
    biases = [buffer for name, buffer in model.named_buffers() if name.endswith("router.bias")]
    return max((float(bias.max() - bias.min()) for bias in biases), default=0.0)


def _load(loads: dict[int, torch.Tensor]) -> dict[str, Any] | None:
    if not loads:
        return None
    layers = sorted(loads)
    rows = [(loads[layer] / loads[layer].double().mean()).tolist() for layer in layers]
    return {"layers": [layer + 1 for layer in layers], "load": rows}


def _depth(weights: dict[tuple[int, str], torch.Tensor]) -> dict[str, Any]:
    """Reads in the order in which the forward pass makes them."""
    order = {"mixer": 0, "ffn": 1, "output": 2}
    reads = sorted(weights, key=lambda read: (read[1] == "output", read[0], order[read[1]]))
    width = max((len(weights[read]) for read in reads), default=0)
    rows = []
    for read in reads:
        mean = (weights[read] / weights[read].sum()).tolist()
        rows.append(mean + [None] * (width - len(mean)))
    names = ["output" if site == "output" else f"{layer + 1} {site}" for layer, site in reads]
    return {"reads": names, "sources": ["embed", *(f"block {n}" for n in range(1, width))], "weights": rows}


def _decay(decays: dict[int, torch.Tensor]) -> list[dict[str, Any]]:
    rows = []
    for layer in sorted(decays):
        rate = -decays[layer].double().flatten()
        ordered = rate.sort().values
        # A channel that hardly decays has a half-life without end; the chart stops at a million tokens.
        low, middle, high = (
            min(math.log(2) / max(float(ordered[int(q * (len(ordered) - 1))]), 1e-12), 1e6) for q in (0.9, 0.5, 0.1)
        )
        rows.append({"name": f"layer {layer + 1}", "low": low, "middle": middle, "high": high})
    return rows
