"""`openk3 quickstart`: gather, render, train, examine and report a small true K3 on this machine, in minutes."""

from __future__ import annotations

import dataclasses
import logging
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from openk3.commands.errors import UserError
from openk3.commands.runs import new_run
from openk3.config.train import PretrainConfig
from openk3.data.documents import Encoder
from openk3.data.local_mix import Mix, tokenizer_texts, write_mix
from openk3.data.local_text import Corpus, even_sample, gather
from openk3.evals.anatomy import bias_spread, look_inside
from openk3.evals.byte_model import ByteModel
from openk3.evals.examine import (
    Subject,
    examine_captions,
    examine_chat,
    examine_samples,
    examine_text,
    held_out_windows,
    targets,
)
from openk3.evals.report import write_report
from openk3.inputs.tokenizer import Tokenizer
from openk3.model.accounting import account
from openk3.optim.optimizer import NonFiniteGradient
from openk3.recipes import quickstart as recipe
from openk3.runtime.cpu import tune_cpu
from openk3.runtime.log import setup_logging
from openk3.runtime.metrics import read_metrics
from openk3.runtime.run_folder import RunFolder, write_json
from openk3.runtime.staging import staged_folder
from openk3.train.pretrain import pretrain
from openk3.train.state import TrainState
from openk3.train.validate import token_bytes, validate

if TYPE_CHECKING:
    from openk3.commands.flags import Quickstart

MIN_MINUTES = 0.5
LOAD_STEPS = 16  # batches after the last one trained on, over which the expert load at the end is counted
log = logging.getLogger(__name__)


def run(flags: Quickstart) -> None:
    """The whole story. Ctrl-C while training saves a run that `openk3 pretrain --resume` continues."""
    clock = Clock()
    setup_logging()
    cores = torch.get_num_threads()
    torch.set_num_threads(1)
    tune_cpu()
    folder = open_folder(flags)
    plan = recipe.plan(flags.minutes)
    material = prepare(flags, plan, folder, clock)
    state = train(flags, plan, material, clock, cores)
    if state.interrupted:
        print(f"\nstopped at step {state.step} of {state.total_steps}; go on with:")
        print(f"  openk3 pretrain --resume {shlex.quote(str(folder.path))}")
        return
    data = examine(flags, plan, material, state, clock)
    write_json(folder.path / "report.json", data)
    report = write_report(folder)
    print("\n".join(summary(data, folder, report)))


class Clock:
    """Seconds since the process began to work, and how they were spent."""

    def __init__(self) -> None:
        # Importing is single-threaded, so that its processor time is about its wall time.
        self._began = time.perf_counter() - time.process_time()
        self._last = self._began
        self.spent: list[tuple[str, float]] = []
        self.lap("start")

    @property
    def elapsed(self) -> float:
        """All of it."""
        return time.perf_counter() - self._began

    def lap(self, name: str) -> float:
        """Book the time since the last lap under `name`."""
        now = time.perf_counter()
        self.spent.append((name, now - self._last))
        self._last = now
        return self.spent[-1][1]


@dataclasses.dataclass(frozen=True)
class Material:
    """What training and examination work with."""

    folder: RunFolder
    corpus: Corpus
    mix: Mix
    tokenizer: Tokenizer
    byte_model: ByteModel


def open_folder(flags: Quickstart) -> RunFolder:
    """The run folder to make. Raises UserError for one that is taken, and for too little time."""
    if not flags.minutes >= MIN_MINUTES:
        raise UserError(f"--minutes: must be at least {MIN_MINUTES}, got {flags.minutes:g}")
    folder = RunFolder.at(flags.out or new_run())
    if folder.is_run:
        raise UserError(
            f"--out {folder.path}: already holds a run; choose another folder, or `openk3 pretrain --resume`"
        )
    return folder


