"""`openk3 bench serve`: output tokens per second of an engine at several loads, with guesses and without."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from openk3.commands import bench_mix
from openk3.commands.bench_flags import BenchServe
from openk3.commands.conditions import conditions, processor
from openk3.commands.errors import UserError
from openk3.commands.generate import load_tokenizer
from openk3.commands.runs import find_model
from openk3.config.serve import CacheConfig, EngineConfig, SpeculationConfig
from openk3.data.local_text import gather
from openk3.engine.engine import Engine
from openk3.engine.request import Completion, Request, SamplingParams
from openk3.model.k3 import K3
from openk3.runtime.device import pick_device, pick_dtype
from openk3.runtime.run_folder import write_atomic, write_json

TEXT_BYTES = 1 << 20  # that prompts are cut from


def run(flags: BenchServe) -> None:
    """Measure every setting, print the table, write the record."""
    if flags.mix:
        run_mix(flags)
        return
    check(flags)
    directory = find_model(flags.run)
    device = pick_device(flags.device)
    model = K3.from_pretrained(directory, dtype=pick_dtype(flags.dtype, device), device=device).requires_grad_(False)
    if "mtp" in flags.drafts and model.mtp is None:
        raise UserError(f"--drafts mtp: {directory} has no MTP layer; name others (--drafts off ngram)")
    corpus = gather(() if flags.text is None else [flags.text], max_bytes=TEXT_BYTES)
    text = "\n".join(file.text for file in (*corpus.held_out, *corpus.train))
    ids = load_tokenizer(directory).encode(text)
    found = described(model) | sizes(flags) | {"rows": measure(model, prompts(ids, flags), flags)}
    if flags.out is not None:
        write_json(flags.out, found)
    print(json.dumps(found, indent=2) if flags.json else "\n".join(table(found)))


def run_mix(flags: BenchServe) -> None:
    """`--mix`: the record of bench_mix, beside the JSON also in Markdown."""
    bench_mix.check(flags)
    found = bench_mix.measure_mix(flags)
    found = on(torch.device("cpu")) | {"dtype": "float32"} | found
    if flags.out is not None:
        write_json(flags.out, found)
        text = bench_mix.markdown(found)
        write_atomic(flags.out.with_suffix(".md"), lambda temporary: temporary.write_text(text, encoding="utf-8"))
    print(json.dumps(found, indent=2) if flags.json else "\n".join(bench_mix.table(found)))


def check(flags: BenchServe) -> None:
    """Raise UserError for sizes that are not positive, or a setting that is missing."""
    for name in ("requests", "prompt_tokens", "answer_tokens", "rounds", "most_drafts"):
        if getattr(flags, name) < 1:
            raise UserError(f"--{name.replace('_', '-')}: must be positive, got {getattr(flags, name)}")
    for name in ("concurrency", "drafts"):
        if not getattr(flags, name):
            raise UserError(f"--{name}: name at least one")
    if min(flags.concurrency) < 1:
        raise UserError(f"--concurrency: must be positive, got {min(flags.concurrency)}")


def prompts(ids: Sequence[int], flags: BenchServe) -> list[list[int]]:
    """Pieces of the text in order, as many as one load needs at most; from its start again where it ends."""
    count = max(num_requests(flags, load) + load for load in flags.concurrency)
    length = flags.prompt_tokens
    text = list(ids) * -(-count * length // len(ids))
    return [text[n * length : (n + 1) * length] for n in range(count)]


def num_requests(flags: BenchServe, concurrency: int) -> int:
    """That are timed at a load: so many that the end, when fewer are under way, is a small part."""
    return max(flags.requests, 6 * concurrency)


def measure(model: K3, prompts: list[list[int]], flags: BenchServe) -> list[dict[str, Any]]:
    """A row for each load and draft, from the fastest of its rounds."""
    settings = [(load, draft) for load in flags.concurrency for draft in flags.drafts]
    rounds = {setting: list[dict[str, Any]]() for setting in settings}
    for _ in range(flags.rounds):
        for load, draft in settings:
            rounds[load, draft].append(one_round(model, prompts, flags, load, draft))
    rows = list[dict[str, Any]]()
    for (load, draft), found in rounds.items():
        best = max(found, key=lambda each: each["tokens_per_s"])
        rows.append({"concurrency": load, "draft": draft, **best})
        rows[-1]["tokens_per_cpu_s"] = max(each["tokens_per_cpu_s"] for each in found)
        rows[-1]["rounds_tokens_per_s"] = [each["tokens_per_s"] for each in found]
    for name, times in (("tokens_per_s", "times_as_fast"), ("tokens_per_cpu_s", "times_as_fast_by_cpu")):
        plain = {row["concurrency"]: row[name] for row in rows if row["draft"] == "off"}
        for row in rows:
            row[times] = row[name] / plain[row["concurrency"]] if plain else None
    return rows


def one_round(model: K3, prompts: list[list[int]], flags: BenchServe, load: int, draft: str) -> dict[str, Any]:
    """A new engine, whose first `load` requests are not timed."""
    speculation = None if draft == "off" else SpeculationConfig(draft, flags.most_drafts, adaptive=not flags.always)
    length = flags.prompt_tokens + 2 * flags.answer_tokens
    value_bytes = model.embed.weight.element_size()
    one = CacheConfig.of(model.config, 1 << 30, value_bytes=value_bytes, max_tokens=length)
    pages = (load + 1) * one.pages_for(length + 1)
    cache = CacheConfig(one.pages, pages, max_requests=load, max_tokens=length, checkpoint_pages=0)
    engine = Engine(model, EngineConfig(cache, speculation=speculation))
    requests = []
    for n, ids in enumerate(prompts[: num_requests(flags, load) + load]):
        tokens = answer_length(n, flags.answer_tokens)
        requests.append(Request(ids, SamplingParams(max_tokens=tokens, temperature=flags.temperature, seed=flags.seed)))
    keep_under_way(engine, requests[:load], load)
    before, began, cpu_began = engine.stats(), time.perf_counter(), time.process_time()
    firsts, answers = keep_under_way(engine, requests[load:], load)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    tokens = sum(len(answer.tokens) for answer in answers)
    found: dict[str, Any] = {
        "tokens_per_s": tokens / seconds,
        "tokens_per_cpu_s": tokens / cpu_seconds,  # of this process: what other work takes does not count
        "first_token_s": median(firsts),
        "passes": engine.stats().num_steps - before.num_steps,
    }
    drafts, earlier = engine.stats().drafts, before.drafts
    if drafts is not None and earlier is not None:
        turns = drafts.num_turns - earlier.num_turns
        found |= {
            "turns_with_guesses": turns / max(1, turns + drafts.num_plain_turns - earlier.num_plain_turns),
            "guesses_per_turn": (drafts.num_drafts - earlier.num_drafts) / max(1, turns),
            "accepted_per_turn": (drafts.num_accepted - earlier.num_accepted) / max(1, turns),
            "accepted_by_place": drafts.rates_at,
        }
    return found


def answer_length(n: int, mean: int) -> int:
    """From half to one and a half of the mean: requests of one length would run in step, prompts and all."""
    return mean - mean // 2 + n * 37 % (mean // 2 * 2 + 1)


def keep_under_way(engine: Engine, requests: Sequence[Request], load: int) -> tuple[list[float], list[Completion]]:
    """Submit a request whenever one has ended; seconds to each first token, and the answers."""
    waiting, under_way, firsts, streams = list(reversed(requests)), 0, list[float](), []
    began = {}
    while waiting or under_way:
        while waiting and under_way < load:
            streams.append(engine.submit(waiting.pop()))
            began[streams[-1]] = time.perf_counter()
            under_way += 1
        for update in engine.step():
            if update.tokens and update.stream in began:
                firsts.append(time.perf_counter() - began.pop(update.stream))
            under_way -= update.finish is not None
            if update.finish is not None and update.finish.error is not None:
                raise update.finish.error
    return firsts, [stream.result() for stream in streams]


def sizes(flags: BenchServe) -> dict[str, Any]:
    """What was asked for."""
    names = ("prompt_tokens", "answer_tokens", "temperature", "most_drafts", "always")
    return {name: getattr(flags, name) for name in names}


def described(model: K3) -> dict[str, Any]:
    """What a number means nothing without: machine, commit, versions, model."""
    return on(model.embed.weight.device) | {
        "dtype": str(model.embed.weight.dtype).removeprefix("torch."),
        "parameters": sum(value.numel() for value in model.parameters()),
    }


def on(device: torch.device) -> dict[str, Any]:
    """The conditions of a measurement there."""
    is_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_gpu else f"{processor()}, {torch.get_num_threads()} threads"
    return conditions("bench serve", hardware=name, torch=torch.__version__)


def table(found: dict[str, Any]) -> list[str]:
    """The measurement for a reader."""
    lines = [
        f"bench serve on {found['hardware']}, {found['dtype']}, {found['parameters']:,} parameters: prompts of "
        f"{found['prompt_tokens']} tokens, answers of about {found['answer_tokens']}",
        f"  {'at once':>7}  {'draft':<6} {'tokens/s':>9} {'times':>6} {'CPU':>6} {'first token':>12} "
        f"{'guesses':>8} {'right':>6}",
    ]
    for row in found["rows"]:
        times = [row[name] for name in ("times_as_fast", "times_as_fast_by_cpu")]
        times = " ".join(" " * 6 if each is None else f"{each:>6.2f}" for each in times)
        share = row.get("turns_with_guesses", 0.0)
        guessed, right = (share * row.get(name, 0.0) for name in ("guesses_per_turn", "accepted_per_turn"))
        lines.append(
            f"  {row['concurrency']:>7}  {row['draft']:<6} {row['tokens_per_s']:>9,.1f} {times} "
            f"{row['first_token_s'] * 1e3:>9.1f} ms {guessed:>8.2f} {right:>6.2f}"
        )
    return [*lines, "  times as fast as without guesses, by the clock and by this process's CPU time; guesses a turn"]
