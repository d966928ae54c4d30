"""The engine on one GPU: throughput by load beside transformers' generate, hits of long prefixes, shared prefixes.

    python benchmarks/engine_gpu.py [--recipe small] [--out FILE] [--seconds N] [--profile] [--peer-site FOLDER]
        [--step-tokens N] [--prompt-interval N] [--also INTERVAL/TOKENS ...]

Weights are random, drawn on the device. Requests are those of `openk3 bench serve --mix`: prompts of 16 to 512 tokens,
answers of 16 to 256, greedy, all there from the start, at most so many under way. The peer is transformers' Kimi Linear
of the same shapes (see `bench_mix.DIFFERENCES`) with `generate` in static batches of 256, in the same run. Engines and
graphs are warm; whatever is compiled or captured first is not timed. How far a load has come is printed every two
seconds, one that takes too long is cut and says so, and each row is in the file as soon as it is there.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import platform
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from engine_passes import BEGAN, Passes, say

from openk3.commands import bench_mix, bench_peer
from openk3.commands.bench import complete, random_model
from openk3.config.serve import CacheConfig, EngineConfig
from openk3.engine.engine import Engine, resolved
from openk3.engine.request import Request, SamplingParams
from openk3.engine.shares import Shares
from openk3.engine.stream import Stream
from openk3.model.k3 import K3

MOST = (256, 768)  # at once, requests
LOADS = ((1, 4), (16, 64), (64, 192))
PREFIX_TOKENS, NEW_TOKENS = 32768, 512
MOST_SECONDS = 12.0  # of one load


class Report:
    """Rows, printed and in a file as soon as they are there."""

    def __init__(self, path: Path | None, facts: dict[str, Any]) -> None:
        self._path, self._facts, self.rows = path, facts, list[dict[str, Any]]()

    def add(self, row: dict[str, Any]) -> None:
        """One more."""
        self.rows.append(row)
        say(shown(row))
        if self._path is not None:
            text = json.dumps(self._facts | {"rows": self.rows}, indent=2)
            self._path.write_text(text + "\n", encoding="utf-8")


def mix(config: Any, count: int, share: float = 0.0, seed: int = 0) -> list[bench_mix.Arrival]:
    """Requests of the mix, all there from the start."""
    flags = SimpleNamespace(seed=seed, mix_requests=count, rate=0.0)
    return bench_mix.mix(flags, config.media_placeholder_token_id, share)  # pyrefly: ignore


def engine_of(
    model: K3, at_once: int, longest: int, step_tokens: int = 0, spare_tokens: int = 0, *, graphs: bool = True
) -> Engine:
    """With room for so many requests, and cached prefixes beside them; with `graphs`, all of them are there."""
    one = CacheConfig.of(model.config, 1 << 40, value_bytes=model.embed.weight.element_size(), max_tokens=longest)
    pages = (at_once + 1) * (one.pages_for(longest) + 2 * one.pages.kda_groups) + one.pages_for(spare_tokens + 1)
    cache = CacheConfig(one.pages, pages, max_requests=at_once, max_tokens=longest)
    engine = Engine(model, EngineConfig(cache, step_tokens=step_tokens))
    if graphs:
        began = time.perf_counter()
        made = engine.prepare()
        torch.cuda.synchronize()
        memory = torch.cuda.memory_allocated() / 1e9
        say(f"{made} graphs captured in {time.perf_counter() - began:.2f} s; {memory:.1f} GB")
    return engine


def serve(
    engine: Engine,
    arrivals: Sequence[bench_mix.Arrival],
    at_once: int,
    *,
    apart: bool = True,
    limit: float = MOST_SECONDS,
    profiled: bool = False,
) -> dict[str, Any]:
    """Answer them all; `apart` gives each a tenant of its own, so that nobody finds another's prefix.

    Behind `limit` seconds what is left is cancelled, and the row says so; `profiled` prints the slowest pass's lines.
    """
    streams, due, firsts = list[Stream](), dict[Stream, float](), list[float]()
    waiting, under_way, full = list(enumerate(arrivals))[::-1], 0, (0, 0.0)
    torch.cuda.synchronize()
    passes = Passes(engine, limit, profiled)
    while (waiting or under_way) and not passes.is_over:
        while waiting and under_way < at_once:
            n, each = waiting.pop()
            params = SamplingParams(max_tokens=each.num_answer, temperature=0)
            tenant = f"{time.monotonic_ns()}-{n}" if apart else ""
            streams.append(engine.submit(Request(each.prompt, params, tenant=tenant)))
            due[streams[-1]] = time.perf_counter()
            under_way += 1
            if not waiting:
                full = passes.tokens, time.perf_counter() - passes.began
        for update in passes.step():
            if update.tokens and update.stream in due:
                firsts.append(time.perf_counter() - due.pop(update.stream))
            under_way -= update.finish is not None
            if update.finish is not None and update.finish.error is not None:
                raise update.finish.error
    seconds = time.perf_counter() - passes.began
    found: dict[str, Any] = {"tokens": passes.tokens, "seconds": seconds, "tokens_per_s": passes.tokens / seconds}
    if full[0]:
        found["tokens_per_s_until_the_last_began"] = full[0] / full[1]
    found |= {"first_token_s": median(firsts or [0.0]), "passes": passes.count, "slowest_ms": passes.slowest * 1e3}
    found |= {"ms_per_pass": seconds / max(1, passes.count) * 1e3} | passes.row()
    if waiting or under_way:
        found |= {"cut": f"{len(waiting)} requests had not begun, {under_way} had not ended"}
        for stream in streams:
            if stream.finish is None:
                stream.cancel()
        engine.step()
    else:
        found["cached"] = sum(stream.result().num_cached for stream in streams)
    if profiled:
        say(f"slowest pass, {passes.slowest * 1e3:.0f} ms with the profiler:\n{passes.where}")
    return found


def share(engine: Engine, interval: int, step_tokens: int) -> str:
    """From now on prompts have every so many passes of so many tokens (0: what suits the device)."""
    scheduler = engine._loop.scheduler
    asked = EngineConfig(engine.config.cache, step_tokens, prompt_interval=interval)
    config = scheduler.config = resolved(asked, engine._loop.runner.model)
    scheduler._shares = Shares(config.prompt_interval)
    return f"interval {config.prompt_interval}, at most {config.step_tokens} tokens"


def throughput(model: K3, report: Report, pairs: Sequence[tuple[int, int]]) -> None:
    """At 256 requests at once, a row for each interval and number of tokens."""
    at_once, count = MOST
    engine = engine_of(model, at_once, 769)
    share(engine, *pairs[0])
    say("first time, with what has to be compiled:", shown(serve(engine, mix(model.config, 40, seed=9), 16)))
    say("once before it is timed:", shown(serve(engine, mix(model.config, 300, seed=8), at_once)))
    arrivals = mix(model.config, count)
    for pair in pairs:
        how = share(engine, *pair)
        report.add({"what": f"engine, {at_once} at once", "how": how} | serve(engine, arrivals, at_once))


def loads(model: K3, report: Report, pair: tuple[int, int], profiled: bool) -> None:
    """Fewer requests at once; then where the slowest pass's time goes."""
    engine = engine_of(model, 64, 769)
    how = share(engine, *pair)
    serve(engine, mix(model.config, 20, seed=9), 16)
    for at_once, count in LOADS:
        found = serve(engine, mix(model.config, count), at_once, limit=8.0)
        report.add({"what": f"engine, {at_once} at once", "how": how} | found)
    if profiled:
        serve(engine, mix(model.config, 64, seed=7), 64, profiled=True, limit=4.0)


