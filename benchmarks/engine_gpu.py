"""The engine on one GPU: throughput by load beside transformers' generate, hits of long prefixes, shared prefixes.

    python benchmarks/engine_gpu.py [--recipe small] [--out FILE] [--peer-site FOLDER] [--seconds N]

Weights are random, drawn on the device. Requests are those of `openk3 bench serve --mix`: prompts of 16 to 512 tokens,
answers of 16 to 256, greedy, all there from the start, at most so many under way. The peer is transformers' Kimi Linear
of the same shapes (see `bench_mix.DIFFERENCES`) with `generate` in static batches of 256, in the same run. Engines and
graphs are warm; whatever is compiled or captured first is not timed.
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

from openk3.commands import bench_mix, bench_peer
from openk3.commands.bench import complete, random_model
from openk3.config.serve import CacheConfig, EngineConfig
from openk3.engine.engine import Engine
from openk3.engine.request import Request, SamplingParams
from openk3.engine.stream import Stream
from openk3.model.k3 import K3

BEGAN = time.perf_counter()
LOADS = ((256, 512), (64, 192), (16, 64), (1, 4))  # at once, requests
PREFIX_TOKENS, NEW_TOKENS = 32768, 512


def say(*words: object) -> None:
    """A line, at once."""
    print(*words, f"[{time.perf_counter() - BEGAN:.1f} s]", flush=True)


def mix(config: Any, count: int, share: float = 0.0, seed: int = 0) -> list[bench_mix.Arrival]:
    """Requests of the mix, all there from the start."""
    flags = SimpleNamespace(seed=seed, mix_requests=count, rate=0.0)
    return bench_mix.mix(flags, config.media_placeholder_token_id, share)  # pyrefly: ignore


def engine_of(model: K3, at_once: int, longest: int, step_tokens: int = 2048, spare_tokens: int = 0) -> Engine:
    """With room for so many requests, and cached prefixes beside them."""
    one = CacheConfig.of(model.config, 1 << 40, value_bytes=model.embed.weight.element_size(), max_tokens=longest)
    pages = (at_once + 1) * (one.pages_for(longest) + 2 * one.pages.kda_groups) + one.pages_for(spare_tokens + 1)
    cache = CacheConfig(one.pages, pages, max_requests=at_once, max_tokens=longest)
    engine = Engine(model, EngineConfig(cache, step_tokens=step_tokens))
    decode = engine._loop.runner.decode
    if decode is not None:
        began = time.perf_counter()
        made = decode.prepare()
        torch.cuda.synchronize()
        memory = torch.cuda.memory_allocated() / 1e9
        say(f"{made} graphs captured in {time.perf_counter() - began:.2f} s; {memory:.1f} GB")
    return engine


def serve(engine: Engine, arrivals: Sequence[bench_mix.Arrival], at_once: int, *, apart: bool = True) -> dict[str, Any]:
    """Answer them all; `apart` gives each a tenant of its own, so that nobody finds another's prefix."""
    streams, due, firsts, before = list[Stream](), {}, list[float](), engine.stats().num_steps
    waiting, under_way = list(enumerate(arrivals))[::-1], 0
    torch.cuda.synchronize()
    began = time.perf_counter()
    while waiting or under_way:
        while waiting and under_way < at_once:
            n, each = waiting.pop()
            params = SamplingParams(max_tokens=each.num_answer, temperature=0)
            tenant = f"{time.monotonic_ns()}-{n}" if apart else ""
            streams.append(engine.submit(Request(each.prompt, params, tenant=tenant)))
            due[streams[-1]] = time.perf_counter()
            under_way += 1
        for update in engine.step():
            if update.tokens and update.stream in due:
                firsts.append(time.perf_counter() - due.pop(update.stream))
            under_way -= update.finish is not None
            if update.finish is not None and update.finish.error is not None:
                raise update.finish.error
    seconds = time.perf_counter() - began
    answers = [stream.result() for stream in streams]
    tokens = sum(len(answer.tokens) for answer in answers)
    found = {"tokens": tokens, "seconds": seconds, "tokens_per_s": tokens / seconds, "first_token_s": median(firsts)}
    found |= {"passes": engine.stats().num_steps - before, "cached": sum(answer.num_cached for answer in answers)}
    return found | {"ms_per_pass": seconds / max(1, found["passes"]) * 1e3}


