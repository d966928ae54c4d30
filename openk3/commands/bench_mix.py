"""A mix of requests for `openk3 bench serve`: through an engine, beside transformers, and with prefixes shared.

One run measures everything in turn, round by round, so that what else the machine does meets all alike: the engine
(continuous batching), the peer in each of its ways (static batches of the same size), and the engine on requests of
which most share a prefix, with the prefix cache and without. Seconds are by the clock and of each process's CPU time.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, NamedTuple

import torch

from openk3 import recipes
from openk3.commands import bench_peer
from openk3.commands.bench_flags import BenchServe
from openk3.commands.errors import UserError
from openk3.config.model import ModelConfig
from openk3.config.serve import CacheConfig, EngineConfig
from openk3.engine.engine import Engine
from openk3.engine.request import Request, SamplingParams
from openk3.engine.stream import Stream
from openk3.model.k3 import K3
from openk3.recipes import quickstart

PROMPTS, ANSWERS = (16, 512), (16, 256)  # tokens, evenly drawn
PREFIXES, PREFIX_TOKENS, SHARE = 4, 2048, 0.9
ENGINE, CACHED, COLD, UNCACHED = "engine", "prefixes cached", "prefixes cached, none at first", "no prefix cached"
PEER_WAYS = ("eager", "grouped_mm")  # how transformers computes experts; static batches in each
PEER_ONCE = ("batched_mm", bench_peer.CONTINUOUS)  # in the first round alone


class Arrival(NamedTuple):
    """A request of the mix: when it comes, its prompt, and how long its answer is."""

    seconds: float
    prompt: list[int]
    num_answer: int
    prefix: int | None = None


def model_config(recipe: str) -> ModelConfig:
    """The shapes of a recipe, `quickstart` included."""
    return quickstart.model() if recipe == "quickstart" else recipes.model(recipe)


def mix(flags: BenchServe, vocab: int, share: float = 0.0) -> list[Arrival]:
    """Requests drawn from the seed; `share` of them begin with one of a few prefixes. All at once without a rate."""
    draw, time_s = Random(flags.seed), 0.0
    prefixes = [[draw.randrange(1, vocab) for _ in range(PREFIX_TOKENS)] for _ in range(PREFIXES)]
    found = []
    for _ in range(flags.mix_requests):
        time_s += draw.expovariate(flags.rate) if flags.rate else 0.0
        prompt = [draw.randrange(1, vocab) for _ in range(draw.randint(*PROMPTS))]
        num_answer, prefix = draw.randint(*ANSWERS), draw.randrange(PREFIXES)
        common = draw.random() < share
        tokens = [*prefixes[prefix], *prompt] if common else prompt
        found.append(Arrival(time_s, tokens, num_answer, prefix if common else None))
    return found


def engine_round(
    model: K3, arrivals: Sequence[Arrival], flags: BenchServe, *, apart: bool, warm: bool
) -> dict[str, Any]:
    """A new engine answers them all; `apart` gives each a tenant of its own, so that nobody finds another's prefix.

    `warm`: each prefix has been asked about before, which is not timed.
    """
    longest = max(len(each.prompt) + each.num_answer for each in arrivals) + 1
    one = CacheConfig.of(model.config, 1 << 40, value_bytes=model.embed.weight.element_size(), max_tokens=longest)
    room = (flags.at_once + 2 * PREFIXES) * one.pages_for(longest)
    engine = Engine(model, EngineConfig(CacheConfig(one.pages, room, max_requests=flags.at_once, max_tokens=longest)))
    if warm:
        firsts = {each.prefix: each.prompt[:PREFIX_TOKENS] for each in arrivals if each.prefix is not None}
        engine.generate([Request([*ids, 1], SamplingParams(max_tokens=1, temperature=0)) for ids in firsts.values()])
    began, cpu_began, streams, firsts_s = time.perf_counter(), time.process_time(), list[Stream](), list[float]()
    due = {}
    while len(streams) < len(arrivals) or not engine.is_idle:
        now = time.perf_counter() - began
        for each in arrivals[len(streams) :]:
            if each.seconds > now:
                break
            params = SamplingParams(max_tokens=each.num_answer, temperature=0)
            streams.append(engine.submit(Request(each.prompt, params, tenant=str(len(streams)) if apart else "")))
            due[streams[-1]] = each.seconds
        if engine.is_idle:  # the next one has not come yet
            time.sleep(max(0.0, arrivals[len(streams)].seconds - now))
            continue
        for update in engine.step():
            if update.tokens and update.stream in due:
                firsts_s.append(time.perf_counter() - began - due.pop(update.stream))
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    answers = [stream.result() for stream in streams]
    wrong = [answer.finish for answer in answers if answer.finish.reason != "length"]
    if wrong:
        raise UserError(f"a request ended with {wrong[0]}")
    tokens, stats = sum(len(answer.tokens) for answer in answers), engine.stats()
    found = {"tokens": tokens, "seconds": seconds, "cpu_seconds": cpu_seconds, "first_token_s": median(firsts_s)}
    return found | {"passes": stats.num_steps, "cached": sum(answer.num_cached for answer in answers)}


def peer_config(config: ModelConfig) -> dict[str, Any]:
    """Kimi Linear of the same shapes, as far as it has them; see `DIFFERENCES`."""
    text, linear = config.text, config.text.linear_attn_config
    kinds = {"kda": "linear_attention", "mla": "full_attention"}
    same = ("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers")
    same += ("num_attention_heads", "routed_scaling_factor", "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim")
    same += ("v_head_dim", "qk_nope_head_dim", "max_position_embeddings", "rms_norm_eps")
    found = {name: getattr(text, name) for name in same}
    moe = ["sparse" if text.is_moe_layer(n) else "dense" for n in range(text.num_hidden_layers)]
    return found | {
        "num_key_value_heads": text.num_attention_heads,
        "n_shared_experts": text.num_shared_experts,
        "num_local_experts": text.num_experts,
        "num_experts_per_tok": text.num_experts_per_token,
        "n_group": text.num_expert_group,
        "topk_group": text.topk_group,
        "linear_head_dim": linear.head_dim,
        "linear_num_heads": linear.num_heads,
        "linear_conv_kernel_dim": linear.short_conv_kernel_size,
        "layer_types": [kinds.get(kind, "full_attention") for kind in text.layer_kinds()],
        "mlp_layer_types": moe,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
    }


DIFFERENCES = (
    "the peer has no attention residuals: a plain residual stream",
    "the peer's experts work on the full width, ours in the latent space of LatentMoE, with a projection down and up",
    "the peer's MLA has no output gate; its KDA gate is a product of two narrow maps, ours one full map",
    "the peer's activation is SiLU where ours is SiTU; its decay is softplus where ours is a bounded sigmoid",
    "the peer has no MTP layer and no vision tower; the engine uses neither here",
    "the peer takes the largest logit; the engine also computes each token's log-probability",
)


class Peer:
    """transformers in a process of its own, which waits while others are measured."""

    def __init__(self, python: Path, flags: BenchServe, config: ModelConfig, arrivals: Sequence[Arrival]) -> None:
        environment = os.environ | {"OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}
        try:
            self._process = subprocess.Popen(
                [str(python), str(Path(bench_peer.__file__))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            raise UserError(f"--peer-python: cannot run {python}: {error.strerror}") from error
        requests = [{"prompt": each.prompt, "answer": each.num_answer} for each in arrivals]
        work = {
            "config": peer_config(config),
            "threads": torch.get_num_threads(),
            "dtype": "float32",
            "seed": flags.seed,
        }
        self.versions = self._ask(json.dumps(work | {"batch": flags.at_once, "requests": requests}))

    def measure(self, way: str) -> dict[str, Any]:
        """Answer every request in one of its ways."""
        found = self._ask(way)
        if found.get("first_token_s"):
            found["first_token_s"] = median(found["first_token_s"])
        return found

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _ask(self, line: str) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # a peer that has ended answers nothing, which is an error below
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise UserError("--peer-python: the peer ended; it needs torch and a transformers that has kimi_linear")
        return json.loads(answer)


def measure_mix(flags: BenchServe) -> dict[str, Any]:
    """All rows, with every round as it was; ratios are medians over rounds, each within its own round."""
    config = model_config(flags.mix)
    vocab = min(config.media_placeholder_token_id, config.text.vocab_size)
    model = K3.build(config, seed=flags.seed).requires_grad_(False)
    plain, shared = mix(flags, vocab), mix(flags, vocab, SHARE)
    peer = None if flags.peer_python is None else Peer(flags.peer_python, flags, config, plain)
    rounds = list[dict[str, Any]]()
    for _ in range(flags.rounds):
        found = {"load_average": os.getloadavg()[0], ENGINE: engine_round(model, plain, flags, apart=False, warm=False)}
        if peer is not None:
            found |= {way: peer.measure(way) for way in PEER_WAYS}
            found |= {way: peer.measure(way) for way in PEER_ONCE if not rounds}
        for name, apart, warm in ((CACHED, False, True), (COLD, False, False), (UNCACHED, True, False)):
            found[name] = engine_round(model, shared, flags, apart=apart, warm=warm)
        rounds.append(found)
    versions = None if peer is None else peer.versions
    if peer is not None:
        peer.close()
    parameters = sum(value.numel() for value in model.parameters())
    about = {"recipe": flags.mix, "parameters": parameters, "peer": versions, "differences": DIFFERENCES}
    lengths = {
        "prompts": PROMPTS,
        "answers": ANSWERS,
        "prefixes": PREFIXES,
        "prefix_tokens": PREFIX_TOKENS,
        "share": SHARE,
    }
    asked = {name: getattr(flags, name) for name in ("mix_requests", "at_once", "rate", "seed", "rounds")}
    return about | lengths | asked | {"rows": summary(rounds), "raw_rounds": rounds}


def summary(rounds: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each way, and how many times as fast the engine is: of rows with prefixes, than without the cache."""
    rows = []
    for name in [name for name, value in rounds[0].items() if isinstance(value, dict)]:
        found = [each[name] for each in rounds if name in each]
        if "error" in found[0]:
            rows.append({"way": name, "error": found[0]["error"]})
            continue
        row = {"way": name} | {key: median(each[key] for each in found) for key in ("seconds", "cpu_seconds")}
        row |= {"tokens": found[0]["tokens"], "tokens_per_s": found[0]["tokens"] / row["seconds"]}
        row["first_token_s"] = median(each["first_token_s"] for each in found)
        for key, times in (("seconds", "engine_is_times_as_fast"), ("cpu_seconds", "engine_is_times_as_fast_by_cpu")):
            ours = CACHED if name in (CACHED, COLD, UNCACHED) else ENGINE
            row[times] = median(each[name][key] / each[ours][key] for each in rounds if name in each)
        rows.append(row)
    return rows


