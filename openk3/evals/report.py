"""report.html: one self-contained page about a run, made from its metrics.jsonl and report.json alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from openk3.evals.report_style import STYLE
from openk3.evals.svg import Axes, Level, Range, Series, heat_map, line_chart, number, range_chart
from openk3.runtime.run_folder import RunFolder, write_atomic

Data = Mapping[str, Any]
Steps = Sequence[Mapping[str, Any]]


def write_report(run: RunFolder) -> Path:
    """Read the run's report.json and metrics.jsonl and write report.html; returns its path."""
    data = json.loads((run.path / "report.json").read_text(encoding="utf-8"))
    lines = run.metrics.read_text(encoding="utf-8").splitlines()
    html = page(data, [json.loads(line) for line in lines if line.strip()])
    write_atomic(run.report, lambda temporary: temporary.write_text(html, encoding="utf-8"))
    return run.report


def page(data: Data, steps: Steps) -> str:
    """The whole page. `data` is report.json's content; parts that it lacks are left out of the page."""
    sections: list[tuple[str, Callable[[Data, Steps], str]]] = [
        ("", _targets),
        ("Learning", _learning),
        ("Images", _captions),
        ("Samples", _samples),
        ("Conversation", _chat),
        ("Routing", _routing),
        ("Depth and memory", _depth),
        ("Cost", _cost),
    ]
    body = "".join(_section(title, draw(data, steps)) for title, draw in sections)
    title = escape(data.get("title", "openk3 run"))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><style>{STYLE}</style></head>'
        f"<body><header><h1>{title}</h1><p>{escape(data.get('subtitle', ''))}</p></header>"
        f"<main>{body}</main></body></html>\n"
    )


def _section(title: str, body: str) -> str:
    if not body:
        return ""
    heading = f"<h2>{escape(title)}</h2>" if title else ""
    return f"<section>{heading}{body}</section>"


def _figure(svg: str, caption: str, note: str = "") -> str:
    small = f"<small>{escape(note)}</small>" if note else ""
    return f"<figure><figcaption>{escape(caption)}</figcaption>{svg}{small}</figure>"


def _grid(figures: Sequence[str]) -> str:
    return f'<div class="grid">{"".join(figures)}</div>' if figures else ""


def column(steps: Steps, name: str) -> list[tuple[float, float]]:
    """(step, value) wherever a step recorded `name`."""
    return [(float(s["step"]), float(s[name])) for s in steps if s.get(name) is not None]


def _targets(data: Data, steps: Steps) -> str:
    """One tile per target: what was measured, what was asked, whether it was met."""
    tiles = []
    for target in data.get("targets", ()):
        met = target["met"]
        mark = "met" if met else "missed"
        tiles.append(
            f'<div class="tile {mark}"><b>{escape(target["value"])}</b><span>{escape(target["name"])}</span>'
            f"<small>{'✓' if met else '✗'} target: {escape(target['target'])}</small></div>"
        )
    return f'<div class="tiles">{"".join(tiles)}</div>' if tiles else ""


def _learning(data: Data, steps: Steps) -> str:
    unigram = data.get("unigram_entropy")
    levels = [Level("unigram entropy", unigram)] if unigram else []
    losses = [Series("next token", column(steps, "lm")), Series("MTP (token after)", column(steps, "mtp"))]
    losses = [s for s in losses if s.points]
    figures = [
        _figure(
            line_chart("Training loss", losses, Axes("step", "nats per token", levels=levels)),
            "Training loss",
            "Text, images and conversations in one objective.",
        )
    ]
    orders = data.get("byte_model") or []
    levels = [Level(f"order-{n} byte model", bits) for n, bits in enumerate(orders) if n in (1, 2, 3, 5)]
    held_out = column(steps, "val_bpb")
    if held_out or levels:
        series = [Series("held-out text", held_out, dots=True)]
        cap = max(orders[1] * 1.15, 4.0) if len(orders) > 1 else None
        axes = Axes("step", "bits per byte", levels=levels, cap=cap)
        figures.append(
            _figure(
                line_chart("Held-out bits per byte", series, axes),
                "Held-out bits per byte",
                "Dashed: Witten-Bell models, which count what followed each 1, 2, 3 or 5 bytes.",
            )
        )
    rates = [Series("learning rate", column(steps, "lr"))]
    lengths = [Series("sequence length", column(steps, "seq_len"))]
    figures += [
        _figure(line_chart(title, series, Axes("step", unit, low=0.0)), title)
        for title, unit, series in (("Learning rate", "per step", rates), ("Sequence length", "tokens", lengths))
        if series[0].points
    ]
    return _grid(figures)