def throughput(model: K3) -> list[dict[str, Any]]:
    """A row for each load; with graphs, and at two loads without."""
    rows, engine = [], engine_of(model, 256, 769)
    serve(engine, mix(model.config, 300, seed=9), 256)
    for at_once, count in LOADS:
        found = [serve(engine, mix(model.config, count), at_once) for _ in range(2 if at_once == 256 else 1)]
        rows.append({"what": f"engine, {at_once} at once"} | min(found, key=lambda each: each["seconds"]))
        say(shown(rows[-1]))
    engine._loop.runner.decode = None
    for at_once, count in ((256, 256), (1, 2)):
        rows.append({"what": f"without graphs, {at_once} at once"} | serve(engine, mix(model.config, count), at_once))
        say(shown(rows[-1]))
    return rows


def steady(model: K3) -> list[dict[str, Any]]:
    """Passes of decoding alone at a context of 4K: how long, and how much of it the host takes before and behind."""
    rows = []
    for at_once in (1, 64, 256):
        engine, draw = engine_of(model, at_once, 4300, 16384), Random(at_once)
        prompt = [draw.randrange(1, 30000) for _ in range(4096)]
        params = SamplingParams(max_tokens=80, temperature=0)
        for n in range(at_once):
            engine.submit(Request([*prompt, n + 1], params))
        while len(engine._loop.scheduler.running) < at_once or any(
            job.num_left > 1 for job in engine._loop.scheduler.running
        ):
            engine.step()
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
        rows.append(row)
        say(shown(row))
        engine.close(write=False)
        del engine, decode
        gc.collect()
        torch.cuda.empty_cache()
    return rows


def prefix_hits(model: K3) -> list[dict[str, Any]]:
    """Seconds to the first token of a prompt of 32K + 512 tokens: cold, and where the 32K have been asked about."""
    length, rows = PREFIX_TOKENS + NEW_TOKENS, []
    for step_tokens in (2048, 8192):
        engine, draw = engine_of(model, 4, length + 64, step_tokens, 4 * length), Random(1)
        prefix = [draw.randrange(1, 30000) for _ in range(PREFIX_TOKENS)]
        params = SamplingParams(max_tokens=2, temperature=0)

        def first(prompt: list[int], tenant: str, engine: Engine = engine, params: SamplingParams = params) -> float:
            stream = engine.submit(Request(prompt, params, tenant=tenant, turn_ends=[PREFIX_TOKENS]))
            began = time.perf_counter()
            while not stream.tokens:
                engine.step()
            seconds = time.perf_counter() - began
            stream.result()
            return seconds

        def fresh(draw: Random = draw, prefix: list[int] = prefix) -> list[int]:
            return [*prefix, *(draw.randrange(1, 30000) for _ in range(NEW_TOKENS))]

        first(fresh(), "warm")
        cold = [first(fresh(), f"cold {n}") for n in range(2)]
        first(fresh(), "hit")
        hits = [first(fresh(), "hit") for _ in range(8)]
        row = {"what": f"first token of 32K + 512, at most {step_tokens} tokens a pass", "cold_s": min(cold)}
        row |= {"hit_s": median(hits), "hit_least_s": min(hits), "times": min(cold) / median(hits)}
        rows.append(row)
        say(shown(row))
        engine.close(write=False)
        del engine, first
        gc.collect()
        torch.cuda.empty_cache()
    return rows


def shared_prefixes(model: K3) -> list[dict[str, Any]]:
    """The mix with 90 % of the requests behind one of four prefixes of 2,048 tokens: with the prefix cache, without."""
    longest = bench_mix.PREFIX_TOKENS + 769
    arrivals = mix(model.config, 512, bench_mix.SHARE)
    engine = engine_of(model, 256, longest, spare_tokens=8 * longest)
    firsts = {each.prefix: each.prompt[: bench_mix.PREFIX_TOKENS] for each in arrivals if each.prefix is not None}
    engine.generate([Request([*ids, 1], SamplingParams(max_tokens=1, temperature=0)) for ids in firsts.values()])
    serve(engine, arrivals[:64], 64, apart=False)
    cached = {"what": "90 % shared, prefixes cached"} | serve(engine, arrivals, 256, apart=False)
    say(shown(cached))
    alone: dict[str, Any] = {"what": "90 % shared, no prefix cached"} | serve(engine, arrivals, 256, apart=True)
    alone["cached_is_times_as_fast"] = alone["seconds"] / cached["seconds"]
    say(shown(alone))
    return [cached, alone]


