"""pretrain(config): tokenizer, data and state, the loop of steps with metrics and checkpoints, and the export."""

from __future__ import annotations

import dataclasses
import logging
import sys
import time
from collections.abc import Callable, Sequence

from tqdm import tqdm

from openk3.config.model import ConfigError
from openk3.config.train import PretrainConfig
from openk3.data.ahead import Ahead
from openk3.data.documents import DataError, Encoder
from openk3.data.loader import Loader
from openk3.data.shard import open_source
from openk3.data.sources import Joined, Source, split, texts
from openk3.inputs.packed import Packed
from openk3.inputs.tokenizer import Tokenizer
from openk3.model.accounting import account
from openk3.runtime.device import pick_device
from openk3.runtime.metrics import MetricsLog, StepTimer
from openk3.runtime.run_folder import RunFolder, write_json
from openk3.train import checkpoint
from openk3.train.flops import model_flops, utilisation
from openk3.train.interrupt import StopSignals
from openk3.train.opening import Opening, open_run
from openk3.train.plan import extend, replan
from openk3.train.rounded import round_experts
from openk3.train.state import TrainState
from openk3.train.step import train_step
from openk3.train.validate import has_text, held_out_batches, token_bytes, validate

log = logging.getLogger(__name__)
OnStep = Callable[[TrainState, dict[str, float]], None]


def pretrain(
    config: PretrainConfig,
    *,
    sources: Sequence[Source] | None = None,
    held_out: Sequence[Source] | None = None,
    tokenizer: Tokenizer | None = None,
    resume: bool = False,
    on_step: OnStep | None = None,
) -> TrainState:
    """Train a K3 from scratch into the run folder `config.out`, or continue the run that is there.

    `sources` are the training records in place of `config.data.paths` (whose weights, if given, are then one per
    source); `held_out` are validation records, by default split off by the md5 of their keys. `tokenizer` replaces
    `config.data.tokenizer`. A run made from records in memory can only be resumed with the same records, so prefer
    files. `on_step(state, metrics)` is called after every step, before its line is written.

    The folder receives run.json (the configuration), tokenizer/, metrics.jsonl (on a GPU with the model FLOPs'
    utilisation and memory), checkpoints/ and, at the end, model/ in the released layout with its tokenizer. On SIGTERM
    or Ctrl-C the state is saved and returned with `interrupted` set, without an export. Returns the final state. Raises
    ConfigError, DataError, TokenizerError or CheckpointError for what the user can mend, NonFiniteGradient if the loss
    diverged.
    """
    with open_run(config.out, resume=resume) as opening:
        run = opening.run
        known = run.tokenizer if resume else config.data.tokenizer  # shards have to be encoded with it
        given = tokenizer if tokenizer is not None else Tokenizer.load(known) if known else None
        pools = list(sources) if sources is not None else [open_source(path, given) for path in config.data.paths]
        if not pools:
            raise ConfigError("data.paths: nothing to train on; name text files, JSONL files or folders of them")
        if held_out is None and config.data.held_out_paths:
            held_out = [open_source(path, given) for path in config.data.held_out_paths]
        train, held = _split(pools, held_out, config)
        tokenizer = given if resume and given is not None else _tokenizer(config, run, given, train)
        config = fit_to_tokenizer(config, tokenizer)
        encoder = Encoder(tokenizer, vision=config.model.vision, max_image_tokens=_max_image_tokens(config))
        state = TrainState.build(config, _loader(config, train, encoder))
        if resume:
            _resume(state, run)
        write_json(run.config, config.to_dict())
        try:
            _Loop(opening, state, _Validator(config, encoder, held), on_step).run()
        finally:
            if isinstance(state.loader, Ahead):
                state.loader.close()
        if not state.interrupted:
            export(state, run, tokenizer)
        return state


def _resume(state: TrainState, run: RunFolder) -> None:
    """Put the newest checkpoint into `state`, if there is one; the schedule is the configuration's."""
    saved, config = checkpoint.latest(run.checkpoints), state.config
    if saved is None:
        return
    checkpoint.load(state, saved)
    if config.minutes:
        extend(state)  # a planned number of steps is part of the state
    else:
        state.total_steps = config.steps
    if state.step < state.total_steps:
        log.info("resuming at step %d of %d from %s", state.step, state.total_steps, saved)
        return
    log.info(
        "nothing left to train: the run is at step %d and was to have %d; steps and minutes count from its start",
        state.step,
        state.total_steps,
    )


