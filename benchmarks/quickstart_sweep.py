"""Try variants of the quickstart recipe side by side, each on cores of its own, and print one table.

    python benchmarks/quickstart_sweep.py --minutes 8 --out /tmp/sweep base "low=optim.lr=4e-3" "deep=layers=12"

A variant is a name, or NAME=FIELD=VALUE[,FIELD=VALUE...]: fields of the recipe's PretrainConfig in dotted form, plus
`vocab`, `shares` (three numbers joined by +), `layers` (a 3:1 schedule of that many), `experts` (count+chosen), `width`
and `batch` (tokens of a step of two micro-batches).
Without variants the list DEFAULT is run. As many run at a time as the machine has pairs of cores.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

DEFAULT = (
    "base",
    "lr1.0=optim.lr=1e-2",
    "lr2.2=optim.lr=2.2e-2",
    "adam2=optim.adamw_lr_scale=2.0",
    "adam.5=optim.adamw_lr_scale=0.5",
    "minlr=optim.min_lr=1e-4",
    "batch1k=batch=1024",
    "batch4k=batch=4096",
    "top2=experts=16+2",
    "vocab2.3k=vocab=2304",
    "vocab4.3k=vocab=4352",
    "layers6=layers=6",
    "width160=width=160",
    "text85=shares=0.85+0.09+0.06",
    "image20=shares=0.70+0.20+0.10",
    "ema.5=balance.ema=0.5",
)


def main() -> None:
    """Parent: start every variant on its own cores, wait, print. Child (--child): run one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="*", default=DEFAULT)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--cores", type=int, default=2, help="cores of each variant")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        run_variant(options.variants[0], options)
        return
    sweep(options)
    print(table(options))


def sweep(options: argparse.Namespace) -> None:
    """Run all variants, as many at a time as there are groups of free cores."""
    cores = sorted(os.sched_getaffinity(0))
    groups = [cores[i : i + options.cores] for i in range(0, len(cores) - options.cores + 1, options.cores)]
    options.out.mkdir(parents=True, exist_ok=True)
    waiting, running = list(options.variants), {}
    while waiting or running:
        while waiting and groups:
            variant, group = waiting.pop(0), groups.pop(0)
            running[start(variant, group, options)] = group
        for process in [p for p in running if p.poll() is not None]:
            groups.append(running.pop(process))
        time.sleep(0.2)


def start(variant: str, group: list[int], options: argparse.Namespace) -> subprocess.Popen[bytes]:
    """One variant as a process of its own on the given cores; its output goes to NAME.log."""
    command = [sys.executable, __file__, "--child", variant]
    command += ["--minutes", str(options.minutes), "--out", str(options.out), "--seed", str(options.seed)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(len(group)), "OMP_WAIT_POLICY": "PASSIVE"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    with (options.out / f"{name_of(variant)}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    os.sched_setaffinity(process.pid, group)
    return process


def name_of(variant: str) -> str:
    """The part before the first '='."""
    return variant.partition("=")[0]


def run_variant(variant: str, options: argparse.Namespace) -> None:
    """Apply the variant's changes to the recipe, then run the command itself."""
    from openk3.commands import quickstart
    from openk3.recipes import quickstart as recipe

    config, changes = recipe.pretrain(options.minutes), variant.partition("=")[2]
    for change in filter(None, changes.split(",")):
        field, _, text = change.partition("=")
        if field == "shares":
            recipe.SHARES = tuple(float(part) for part in text.split("+"))
        elif field == "vocab":
            recipe.VOCAB = int(text)
        else:
            config = replaced(config, field, text)
    recipe.pretrain = lambda minutes: config
    quickstart.run(
        SimpleNamespace(minutes=options.minutes, text=None, out=options.out / name_of(variant), seed=options.seed)
    )


def replaced(config: Any, field: str, text: str) -> Any:
    """A copy of the configuration with one dotted field set, or what one of the short names stands for."""
    from openk3.config.model import schedule

    model = config.model
    if field == "layers":
        kda, full = schedule(int(text))
        linear = dataclasses.replace(model.text.linear_attn_config, kda_layers=kda, full_attn_layers=full)
        return with_model(config, num_hidden_layers=int(text), linear_attn_config=linear)
    if field == "experts":
        count, chosen = text.split("+")
        return with_model(config, num_experts=int(count), num_experts_per_token=int(chosen))
    if field == "width":
        vision = dataclasses.replace(model.vision, text_hidden_size=int(text))
        text_part = dataclasses.replace(model.text, hidden_size=int(text))
        return dataclasses.replace(config, model=dataclasses.replace(model, text=text_part, vision=vision))
    if field == "batch":
        data = dataclasses.replace(config.data, batch_tokens=int(text), micro_batch_tokens=int(text) // 2)
        return dataclasses.replace(config, data=data)
    return with_value(config, field, ast.literal_eval(text.replace("+", ",")))


def with_model(config: Any, **changes: Any) -> Any:
    """A copy with fields of the text model changed together."""
    return dataclasses.replace(config, model=config.model.replace_text(**changes))


def with_value(config: Any, field: str, value: Any) -> Any:
    """A copy with one dotted field set."""
    head, _, rest = field.partition(".")
    if rest:
        value = with_value(getattr(config, head), rest, value)
    return dataclasses.replace(config, **{head: value})


def table(options: argparse.Namespace) -> str:
    """One line per variant: parameters, steps, speed, and the figures of the targets."""
    head = (
        "variant",
        "Mparam",
        "steps",
        "tok/s",
        "Mtok",
        "bpb",
        "order5",
        "caption",
        "MTP",
        "load",
        "python",
        "chat",
        "min",
    )
    rows = ["  ".join(f"{cell:>9}" for cell in head)]
    for variant in options.variants:
        folder = options.out / name_of(variant)
        try:
            data = json.loads((folder / "report.json").read_text())
            lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        except OSError:
            log = (options.out / f"{name_of(variant)}.log").read_text(errors="replace").strip().splitlines()
            rows.append(f"{name_of(variant):>9}  failed: {log[-1][:120] if log else 'no output'}")
            continue
        facts = dict(data["cost"]["facts"])
        captions, tokens = data["captions"], sum(line["tokens"] for line in lines)
        load = max(max(row) for row in data["expert_load"]["load"])
        cells = (
            name_of(variant),
            f"{int(facts['parameters'].replace(',', '')) / 1e6:.2f}",
            str(len(lines)),
            f"{tokens / sum(line['seconds'] for line in lines):.0f}",
            f"{tokens / 1e6:.2f}",
            f"{data['bits_per_byte']:.3f}",
            f"{data['byte_model'][5]:.3f}",
            f"{100 * (1 - captions['right'] / captions['wrong']):.0f}%",
            f"{data['mtp_loss']:.2f}",
            f"{load:.2f}",
            f"{100 * data.get('python_share', 0):.0f}%",
            f"{100 * data['chat_closed']:.0f}%",
            f"{data['cost']['seconds'][-1][1] / 60:.1f}",
        )
        rows.append("  ".join(f"{cell:>9}" for cell in cells))
    return "\n".join(rows)


if __name__ == "__main__":
    main()
