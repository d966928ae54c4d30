"""Rows for `gpu.py` from the scripts that compare whole models: hybrid decoding, time to loss, and the engine.

These scripts write results of a form of their own; here each becomes rows of one form. `ratio` says how many times as
long the other one takes. Goals: the engine five times as fast as transformers' generate at 256 requests, a cached
prefix of 32K five times as fast as a cold one and within 25 ms, 2.4 times the tokens where 90 % of prefixes are shared.
The comparisons with MLA alone have no goal, but what bounds allow (`of_floors`) and what was published (Kimi Linear:
3.98 times at 128K, 6.3 at 1M, of models and batches of their own).
"""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]

TIMES_OF_PEER, TIMES_OF_COLD, TIMES_OF_UNSHARED, HIT_MS = 5.0, 5.0, 2.4, 25.0  # goals of the engine
PUBLISHED = {131072: 3.98, 1048576: 6.3}  # by context
LOSS_SECONDS = 240.0  # of all runs of time_to_loss


def wanted(options: argparse.Namespace, *names: str) -> bool:
    """Whether a part is asked for by name, where it runs whole or not at all."""
    return not options.rows or any(part in name for part in options.rows for name in names)


def hybrid_decode(options: argparse.Namespace, folder: Path) -> Rows:
    """A row for each batch and context of the hybrid, beside all MLA; and one of milliseconds a token at 1M."""
    script = importlib.import_module("hybrid_decode")
    if not wanted(options, "hybrid decode"):
        return []
    words = ["--device", options.device, "--out", str(folder)]
    script.main(words + ["--small"] * options.small + ["--quick"] * options.quick)
    results = json.loads((folder / "hybrid_decode.json").read_text(encoding="utf-8"))
    return hybrid_rows(results, script.packed_ratio(results["rows"]))


def hybrid_rows(results: dict[str, Any], best: dict[str, Any] | None) -> Rows:
    """From the script's results, and each model's best time a token at the longest context."""
    others = {(row["batch"], row["context"]): row for row in results["rows"] if row["model"] == "all-mla"}
    rows = []
    for row in results["rows"]:
        other = others.get((row["batch"], row["context"]))
        if row["model"] != "hybrid" or other is None:
            continue
        found = {key: value for key, value in row.items() if key not in ("work", "model", "ms_per_token")}
        name = f"hybrid decode, batch {row['batch']}, context {row['context']}"
        found |= {"all_mla_ms": other["ours_ms"], "goal_ms": None, "ratio": other["ours_ms"] / row["ours_ms"]}
        found["of_floors"] = other["floor_ms"] / row["floor_ms"]
        published = {"published_ratio": PUBLISHED[row["context"]]} if row["context"] in PUBLISHED else {}
        rows.append({"work": name, **found, **published})
    if best is not None:
        name = f"hybrid decode, a token at the largest batches, context {best['context']}"
        times = {"ours_ms": best["hybrid"]["ms_per_token"], "all_mla_ms": best["all-mla"]["ms_per_token"]}
        sizes = {"batch": best["hybrid"]["batch"], "all_mla_batch": best["all-mla"]["batch"]}
        ratio = {"floor_ms": None, "goal_ms": None, "ratio": best["ratio"]}
        published = {"published_ratio": PUBLISHED[best["context"]]} if best["context"] in PUBLISHED else {}
        rows.append({"work": name, **times, **sizes, **ratio, **published})
    return rows


def time_to_loss(options: argparse.Namespace, folder: Path) -> Rows:
    """A row for each baseline: seconds of steps to its last held-out loss; text is gathered unless a file is named."""
    if not wanted(options, "time to loss"):
        return []
    script = importlib.import_module("time_to_loss")
    tokens = options.tokens
    if tokens is None and not options.small:
        tokens = folder / "tokens.xz"
        importlib.import_module("token_file").main([str(tokens)])
    words = [str(tokens)] * (tokens is not None) + ["--device", options.device, "--out", str(folder)]
    words += ["--small", "--steps", "2", "--seeds", "0", "--rates", "8e-3"] if options.small else []
    words += [] if options.small else ["--steps", "960", "--seconds", str(LOSS_SECONDS / (1 + 3 * options.quick))]
    script.main(words)
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    return loss_rows(results)