def peers(config: Any, site: str, budget: float) -> list[dict[str, Any]]:
    """transformers' generate in one static batch of 256 requests of the mix, one row for each way of its experts."""
    sys.path.append(site)
    transformers = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    arrivals, rows = mix(config, 512)[:256], []
    torch.set_default_device("cuda")
    torch.set_default_dtype(torch.bfloat16)
    try:
        kimi = transformers.KimiLinearConfig(**bench_mix.peer_config(config))
        kimi._attn_implementation = "sdpa"
        model = transformers.KimiLinearForCausalLM(kimi).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(torch.float32)
    say("peer built", sum(value.numel() for value in model.parameters()))
    ended = time.perf_counter() + budget
    requests = [{"prompt": each.prompt, "answer": each.num_answer} for each in arrivals]
    for way in ("grouped_mm", "eager"):
        try:
            with torch.inference_mode():
                model.set_experts_implementation(way)
                few = [request | {"answer": 8} for request in requests]
                bench_peer.static(transformers, model, {"requests": few, "batch": 256})
                torch.cuda.synchronize()
                if time.perf_counter() > ended:
                    say("no time left for", way)
                    break
                began = time.perf_counter()
                tokens, firsts = bench_peer.static(transformers, model, {"requests": requests, "batch": 256})
                torch.cuda.synchronize()
                seconds = time.perf_counter() - began
            row = {"what": f"transformers {transformers.__version__}, {way}, static batch of 256", "tokens": tokens}
            rows.append(row | {"seconds": seconds, "tokens_per_s": tokens / seconds, "first_token_s": median(firsts)})
        except Exception as error:  # a way that this version cannot go is a row of the report
            rows.append({"what": f"transformers {way}", "error": f"{type(error).__name__}: {str(error)[:300]}"})
            traceback.print_exc(limit=-6)
        say(shown(rows[-1]))
    torch.set_default_device(None)
    return rows


def shown(row: dict[str, Any]) -> str:
    """A row for a reader."""
    parts = [f"{name} {value:,.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()]
    return "; ".join(parts)


def main() -> None:
    """Measure everything, printing each row when it is there; one part that fails is no other's end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="small")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--peer-site", default="")
    parser.add_argument("--peer-seconds", type=float, default=40.0)
    flags = parser.parse_args()
    sizes = {"context": 8192, "micro_batch": 16384, "micro_batches": 1, "steps": 1, "warmups": 0}
    asked = SimpleNamespace(recipe=flags.recipe, dtype="auto", device="auto", activations="", seed=0, **sizes)
    config = complete(asked)  # pyrefly: ignore
    model = random_model(config).eval().requires_grad_(False)
    say("built", torch.cuda.get_device_name())
    versions = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    found: dict[str, Any] = {"hardware": torch.cuda.get_device_name(), "versions": versions, "recipe": flags.recipe}
    found |= {"date": time.strftime("%Y-%m-%d %H:%M:%S"), "differences_of_the_peer": bench_mix.DIFFERENCES}
    parts: list[Callable[[], list[dict[str, Any]]]] = [
        lambda: throughput(model),
        lambda: prefix_hits(model),
        lambda: shared_prefixes(model),
        lambda: steady(model),
    ]
    if flags.peer_site:
        parts.insert(1, lambda: peers(config.model, flags.peer_site, flags.peer_seconds))
    rows = found["rows"] = []
    for part in parts:
        try:
            rows += part()
        except Exception:
            traceback.print_exc(limit=-8)
        gc.collect()
        torch.cuda.empty_cache()
        if flags.out is not None:
            flags.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    say("done")


if __name__ == "__main__":
    main()