def prepare(flags: Quickstart, plan: recipe.Plan, folder: RunFolder, clock: Clock) -> Material:
    """Gather the text, write the training mix, train the tokenizer and count the byte models."""
    corpus = gather(() if flags.text is None else (flags.text,), max_bytes=plan.max_text_bytes)
    log.info(
        f"text: {corpus.source}, {len(corpus.train):,} files and {corpus.train_bytes / 1e6:.1f} MB to train on,"
        f" {len(corpus.held_out):,} files held out"
    )
    clock.lap("gather text")
    target = folder.path / "data"
    with staged_folder(target, may_replace=lambda path: False) as staging:
        write_mix(
            Mix.at(staging, recipe.SHARES),
            corpus,
            num_images=plan.num_images,
            num_conversations=plan.num_conversations,
            seed=flags.seed,
        )
    mix = Mix.at(target, recipe.SHARES)
    clock.lap("render images, write the mix")
    tokenizer = Tokenizer.train(tokenizer_texts(mix, corpus, plan.tokenizer_bytes), recipe.VOCAB)
    log.info(f"tokenizer: {tokenizer.num_ranks:,} tokens and {len(tokenizer.special)} control tokens")
    clock.lap("train the tokenizer")
    byte_model = ByteModel.fit(file.text for file in corpus.train)
    clock.lap("count the byte models")
    return Material(folder, corpus, mix, tokenizer, byte_model)


def run_config(flags: Quickstart, material: Material, seconds: float) -> PretrainConfig:
    """The recipe with this run's files, folder, seed and time for training."""
    base = recipe.pretrain(flags.minutes)
    held_out = (str(material.mix.held_out.resolve()),)
    data = dataclasses.replace(
        base.data, paths=material.mix.paths, weights=material.mix.shares, held_out_paths=held_out
    )
    return dataclasses.replace(
        base, data=data, out=str(material.folder.path), minutes=max(seconds, 5.0) / 60, seed=flags.seed
    )


def train(flags: Quickstart, plan: recipe.Plan, material: Material, clock: Clock, cores: int) -> TrainState:
    """Pretrain for the time that examination leaves. Raises UserError if the loss diverged."""
    seconds = 60 * flags.minutes - clock.elapsed - plan.evaluation_seconds
    config = run_config(flags, material, seconds)
    config = dataclasses.replace(config, workers=min(config.workers, cores))
    books = account(config.model)
    log.info(f"model: {books.total + books.mtp:,} parameters, {books.activated:,} active; training for {seconds:.0f} s")
    curve = Curve(material, plan.curve_seconds, config.validation.max_tokens)
    try:
        state = pretrain(config, tokenizer=material.tokenizer, on_step=curve)
    except NonFiniteGradient as error:
        raise UserError(f"{config.out}: training diverged ({error}); try another --seed") from error
    clock.lap("train")
    return state


class Curve:
    """Called after every step: adds the spread of the router biases, and now and then held-out bits per byte."""

    def __init__(self, material: Material, every_seconds: float, max_tokens: int) -> None:
        self.material, self.every, self.max_tokens = material, every_seconds, max_tokens
        self.due = time.perf_counter() + every_seconds / 2
        self._token_bytes_V = token_bytes(material.tokenizer)
        self._batches: dict[int, Any] = {}

    def __call__(self, state: TrainState, values: dict[str, float]) -> None:
        """Measure at the window length that training has reached."""
        values["bias_spread"] = bias_spread(state.model)
        if time.perf_counter() < self.due or "val_bpb" in values:
            return
        if state.seq_len not in self._batches:
            self._batches[state.seq_len] = held_out_windows(
                subject_of(self.material, state, state.seq_len), self.max_tokens
            )
        values["val_bpb"] = validate(state.model, self._batches[state.seq_len], self._token_bytes_V).bits_per_byte
        self.due = time.perf_counter() + self.every


def subject_of(material: Material, state: TrainState, window: int, held_out_bytes: int = 1 << 40) -> Subject:
    """The model in training, its held-out text, and the byte model to beat."""
    encoder = Encoder(material.tokenizer, vision=state.config.model.vision)
    held_out = even_sample(material.corpus.held_out, held_out_bytes)
    return Subject(state.model, encoder, held_out, material.byte_model, window, state.config.seed)