def recorded_loss(gpu: str) -> Rows:
    """The rows of the newest results of `time_to_loss.py` that this kind of GPU has; each says when they were made.

    Raises FileNotFoundError if there are none.
    """
    folder = Path(__file__).resolve().parent / "results"
    for path in sorted(folder.glob("time_to_loss-*.json"), key=lambda path: path.stem[-10:], reverse=True):
        results = json.loads(path.read_text(encoding="utf-8"))
        if results["gpu"] == gpu:
            return [row | {"measured": f"{path.name}, commit {results['commit']}"} for row in loss_rows(results)]
    raise FileNotFoundError(f"no results of time_to_loss.py on a {gpu}")


def loss_rows(results: dict[str, Any]) -> Rows:
    """From the script's results: means over seeds; the K3's time is the baseline's over the advantage in seconds."""
    titles = importlib.import_module("loss_curves").TITLES
    seconds, summary = results["plan"]["step_seconds"], results["summary"]
    rows = []
    for name, ratios in summary["advantage"].items():
        ratio = {axis: ratios[axis]["mean"] for axis in ("tokens", "flops", "seconds")}
        whole = {model: 1e3 * results["plan"]["steps"] * seconds[model] for model in ("k3", name)}
        # the worse one's last loss is the level: that one trains to its end
        times = (whole[name] / ratio["seconds"], whole[name])
        if summary["last_loss"]["k3"]["mean"] > summary["last_loss"][name]["mean"]:
            times = (whole["k3"], whole["k3"] * ratio["seconds"])
        row = {
            "work": f"time to loss {ratios['level']['mean']:.2f}, beside {titles[name]}, {len(ratios['seeds'])} seeds"
        }
        row |= {"ours_ms": times[0], "all_mla_ms": times[1], "floor_ms": None, "goal_ms": None}
        row |= {"ratio": ratio["seconds"], "token_ratio": ratio["tokens"], "flop_ratio": ratio["flops"]}
        rows.append(row | {"rates": summary["rates"], "seconds_deviation": ratios["seconds"]["deviation"]})
    return rows


def engine(options: argparse.Namespace, folder: Path) -> Rows:
    """The rows of `engine_gpu.py`: milliseconds of a pass, of a token or to the first one. It needs a GPU."""
    if not wanted(options, "engine"):
        return []
    words = ["--recipe", "tiny" if options.small else "small", "--out", str(folder / "engine.json")]
    words += ["--peer-site", str(options.peers[-1])] if options.peers else []
    importlib.import_module("engine_gpu").main(words)
    path = folder / "engine.json"  # not there if no part of it gave a row
    return engine_rows(json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else [])


def engine_rows(found: Rows) -> Rows:
    """From the script's rows. Raises RuntimeError where none came: each of its parts has told why by then."""
    if all("error" in row for row in found):
        raise RuntimeError("engine_gpu.py: no part of it gave a row")
    peers = [_token_ms(row) for row in found if _is_peer(row)]
    unshared = [_token_ms(row) for row in found if "no prefix cached" in row["what"]]
    rows = []
    for row in found:
        made: dict[str, Any] = {"work": f"engine: {row['what'].removeprefix('engine, ')}", "ours_ms": None}
        made |= {"floor_ms": None, "goal_ms": None}
        if "hit_s" in row:
            made |= {"ours_ms": 1e3 * row["hit_s"], "cold_ms": 1e3 * row["cold_s"], "ratio": row["times"]}
            made["goal_ms"] = min(HIT_MS, made["cold_ms"] / TIMES_OF_COLD)
        elif _is_peer(row):
            made["transformers_ms"] = _token_ms(row)
        else:
            made["ours_ms"] = _token_ms(row)
        for others, is_it, times, name in (
            (peers, row["what"] == "engine, 256 at once", TIMES_OF_PEER, "transformers_ms"),
            (unshared, "prefixes cached" in row["what"], TIMES_OF_UNSHARED, "unshared_ms"),
        ):
            known = [took for took in others if took is not None]
            if known and is_it and made["ours_ms"] is not None:
                made[name] = min(known)
                made |= {"ratio": made[name] / made["ours_ms"], "goal_ms": made[name] / times}
        rows.append(made | {key: value for key, value in row.items() if key != "what"})
    return rows


def _is_peer(row: dict[str, Any]) -> bool:
    return row["what"].startswith("transformers")


def _token_ms(row: dict[str, Any]) -> float | None:
    """Of a token of all requests together; None where there was an error, or not one token before it was cut."""
    return 1e3 / row["tokens_per_s"] if row.get("tokens_per_s") else None