def _captions(data: Data, steps: Steps) -> str:
    """The caption test in figures, and images with what the model wrote about them."""
    captions = data.get("captions")
    if not captions:
        return ""
    rows = [
        [kind, number(row["right"]), number(row["wrong"]), f"{100 * (1 - row['right'] / row['wrong']):z.0f} %"]
        for kind, row in captions["by_kind"].items()
    ]
    table = _table(["kind", "right image", "another image", "lower by"], rows)
    cards = []
    for item in captions.get("items", ()):
        redrawn = item.get("redrawn")
        second = f'<img src="{escape(redrawn)}" alt="drawn from the answer">' if redrawn else ""
        same = "same" if item["written"].strip() == item["text"].strip() else "other"
        cards.append(
            f'<div class="card"><div class="pair"><img src="{escape(item["image"])}" alt="">{second}</div>'
            f'<code>{escape(item["text"])}</code><code class="{same}">{escape(item["written"])}</code></div>'
        )
    note = (
        "<p>Loss in nats per caption token on images never trained on. Cards: the image, the text that made it, and"
        " the model's answer when shown the image, drawn beside the original where it describes a picture.</p>"
    )
    return f'{note}<div class="wide">{table}</div><div class="cards">{"".join(cards)}</div>'


def _samples(data: Data, steps: Steps) -> str:
    samples = data.get("samples")
    if not samples:
        return ""
    blocks = []
    for sample in samples:
        prompt, text = escape(sample.get("prompt", "")), escape(sample["text"])
        blocks.append(f"<pre><span class=prompt>{prompt}</span>{text}</pre>")
    share = data.get("python_share")
    note = f"<p>{100 * share:.0f} % of the sampled lines tokenise as Python.</p>" if share is not None else ""
    return note + _grid(blocks)


def _chat(data: Data, steps: Steps) -> str:
    """Questions about held-out docstrings, with the reasoning and the answer."""
    turns = data.get("chat")
    if not turns:
        return ""
    blocks = [
        f"<pre><b>{escape(turn['question'])}</b>\n<span class=prompt>{escape(turn['think'])}</span>\n"
        f"{escape(turn['response'])}</pre>"
        for turn in turns
    ]
    note = f"<p>{100 * data['chat_closed']:.0f} % of the answers close their channels and end their message.</p>"
    return note + _grid(blocks)


def _routing(data: Data, steps: Steps) -> str:
    figures = []
    load = column(steps, "max_load")
    if load:
        axes = Axes("step", "max / mean", low=1.0, cap=4.0, levels=[Level("target", 1.2)])
        figures.append(
            _figure(
                line_chart("Expert load", [Series("busiest expert, worst layer", load)], axes),
                "Expert load while training",
                "Tokens of the busiest expert over the mean, in the worst layer; 1 is perfect balance.",
            )
        )
    spread = column(steps, "bias_spread")
    if spread:
        axes = Axes("step", "score units", low=0.0)
        figures.append(
            _figure(
                line_chart("Bias spread", [Series("largest minus smallest bias", spread)], axes),
                "Router biases",
                "Quantile Balancing sets them anew after every step; they choose experts and never weigh them.",
            )
        )
    heat = data.get("expert_load")
    if heat:
        rows = [f"layer {layer}" for layer in heat["layers"]]
        columns = [str(i + 1) for i in range(len(heat["load"][0]))]
        figures.append(
            _figure(
                heat_map("Load of every expert", rows, columns, heat["load"], 2.0),
                "Load of every expert at the end",
                "Tokens of the next batches over the mean: half colour is the mean, full colour is twice that.",
            )
        )
    return _grid(figures)


def _depth(data: Data, steps: Steps) -> str:
    figures = []
    depth = data.get("depth")
    if depth:
        figures.append(
            _figure(
                heat_map("Depth attention", depth["reads"], depth["sources"], _nan(depth["weights"]), 1.0),
                "Depth attention",
                "Mean weight of each read on its sources: the embedding, finished blocks, and the running block.",
            )
        )
    decay = data.get("decay")
    if decay:
        rows = [Range(row["name"], row["low"], row["middle"], row["high"]) for row in decay]
        figures.append(
            _figure(
                range_chart("KDA memory", rows, "half-life, tokens"),
                "How long KDA remembers",
                "Tokens until a state channel has lost half: 10 %, median and 90 % over channels, heads and tokens.",
            )
        )
    return _grid(figures)


def _cost(data: Data, steps: Steps) -> str:
    """Parameters by part, then where the time went."""
    cost = data.get("cost")
    if not cost:
        return ""
    parts = [[name, number(total), number(active)] for name, total, active in cost["components"]]
    total = _table(["part", "parameters", "used per token"], parts)
    facts = _table(["figure", "value"], [[name, value] for name, value in cost["facts"]])
    seconds = _table(["stage", "seconds"], [[name, f"{value:.1f}"] for name, value in cost["seconds"]])
    return f'<div class="grid">{_wide(total)}{_wide(facts)}{_wide(seconds)}</div>'


def _wide(table: str) -> str:
    return f'<div class="wide">{table}</div>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _nan(rows: Sequence[Sequence[float | None]]) -> list[list[float]]:
    """JSON has no NaN: null stands for it."""
    return [[float("nan") if value is None else value for value in row] for row in rows]