def export(state: TrainState, run: RunFolder, tokenizer: Tokenizer) -> None:
    """Write the model in the released layout, with its tokenizer, to the run's model folder."""
    state.model.save_pretrained(run.model, experts=state.config.checkpoint.experts, also=tokenizer.save)
    log.info("model written to %s", run.model)


def fit_to_tokenizer(config: PretrainConfig, tokenizer: Tokenizer) -> PretrainConfig:
    """The configuration with the tokenizer's vocabulary size and special ids."""
    special = tokenizer.special
    text = dataclasses.replace(config.model.text, vocab_size=tokenizer.vocab_size)
    model = dataclasses.replace(
        config.model,
        text=text,
        bos_token_id=special["[BOS]"],
        eos_token_id=special["<|end_of_msg|>"],
        pad_token_id=special["[PAD]"],
        media_placeholder_token_id=special["<|media_pad|>"],
    )
    return dataclasses.replace(config, model=model)


def _split(
    pools: list[Source], held_out: Sequence[Source] | None, config: PretrainConfig
) -> tuple[list[Source], Source | None]:
    """(training sources, held-out records or None)."""
    if held_out is not None:
        return pools, Joined(held_out) if held_out else None
    pairs = [split(pool, config.data.held_out_percent) for pool in pools]
    train, held = [kept for kept, _ in pairs], Joined([out for _, out in pairs])
    if not len(held):
        log.info("nothing is held out: no validation")
    return [*train], held if len(held) else None


def _tokenizer(config: PretrainConfig, run: RunFolder, given: Tokenizer | None, train: Sequence[Source]) -> Tokenizer:
    """The given tokenizer, or one trained on the training documents; kept in the run."""
    if given is None:
        log.info("training a tokenizer of %d ids", config.model.text.vocab_size)
        given = Tokenizer.train(texts(Joined(train)), config.model.text.vocab_size)
    given.save(run.tokenizer)
    return given


def _loader(config: PretrainConfig, train: Sequence[Source], encoder: Encoder) -> Loader | Ahead:
    """The batches; for a GPU they are packed by a process of their own."""
    loader = Loader(
        train,
        encoder,
        batch_tokens=config.data.batch_tokens,
        micro_batch_tokens=config.data.micro_batch_tokens,
        weights=config.data.weights,
        seed=config.seed,
    )
    return Ahead(loader) if pick_device(config.device).type == "cuda" else loader