def examine(
    flags: Quickstart, plan: recipe.Plan, material: Material, state: TrainState, clock: Clock
) -> dict[str, Any]:
    """Everything that the report shows, as plain JSON values."""
    rows = read_metrics(material.folder.metrics)
    plan = recipe.fitted(plan, state.tokens / sum(row["seconds"] for row in rows))
    subject = subject_of(material, state, recipe.LONG_WINDOW, plan.held_out_bytes)
    data = examine_text(subject)
    assert state.loader is not None
    unread = [packed for _ in range(LOAD_STEPS) for packed in state.loader.batch(state.seq_len)]
    data |= look_inside(state.model, unread)
    clock.lap("examine: held-out text")
    data["captions"] = examine_captions(subject, plan.num_captions)
    clock.lap("examine: images")
    data |= examine_samples(subject, plan.num_samples, plan.sample_tokens)
    data |= examine_chat(subject, plan.num_samples, 2 * plan.sample_tokens)
    clock.lap("examine: samples")
    python = sum(file.num_bytes for file in material.corpus.train if file.name.partition("#")[0].endswith(".py"))
    is_python = python > material.corpus.train_bytes / 2
    data["targets"] = targets(data, flags.minutes, is_python)
    if not is_python:
        del data["python_share"]
    data["cost"] = cost(material, state, rows, clock)
    data["title"] = "A small Kimi K3, trained from scratch"
    data["subtitle"] = (
        f"{material.corpus.source}; {flags.minutes:g} min on {state.config.workers} CPU cores, seed {flags.seed}"
    )
    return data


def cost(material: Material, state: TrainState, rows: list[dict[str, Any]], clock: Clock) -> dict[str, Any]:
    """The books: parameters by part, figures of the run, and where the seconds went."""
    books = account(state.config.model)
    components = [[part.name, part.total, part.activated] for part in books.components]
    if books.mtp:
        components.append([books.mtp_layer.name, books.mtp_layer.total, 0])
    busy = sum(row["seconds"] for row in rows)
    flops = sum(row["tokens"] * books.training_flops(int(row["seq_len"])).total for row in rows)
    facts = [
        ["parameters", f"{books.total + books.mtp:,}"],
        ["activated by one token", f"{books.activated:,}"],
        ["training tokens", f"{state.tokens:,}"],
        ["tokens per second", f"{state.tokens / busy:,.0f}"],
        ["training FLOPs per token", f"{flops / state.tokens:.3g}"],
        ["training FLOPs", f"{flops:.3g}"],
        ["FLOP/s reached", f"{flops / busy:.3g}"],
        ["steps", f"{state.step:,}"],
        ["text gathered", f"{material.corpus.train_bytes / 1e6:.1f} MB"],
        ["text tokens seen", f"{recipe.SHARES[0] * state.tokens:,.0f}"],
    ]
    return {"components": components, "facts": facts, "seconds": [*clock.spent, ("total so far", clock.elapsed)]}


def summary(data: dict[str, Any], folder: RunFolder, report: Path) -> list[str]:
    """What was reached beside what was aimed at, where it lies, and what to do next."""
    minutes = data["cost"]["seconds"][-1][1] / 60
    short = " (aims are for 8 minutes; with less time, only that of text is easier)" if minutes < 7 else ""
    lines = ["", f"after {minutes:.1f} minutes{short}:"]
    for target in data["targets"]:
        mark = "met   " if target["met"] else "missed"
        lines.append(f"  {mark}  {target['name']:<42}{target['value']:>7}   ({target['target']})")
    name, longer = shlex.quote(str(folder.path)), max(20, 2 * round(minutes))  # in all, with those of this run
    lines += ["", f"model:  {folder.model}", f"report: {report}", "", "next:"]
    lines += [
        f"  openk3 chat {name}",
        f"  openk3 pretrain --resume {name} --minutes {longer:g}",
        f"  openk3 plan {name}",
    ]
    return lines
