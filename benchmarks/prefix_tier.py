"""Time to the first token behind a long prefix: computed, found in the pages, brought from CPU memory or from disk."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402

from openk3 import recipes  # noqa: E402
from openk3.commands.conditions import conditions  # noqa: E402
from openk3.config.outer_tier import TierConfig  # noqa: E402
from openk3.config.serve import CacheConfig, EngineConfig  # noqa: E402
from openk3.engine.block_pool import PageKind  # noqa: E402
from openk3.engine.engine import Engine  # noqa: E402
from openk3.engine.request import Request, SamplingParams  # noqa: E402
from openk3.model.k3 import K3  # noqa: E402
from openk3.runtime.run_folder import write_json  # noqa: E402


@dataclass
class Row:
    """One measurement."""

    work: str
    seconds: float  # by the clock
    cpu_seconds: float  # of this process: what other work on the machine takes does not count
    num_cached: int
    num_bytes: int  # in CPU memory afterwards, if any of it was brought into the pages


def engine(model: K3, folder: str, num_tokens: int) -> Engine:
    """With room for two such requests in its pages, and for their prefixes outside."""
    memory = 2 * CacheConfig.of(model.config, 1 << 40, value_bytes=4).pages.page_bytes
    cache = CacheConfig.of(model.config, memory, value_bytes=4, max_tokens=4 * num_tokens)
    pages = cache.pages_for(3 * num_tokens) + 64
    cache = CacheConfig(cache.pages, pages, max_tokens=4 * num_tokens, checkpoint_pages=8)
    tier = TierConfig(4 << 30, folder, swap="always")
    return Engine(model, EngineConfig(cache, step_tokens=2048, tier=tier))


def first_token(one: Engine, ids: list[int], work: str) -> Row:
    """Submit, wait for one token; entries that were loaded are counted in bytes of CPU memory."""
    before = one.stats().outer
    began = _now()
    stream = one.submit(Request(ids, SamplingParams(max_tokens=1, temperature=0)))
    next(stream)
    seconds = _since(began)
    after, loaded = one.stats().outer, 0
    if before is not None and after is not None and after.num_loaded > before.num_loaded:
        loaded = after.memory_bytes
    return Row(work, *seconds, stream.result().num_cached, loaded)


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _since(began: tuple[float, float]) -> tuple[float, float]:
    return time.perf_counter() - began[0], time.process_time() - began[1]


def evict(one: Engine) -> None:
    """All idle pages."""
    pool = one._loop.books.pool
    pool.unpin(pool.allocate([PageKind.STATE] * pool.num_available))


def swapped(one: Engine, ids: list[int]) -> Row:
    """A request behind its prompt is preempted, all pages are taken, and it goes on: until its next token."""
    stream = one.submit(Request(ids, SamplingParams(max_tokens=4, temperature=0)))
    next(stream)
    next(stream)  # behind the checkpoint that the prompt has left
    one._loop.scheduler.preempt(stream.job)
    evict(one)
    began = _now()
    next(stream)
    seconds = _since(began)
    outer = one.stats().outer
    assert outer is not None and outer.num_swapped == 1
    num_cached = stream.job.num_computed - 1
    stream.cancel()
    return Row("swapped out, all pages evicted, back", *seconds, num_cached, outer.memory_bytes)


def measure(prefix: int, new: int, folder: str) -> list[Row]:
    """The same prefix with other new tokens each time."""
    model = K3.build(recipes.model("tiny"), seed=0, dtype=torch.float32).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    shared = torch.randint(0, 700, (prefix,), generator=generator).tolist()

    def prompt() -> list[int]:
        return [*shared, *torch.randint(0, 700, (new,), generator=generator).tolist()]

    one = engine(model, folder, prefix + new)
    first_token(one, [701, *shared[:2048]], "warm")
    rows = [first_token(one, prompt(), "computed")]
    first_token(one, [*shared, 1], "leaves a checkpoint where the prefix ends")
    rows.append(first_token(one, prompt(), "in the pages"))
    evict(one)
    rows.append(first_token(one, prompt(), "from CPU memory"))
    rows.append(swapped(one, prompt()))
    one.close()
    one = engine(model, folder, prefix + new)
    first_token(one, [701, *shared[:2048]], "warm")
    rows.append(first_token(one, prompt(), "from disk, after a restart"))
    one.close()
    return rows


def main() -> None:
    """Print a table, or write JSON too."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefix", type=int, default=32768)
    parser.add_argument("--new", type=int, default=512)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o700)
        rows = measure(options.prefix, options.new, folder)
    print(f"tiny, float32, {torch.get_num_threads()} thread(s): {options.prefix} + {options.new} tokens")
    for row in rows:
        times, by_cpu = rows[0].seconds / row.seconds, rows[0].cpu_seconds / row.cpu_seconds
        facts = f"{times:7.1f}x  {by_cpu:7.1f}x by CPU time  {row.num_cached:6} cached"
        facts = f"{facts}  {row.num_bytes / 1e6:6.1f} MB outside"
        print(f"{row.work:38} {row.seconds:9.3f} s  {facts}")
    if options.out is not None:
        data = conditions("prefix tier", torch=torch.__version__) | {"threads": torch.get_num_threads()}
        data |= {"prefix": options.prefix, "new": options.new, "rows": [asdict(row) for row in rows]}
        write_json(options.out, data)


if __name__ == "__main__":
    main()