def _max_image_tokens(config: PretrainConfig) -> int:
    """An image takes at most half of the shortest window, so that its text fits beside it."""
    return max(1, min(length for _, length in config.data.stages) // 2)


class _Validator:
    """Held-out batches, cut anew when the window length changes."""

    def __init__(self, config: PretrainConfig, encoder: Encoder, held: Source | None) -> None:
        self.config, self.encoder, self.held = config, encoder, held
        self._token_bytes_V = token_bytes(encoder.tokenizer)
        self._batches: tuple[int, list[Packed]] = (0, [])

    def due(self, step: int, last: bool) -> bool:
        """Whether this step ends with a validation."""
        every = self.config.validation.every
        return self.held is not None and (last or (every > 0 and step % every == 0))

    def measure(self, state: TrainState) -> dict[str, float]:
        """Metrics of one validation at the window length in use."""
        assert self.held is not None
        seq_len = state.seq_len
        if self._batches[0] != seq_len:
            data, limit = self.config.data, self.config.validation.max_tokens
            batches = held_out_batches(
                *(self.held, self.encoder),
                seq_len=seq_len,
                micro_batch_tokens=data.micro_batch_tokens,
                max_tokens=limit,
            )
            self._batches = (seq_len, batches)
        if not has_text(self._batches[1], self._token_bytes_V):
            log.warning("the held-out documents hold no text to predict: no validation")
            self.held = None
            return {}
        result = validate(state.model, self._batches[1], self._token_bytes_V)
        return {"val_loss": result.loss, "val_bpb": result.bits_per_byte}


class _Loop:
    """Steps until the schedule ends or a signal asks to stop."""

    def __init__(self, opening: Opening, state: TrainState, validator: _Validator, on_step: OnStep | None) -> None:
        self.opening, self.folder = opening, opening.run
        self.state, self.validator, self.on_step = state, validator, on_step
        self.config = state.config
        self.metrics = MetricsLog(self.folder.metrics, keep_through=state.step)
        self.timer = StepTimer()
        self.books = account(state.config.model)
        self.before = state.seconds
        self.outside = 0.0  # seconds per step spent on validation, checkpoints and the caller's part

    def run(self) -> None:
        """The loop; leaves a checkpoint of the last step behind."""
        state = self.state
        began = time.perf_counter()
        round_experts(state)
        with StopSignals() as signals, self._bar() as bar:
            first, busy = state.step, 0.0
            while state.step < state.total_steps and not signals.requested:
                values = self._guarded_step()
                busy += values["seconds"]
                elapsed = time.perf_counter() - began
                state.seconds, self.outside = self.before + elapsed, (elapsed - busy) / (state.step - first)
                round_experts(state)
                if self.on_step is not None:
                    self.on_step(state, values)
                self.metrics.write(state.step, values)
                self._show(bar, values)
                every = self.config.checkpoint.every
                if every and state.step % every == 0 and state.step < state.total_steps:
                    checkpoint.save(state, self.folder.checkpoints, keep=self.config.checkpoint.keep)
            state.interrupted = state.step < state.total_steps
            checkpoint.save(state, self.folder.checkpoints, keep=self.config.checkpoint.keep)
        if state.interrupted:
            log.info("stopped at step %d of %d; saved in %s", state.step, state.total_steps, self.folder.path)

    def _guarded_step(self) -> dict[str, float]:
        """One step. A document that can no longer be read ends the run, but nothing that was learnt is lost."""
        try:
            return self._step()
        except (DataError, OSError):
            if self.opening.started:
                checkpoint.save(self.state, self.folder.checkpoints, keep=self.config.checkpoint.keep)
            raise

    def _step(self) -> dict[str, float]:
        state, loader, seq_len = self.state, self.state.loader, self.state.seq_len
        assert loader is not None
        self.timer.start()
        batches = loader.batch(seq_len)
        values: dict[str, float] = {"seq_len": seq_len, **train_step(state, batches)}
        self.opening.started = True
        seconds = self.timer.stop()
        values |= {"seconds": seconds, "tokens_per_second": values["tokens"] / seconds}
        values |= utilisation(model_flops(self.books, batches), seconds, state.device)
        if self.config.minutes:
            replan(state, self.timer.typical + self.outside)
        if state.step < state.total_steps and state.seq_len != seq_len:
            self.timer.clear()
        if self.validator.due(state.step, last=state.step >= state.total_steps):
            try:
                values |= self.validator.measure(state)
            except (DataError, OSError):
                self.metrics.write(state.step, values)  # the step itself was made
                raise
        return values

    def _bar(self) -> tqdm:
        interval = 0.5 if sys.stderr.isatty() else 10.0  # a log file needs no animation
        total, step = self.state.total_steps, self.state.step
        done = step >= total
        return tqdm(total=total, initial=step, unit="step", dynamic_ncols=True, mininterval=interval, disable=done)

    def _show(self, bar: tqdm, values: dict[str, float]) -> None:
        bar.total = self.state.total_steps
        shown = {"loss": f"{values['loss']:.3f}", "tok/s": f"{values['tokens_per_second']:.0f}"}
        if "mfu" in values:
            shown["mfu"] = f"{values['mfu']:.1%}"
        if "peak_gb" in values:
            shown["GB"] = f"{values['peak_gb']:.1f}"
        if "val_bpb" in values:
            log.info("step %d: held-out bits per byte %.3f", self.state.step, values["val_bpb"])
        bar.set_postfix(shown, refresh=False)
        bar.update(1)