def table(found: dict[str, Any]) -> list[str]:
    """The measurement for a reader."""
    lines = [
        f"bench serve --mix {found['recipe']} on {found['hardware']}: {found['mix_requests']} requests, "
        f"{found['at_once']} at once, prompts {found['prompts'][0]}..{found['prompts'][1]}, "
        f"answers {found['answers'][0]}..{found['answers'][1]}, load average {found['load_average']:.1f}",
        f"  {'way':<32} {'tokens/s':>9} {'seconds':>8} {'CPU s':>8} {'first token':>12}  engine: times, by CPU",
    ]
    for row in found["rows"]:
        if "error" in row:
            lines.append(f"  {row['way']:<32} cannot: {row['error']}")
            continue
        lines.append(
            f"  {row['way']:<32} {row['tokens_per_s']:>9,.0f} {row['seconds']:>8.2f} {row['cpu_seconds']:>8.2f} "
            f"{row['first_token_s']:>10.2f} s  {row['engine_is_times_as_fast']:>8.2f} "
            f"{row['engine_is_times_as_fast_by_cpu']:>8.2f}"
        )
    return lines


def markdown(found: dict[str, Any]) -> str:
    """The record beside the JSON."""
    lines = ["# Throughput of the engine on a CPU", "", *table(found)[:1], ""]
    lines += [
        "| way | tokens/s | seconds | CPU s | first token, s | engine is times as fast | by CPU time |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in found["rows"]:
        if "error" in row:
            lines.append(f"| {row['way']} | cannot: {row['error']} | | | | | |")
            continue
        keys = ("seconds", "cpu_seconds", "first_token_s", "engine_is_times_as_fast", "engine_is_times_as_fast_by_cpu")
        lines.append(
            "| " + " | ".join([row["way"], f"{row['tokens_per_s']:,.0f}", *(f"{row[key]:.2f}" for key in keys)]) + " |"
        )
    return (
        "\n".join(
            [*lines, "", f"Commit {found['commit']}, {found['date']}. Peer: {found['peer']}. Differences in shape:", ""]
            + [f"- {each}" for each in found["differences"]]
        )
        + "\n"
    )


def check(flags: BenchServe) -> None:
    """Raise UserError for sizes that make no mix."""
    for name in ("mix_requests", "at_once", "rounds"):
        if getattr(flags, name) < 1:
            raise UserError(f"--{name.replace('_', '-')}: must be positive, got {getattr(flags, name)}")
    if not 0 <= flags.rate < math.inf:
        raise UserError(f"--rate: must not be negative, got {flags.rate}")
    if flags.device == "cuda":
        raise UserError("--mix: this measurement is of a CPU; leave out --device cuda")