def steady(model: K3, report: Report) -> None:
    """Passes of decoding alone at a context of 4K: how long, and how much of it the host takes before and behind."""
    for at_once in (1, 64, 256):
        engine, draw = engine_of(model, at_once, 4352, 16384, graphs=False), Random(at_once)
        prompt = [draw.randrange(1, model.config.text.vocab_size // 2) for _ in range(4096)]
        params = SamplingParams(max_tokens=200, temperature=0)
        for n in range(at_once):
            engine.submit(Request([*prompt, n + 1], params))
        running, passes = engine._loop.scheduler.running, Passes(engine, MOST_SECONDS, False)
        while len(running) < at_once or any(job.num_left > 1 for job in running):
            passes.step()
            if passes.is_over:
                raise TimeoutError(f"{at_once} prompts of 4K are not done after {passes.count} passes")
        for _ in range(4):
            engine.step()
        times = []
        for _ in range(32):
            began = time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - began)
        torch.cuda.synchronize()
        row = {"what": f"decoding passes at 4K, {at_once} at once", "ms_per_pass": median(times) * 1e3}
        decode = engine._loop.runner.decode
        if decode is not None:
            graph = decode._graph_for(at_once)
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            graph.run()
            events[0].record()
            for _ in range(10):
                graph.run()
            events[1].record()
            torch.cuda.synchronize()
            row["ms_of_the_graph"] = events[0].elapsed_time(events[1]) / 10
        row["tokens_per_s"] = at_once / row["ms_per_pass"] * 1e3
        report.add(row)
        engine.close(write=False)
        del engine, decode
        gc.collect()
        torch.cuda.empty_cache()


def prefix_hits(model: K3, report: Report) -> None:
    """Seconds to the first token of a prompt of 32K + 512 tokens: cold, and where the 32K have been asked about."""
    length = PREFIX_TOKENS + NEW_TOKENS
    engine, draw = engine_of(model, 4, length + 64, spare_tokens=4 * length, graphs=False), Random(1)
    prefix = [draw.randrange(1, model.config.text.vocab_size // 2) for _ in range(PREFIX_TOKENS)]
    params = SamplingParams(max_tokens=2, temperature=0)

    def first(tenant: str) -> tuple[float, float, int]:
        """Seconds, those until all was launched, passes."""
        prompt = [*prefix, *(draw.randrange(1, model.config.text.vocab_size // 2) for _ in range(NEW_TOKENS))]
        stream = engine.submit(Request(prompt, params, tenant=tenant, turn_ends=[PREFIX_TOKENS]))
        torch.cuda.synchronize()
        passes = Passes(engine, MOST_SECONDS, False)
        while not stream.tokens:
            passes.step()
        seconds, launched = time.perf_counter() - passes.began, sum(times[1] for times in passes.mixed)
        stream.result()
        return seconds, launched, passes.count

    say("first time, with what has to be compiled:", first("warm"), first("warm"))
    cold = min(first(f"cold {n}") for n in range(2))
    first("hit")
    hits = sorted(first("hit") for _ in range(12))
    hit = hits[len(hits) // 2]
    row = {"what": "first token of 32K + 512", "cold_s": cold[0], "cold_passes": cold[2], "hit_s": hit[0]}
    row |= {"hit_launched_s": hit[1], "hit_passes": hit[2], "hit_least_s": hits[0][0], "times": cold[0] / hit[0]}
    report.add(row)
    engine.close(write=False)


def shared_prefixes(model: K3, report: Report) -> None:
    """The mix with 90 % of the requests behind one of four prefixes of 2,048 tokens: with the prefix cache, without."""
    longest = bench_mix.PREFIX_TOKENS + 769
    arrivals = mix(model.config, 512, bench_mix.SHARE)
    engine = engine_of(model, 256, longest, spare_tokens=8 * longest)
    firsts = {each.prefix: each.prompt[: bench_mix.PREFIX_TOKENS] for each in arrivals if each.prefix is not None}
    engine.generate([Request([*ids, 1], SamplingParams(max_tokens=1, temperature=0)) for ids in firsts.values()])
    serve(engine, arrivals[:64], 64, apart=False, limit=4.0)
    cached = {"what": "90 % shared, prefixes cached"} | serve(engine, arrivals, 256, apart=False)
    report.add(cached)
    alone: dict[str, Any] = {"what": "90 % shared, no prefix cached"} | serve(engine, arrivals, 256, apart=True)
    alone["cached_is_times_as_fast"] = cached["tokens_per_s"] / alone["tokens_per_s"]
    report.add(alone)


def peers(config: Any, report: Report, site: str, budget: float) -> None:
    """transformers' generate in one static batch of 256 requests of the mix, one row for each way of its experts.

    Where the whole batch would take longer than there is time for, its seconds follow from the prompts with answers of
    8 tokens and with answers of 24, and the row says so.
    """
    ended = time.perf_counter() + budget
    sys.path.append(site)
    transformers = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    requests = [{"prompt": each.prompt, "answer": each.num_answer} for each in mix(config, 512)[:256]]
    torch.set_default_device("cuda")
    torch.set_default_dtype(torch.bfloat16)
    try:
        kimi = transformers.KimiLinearConfig(**bench_mix.peer_config(config))
        kimi._attn_implementation = "sdpa"
        model = transformers.KimiLinearForCausalLM(kimi).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(torch.float32)
    say("peer built", sum(value.numel() for value in model.parameters()))

    def timed(most: int) -> tuple[int, float, float]:
        """Tokens, seconds and those to the first token, with answers of at most so many."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        work = [request | {"answer": min(most, request["answer"])} for request in requests]
        tokens, firsts = bench_peer.static(transformers, model, {"requests": work, "batch": 256})
        torch.cuda.synchronize()
        return tokens, time.perf_counter() - began, median(firsts)

    longest, tokens = max(request["answer"] for request in requests), sum(request["answer"] for request in requests)
    for way in ("grouped_mm", "eager"):
        row: dict[str, Any] = {"what": f"transformers {transformers.__version__}, {way}, static batch of 256"}
        try:
            with torch.inference_mode():
                model.set_experts_implementation(way)
                timed(2)
                _, few, first = timed(8)
                per_token = (timed(24)[1] - few) / 16
                seconds, how = few + (longest - 8) * per_token, "from answers of 8 and 24 tokens"
                say(f"peer: {few:.2f} s with 8 tokens, {per_token * 1e3:.1f} ms each further one; {seconds:.1f} s")
                if time.perf_counter() + seconds < ended:
                    _, seconds, first = timed(longest)
                    how = "measured"
            row |= {"tokens": tokens, "seconds": seconds, "tokens_per_s": tokens / seconds, "first_token_s": first}
            row["how"] = how
        except Exception as error:  # a way that this version cannot go is a row of the report
            row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
            traceback.print_exc(limit=-6)
        report.add(row)
        if time.perf_counter() > ended - budget / 3:
            break
    torch.set_default_device(None)


def shown(row: dict[str, Any]) -> str:
    """A row for a reader."""
    parts = [f"{name} {value:,.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()]
    return "; ".join(parts)


def main(words: Sequence[str] | None = None) -> None:
    """Measure everything, printing each row when it is there; one part that fails is no other's end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="small")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=600.0, help="no part begins behind these, the peer apart")
    parser.add_argument("--step-tokens", type=int, default=0, help="most tokens of a pass; 0: what a user gets")
    parser.add_argument(
        "--prompt-interval", type=int, default=0, help="passes of which one computes prompts; 0 as above"
    )
    parser.add_argument("--also", nargs="*", default=[], metavar="INTERVAL/TOKENS", help="other pairs of these two")
    parser.add_argument("--profile", action="store_true", help="also print where the slowest pass's time goes")
    parser.add_argument("--peer-site", default="")
    parser.add_argument("--peer-seconds", type=float, default=40.0)
    flags = parser.parse_args(words)
    sizes = {"context": 8192, "micro_batch": 16384, "micro_batches": 1, "steps": 1, "warmups": 0}
    asked = SimpleNamespace(recipe=flags.recipe, dtype="auto", device="auto", activations="", seed=0, **sizes)
    config = complete(asked)  # pyrefly: ignore
    model = random_model(config).eval().requires_grad_(False)
    say("built", torch.cuda.get_device_name())
    versions = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    facts: dict[str, Any] = {"hardware": torch.cuda.get_device_name(), "versions": versions, "recipe": flags.recipe}
    facts |= {"date": time.strftime("%Y-%m-%d %H:%M:%S"), "differences_of_the_peer": bench_mix.DIFFERENCES}
    report = Report(flags.out, facts)
    pair = (flags.prompt_interval, flags.step_tokens)
    pairs = [pair, *((int(n), int(most)) for n, _, most in (other.partition("/") for other in flags.also))]
    parts: dict[str, Callable[[], None]] = {"throughput": lambda: throughput(model, report, pairs)}
    if flags.peer_site:
        parts["peer"] = lambda: peers(config.model, report, flags.peer_site, flags.peer_seconds)
    parts |= {
        "long prefixes": lambda: prefix_hits(model, report),
        "shared prefixes": lambda: shared_prefixes(model, report),
        "loads": lambda: loads(model, report, pair, flags.profile),
        "steady decoding": lambda: steady(model, report),
    }
    for name, part in parts.items():
        if name != "peer" and time.perf_counter() - BEGAN > flags.seconds:
            say("no time left for", name)
            continue
        say(name)
        try:
            part()
        except Exception:
            traceback.print_exc(limit=-8)
        gc.collect()
        torch.cuda.empty_cache()
    say("done")


if __name__ == "__main__":
    main()
