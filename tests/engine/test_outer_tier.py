"""OuterTier: prefixes and preempted states come back from CPU memory and disk, and answers stay the same."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from checked_engine import GREEDY, CheckedEngine, engine, greedy, verify
from engine_model import MEDIA, engine_model, picture, prompt
from odd_stores import BadStore, DictStore, SlowStore

from openk3.config.model import ConfigError
from openk3.config.outer_tier import TierConfig
from openk3.engine import prefetch
from openk3.engine.block_pool import PageKind
from openk3.engine.boundary import PAGE, TAIL
from openk3.engine.outer_tier import TierStats
from openk3.engine.request import Completion, Request, SamplingParams
from openk3.engine.store import StoreError
from openk3.engine.stream import Update

MEMORY = 8 << 20


def tier(folder: Path | None = None, **options: Any) -> TierConfig:
    """With everything that is there brought back, and every state kept."""
    return TierConfig(
        MEMORY, None if folder is None else str(folder), **{"swap": "always", "load": "always", **options}
    )


def finish(one: CheckedEngine, *requests: Request) -> list[Completion]:
    """Answers, all of them right."""
    streams = [one.submit(request) for request in requests]
    for stream in streams:
        verify(stream.result(), stream.job)
    return [stream.result() for stream in streams]


def evict(one: CheckedEngine, count: int | None = None) -> None:
    """The longest idle pages, or all of them."""
    pool = one.pool
    count = pool.num_idle if count is None else count
    pool.unpin(pool.allocate([PageKind.STATE] * min(pool.num_available, pool.num_free + count)))
    one.check()


def stats(one: CheckedEngine) -> TierStats:
    """Of the tier."""
    outer = one.stats().outer
    assert outer is not None
    return outer


@pytest.mark.parametrize("length", [9, 15, 16, 17, 24, 31])
@pytest.mark.parametrize("on_disk", [False, True])
def test_an_evicted_prefix_comes_back(length: int, on_disk: bool, tmp_path: Path) -> None:
    """From inside a page, its end, behind it: as many tokens are cached as if nothing had been evicted."""
    one = engine(tier=tier(tmp_path if on_disk else None))
    finish(one, greedy(prompt(length)))
    evict(one)
    assert one.pool.num_idle == 0 and stats(one).num_kept >= 1
    if on_disk:
        one.close()
        assert one.pool.num_held == 0 and stats(one).num_written == stats(one).num_kept == len(files(tmp_path))
        with pytest.raises(RuntimeError, match="the engine is closed"):
            one.submit(greedy([1]))
        one = engine(tier=tier(tmp_path))
    (again,) = finish(one, greedy([*prompt(length), 3]))
    assert again.num_cached == length - length % 2 and stats(one).num_loaded >= 1
    assert (stats(one).num_read > 0) == on_disk and one.is_empty()


def files(folder: Path) -> list[Path]:
    """Of entries."""
    return [path for path in folder.rglob("*") if path.is_file()]


def test_nothing_is_written_before_it_is_evicted(tmp_path: Path) -> None:
    """Write-back: no entry while pages have room, no file while memory has."""
    one = engine(tier=tier(tmp_path))
    finish(one, greedy(prompt(40)), greedy(prompt(30, 1)))
    assert stats(one).num_entries == 0
    evict(one, 3)
    assert 0 < stats(one).num_kept < 9 and not files(tmp_path)
    finish(one, greedy(prompt(40)), greedy(prompt(30, 1)))
    one.close()
    assert files(tmp_path) and one.is_empty()


@pytest.mark.parametrize("first", [0, 1])
def test_a_prefix_is_where_its_parts_are(first: int) -> None:
    """However many of its pages were evicted, and whoever brings some of them back before."""
    for count in (2, 4, 9):
        one = engine(tier=tier())
        finish(one, greedy(prompt(36), turn_ends=[20]))
        evict(one, count)
        requests = [greedy([*prompt(21), 1]), greedy([*prompt(36), 1])]
        cached = [finish(one, requests[n])[0].num_cached for n in (first, 1 - first)]
        assert cached == ([20, 36] if first == 0 else [36, 20]) and one.is_empty()


def test_an_orphaned_checkpoint_and_pages_outside() -> None:
    """A checkpoint that was used last is still here when the pages before it have gone: they come, it stays."""
    one = engine(tier=tier())
    finish(one, greedy(prompt(36), 1))
    prefixes = one._loop.books.prefixes
    ends = {key for pages in [prefixes._checkpoints] for key in pages}
    partial = [page for page, keys in prefixes._keys_of.items() if ends & set(keys) and len(keys) < 4]
    for page in [*partial, *prefixes._key_of]:
        one.pool.touch(page)
    evict(one, 3)
    assert partial and stats(one).num_kept == 3
    (again,) = finish(one, greedy([*prompt(36), 1]))
    assert again.num_cached == 36 and stats(one).num_loaded == 3 and one.is_empty()


def test_requests_that_wait_do_not_block_others() -> None:
    """S06: a store that takes its time: who needs it is parked, who does not runs, and who leaves is gone at once."""
    store = SlowStore()
    one = engine(tier=tier(), store=store)
    finish(one, greedy(prompt(33)))
    one.close()
    one = engine(tier=tier(), store=store)
    store.get_gate.clear()
    slow, quick = one.submit(greedy([*prompt(33), 1])), one.submit(greedy(prompt(7, 1)))
    never = one.submit(greedy([*prompt(33), 2]))
    while quick.finish is None:
        one.step()
    verify(quick.result(), quick.job)
    assert slow.job.parked and not slow.tokens and one.stats().num_running == 0 and one.stats().num_waiting == 2
    never.cancel()
    assert never.finish == ("cancelled", None)
    store.open()
    verify(slow.result(), slow.job)
    assert slow.result().num_cached == 32 and one.is_empty()
    one.close()


@pytest.mark.parametrize("gate", ["has_gate", "get_gate"])
def test_a_store_that_does_not_answer(gate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first request waits as long as it may, then computes; a store that does not even say what it has is left."""
    monkeypatch.setattr(prefetch, "ASK_SECONDS", 0.05 if gate == "has_gate" else 30)
    store = SlowStore()
    one = engine(tier=tier(), store=store)
    finish(one, greedy(prompt(33)))
    one.close()
    one = engine(tier=tier(wait_seconds=30 if gate == "has_gate" else 0.1), store=store)
    getattr(store, gate).clear()
    waits = []
    for n in range(2):
        began = time.monotonic()
        (late,) = finish(one, greedy([*prompt(33), n], 1))
        waits.append(time.monotonic() - began)
        evict(one)
        one._loop.tier.memory.remove(list(one._loop.tier.memory._entries))
    assert waits[0] >= 0.05 and late.num_cached == 0
    assert stats(one).num_failed == (gate == "has_gate")
    store.open()
    assert one.is_empty()
    one.close()


@pytest.mark.parametrize("how", ["flip", "cut", "empty", "other", "gone"])
def test_damaged_files_are_a_miss(how: str, tmp_path: Path) -> None:
    """Each file in turn: the answer is right, less is cached, and damage is counted once."""
    one = engine(tier=tier(tmp_path))
    finish(one, greedy(prompt(36), turn_ends=[20]))
    one.close()
    paths = sorted(files(tmp_path), key=lambda path: path.name)
    assert len(paths) > 6
    for path in paths if how == "flip" else paths[::3]:
        whole = path.read_bytes()
        place = len(whole) * 2 // 3
        flipped = whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :]
        other = next(p for p in paths if p != path and p.stat().st_size == len(whole)) if how == "other" else path
        path.write_bytes({"flip": flipped, "cut": whole[:place], "other": other.read_bytes()}.get(how, b""))
        if how == "gone":
            path.unlink()
        one = engine(tier=tier(tmp_path))
        (again,) = finish(one, greedy([*prompt(36), 1], turn_ends=[20, 36]))
        assert again.num_cached in (0, 20, 34, 36)
        one.close()
        assert stats(one).num_corrupt <= 1 and stats(one).num_failed == 0
        if again.num_cached < 36 and how in ("flip", "other"):
            assert stats(one).num_corrupt == 1


def test_keys_keep_tenants_images_and_weights_apart(tmp_path: Path) -> None:
    """S05: on disk as in memory: another tenant, image, order of tokens or weights finds nothing; the same does."""
    ids, images = [*prompt(5), MEDIA, *prompt(20, 1)], [picture(0)]
    request = Request(ids, GREEDY, images=images, tenant="a")
    one = engine(tier=tier(tmp_path))
    finish(one, request)
    one.close()

    def cached(changed: Request, **options: Any) -> int:
        other = engine(tier=tier(tmp_path, **options.pop("tier", {})), **options)
        stream = other.submit(changed)
        verify(stream.result(), stream.job, options.get("model"))
        other.close(write=False)
        return stream.result().num_cached

    assert cached(request) == 30
    assert cached(Request(ids, GREEDY, images=images, tenant="b")) == 0
    assert cached(Request(ids, GREEDY, images=[picture(1)], tenant="a")) == 0
    assert cached(Request([*prompt(4), MEDIA, *prompt(21, 1)], GREEDY, images=images, tenant="a")) == 0
    assert cached(request, model=engine_model(seed=1)) == 0
    assert cached(request, page_tokens=4) == 0
    assert cached(request, tier={"secret": b"s"}) == 0
    assert cached(request) == 30
    names = "".join(path.name for path in tmp_path.rglob("*"))
    assert set(names) <= set("0123456789abcdef")


def test_new_weights(tmp_path: Path) -> None:
    """Entries of other weights never match, and match again when the weights are back; names are used once."""
    old, new = engine_model(), engine_model(seed=1)
    one = engine(tier=tier(tmp_path))
    finish(one, greedy(prompt(20)))
    evict(one)
    one.load_weights(new)
    fresh = one.submit(greedy([*prompt(20), 1]))
    verify(fresh.result(), fresh.job, new)
    assert fresh.result().num_cached == 0
    one.load_weights(old)
    (again,) = finish(one, greedy([*prompt(20), 1]))
    assert again.num_cached == 20
    one.load_weights(old, "named")
    with pytest.raises(ValueError, match="load_weights: 'named' names the weights before; give new ones a new name"):
        one.load_weights(new, "named")
    assert one.is_empty()


@pytest.mark.parametrize("at", range(1, 10))
def test_s03_swapped_at_every_step(at: int) -> None:
    """S03: chunk, checkpoint, token: nothing is computed twice, wherever pages have gone; a third comes between."""
    length = 13 + at % 2
    request = Request(prompt(length), SamplingParams(max_tokens=6, temperature=1.2, seed=11))
    want = engine().generate([request])[0].token_ids
    for evicted in (0, 99):
        one = engine(tier=tier(), step_tokens=5)
        stream = one.submit(request)
        for _ in range(at):
            one.step()
        running = stream.finish is None
        if running:
            cache = stream.job.cache
            assert cache is not None
            lost = cache.num_computed not in (0, one._loop.books.prefixes.lookup(cache.chain.keys, 99).num_tokens)
            one.scheduler.preempt(stream.job)
            evict(one, evicted)
        third = one.submit(greedy([*prompt(length)[:9], 1], 2))
        verify(third.result(), third.job)
        verify(stream.result(), stream.job)
        assert stream.result().token_ids == want
        twice = one.stats().num_computed - (length + 5) - (10 + 1 - (third.result().num_cached or 0))
        assert twice == 0 and one.stats().num_swapped == (running and lost) and one.is_empty()


def test_a_swapped_state_that_cannot_be_used(tmp_path: Path) -> None:
    """Its pages are lost, its weights are gone, it was cancelled: computed again, and its memory comes back."""
    for case in ("lost", "weights", "cancelled", "no room", "no"):
        one = engine(tier=tier(swap="never" if case == "no" else "always"), step_tokens=8)
        stream = one.submit(greedy(prompt(30), 9))
        for _ in range(6):
            one.step()
        if case == "no room":
            assert one._loop.tier is not None and one._loop.tier.memory.reserve(MEMORY - 100)
        one.scheduler.preempt(stream.job)
        assert (stream.job.swapped is None) == (case in ("no", "no room"))
        evict(one)
        model = engine_model()
        if case == "lost":
            one._loop.tier.memory.remove(list(one._loop.tier.memory._entries))
        elif case == "weights":
            model = engine_model(seed=1)
            stream.cancel()
            one.load_weights(model)
            stream = one.submit(greedy(prompt(30), 9))
        elif case == "cancelled":
            stream.cancel()
        elif case == "no room":
            one._loop.tier.memory.cancel(MEMORY - 100)
        if case != "cancelled":
            verify(stream.result(), stream.job, model)
        assert one.is_empty()


def test_weights_change_while_a_state_is_swapped() -> None:
    """The request goes on under the new weights from its first token: its old state is of no use."""
    one, new = engine(tier=tier(), step_tokens=8, checkpoint_pages=0), engine_model(seed=1)
    stream = one.submit(greedy(prompt(30), 9))
    for _ in range(3):
        one.step()
    one.scheduler.preempt(stream.job)
    assert stream.job.swapped is not None and not stream.tokens
    one.load_weights(new)
    verify(stream.result(), stream.job, new)
    assert one.is_empty()


@pytest.mark.parametrize("interrupt", [False, True])
def test_s03_a_state_after_a_failed_pass_is_not_kept(interrupt: bool) -> None:
    """S03: states have moved on without the books when a pass stops between two layers: everybody starts again."""
    one = engine(tier=tier(), step_tokens=8, checkpoint_pages=0)
    streams = [one.submit(greedy(prompt(13, n), 9)) for n in range(2)]
    for _ in range(7):
        one.step()
    assert all(stream.job.num_computed % 2 for stream in streams), "checkpoints are there: nothing would be kept anyway"
    layer = one._loop.runner.cache.layers[1]
    write = layer.scatter

    def failing(*arguments: Any) -> None:
        write(*arguments)
        del layer.scatter
        raise KeyboardInterrupt if interrupt else RuntimeError("out of memory")

    layer.scatter = failing
    try:
        one.step()
    except KeyboardInterrupt:
        assert interrupt
    assert "scatter" not in vars(layer) and one.stats().num_preempted == 2 and one.stats().num_swapped == 0
    for stream in streams:
        verify(stream.result(), stream.job)
    assert one.is_empty()


@pytest.mark.parametrize("failing", [(), ("has",), ("get",), ("put",), ("remove",), ("has", "get", "put", "remove")])
def test_a_store_that_fails(failing: tuple[str, ...]) -> None:
    """Or lies about what it has: answers are right, failures are counted, and nobody waits for ever."""
    store = BadStore(*failing)
    for _ in range(2):
        one = engine(tier=tier(), store=store)
        (answer,) = finish(one, greedy([*prompt(33), 1]))
        assert answer.num_cached in (0, 32)
        one._loop.tier.forget([bytes(32)])
        one.close()
        assert (stats(one).num_failed > 0) == bool(failing) and one.is_empty()
    assert store.num_closed == 2


def test_little_memory() -> None:
    """Too little for anything, for one page, for a few: what does not fit is lost, and the limit holds always."""
    lost = []
    for size in (1, 10_000, 40_000):
        one = engine(24, tier=TierConfig(size, swap="always", load="always"), step_tokens=8)
        finish(one, *(greedy(prompt(30, n), 3) for n in range(3)))
        (again,) = finish(one, greedy([*prompt(30), 1]))
        lost.append(stats(one).num_lost)
        assert again.num_cached in (0, 30) and stats(one).memory_bytes <= size and one.is_empty()
    assert lost[0] > lost[-1] > 0 or lost[0] > 0


def test_what_is_forgotten_is_forgotten_everywhere(tmp_path: Path) -> None:
    """In memory, in files, and in what was fetched for a request that still waits."""
    one = engine(tier=tier(tmp_path), step_tokens=8)
    finish(one, greedy(prompt(32)))
    one.close()
    one = engine(tier=tier(tmp_path), step_tokens=8)
    stream = one.submit(greedy([*prompt(32), 1]))
    one.step()
    while stream.job.parked:
        one.step()
    one.scheduler.preempt(stream.job)
    evict(one)
    one._loop.books.prefixes.forget(stream.job.chain.keys)
    verify(stream.result(), stream.job)
    assert one.is_empty()
    one._loop.books.prefixes.forget(stream.job.chain.keys)
    kept = {path.name for path in files(tmp_path)}
    names = [one._loop.tier.format.name(kind, key).hex() for key in stream.job.chain.keys for kind in (PAGE, TAIL)]
    assert one.is_empty() and not kept & set(names)


def test_two_engines_share_a_folder(tmp_path: Path) -> None:
    """At the same time; what one has written the other one finds."""
    one, two = (engine(tier=tier(tmp_path)) for _ in range(2))
    finish(one, greedy(prompt(20)))
    finish(two, greedy(prompt(20, 1)))
    one.close()
    (again,) = finish(two, greedy([*prompt(20), 1]))
    assert again.num_cached == 20
    two.close()
    three = engine(tier=tier(tmp_path))
    assert [answer.num_cached for answer in finish(three, *(greedy([*prompt(20, n), 1]) for n in range(2)))] == [20, 20]
    assert three.is_empty()


def test_closing() -> None:
    """Who runs, waits or is parked ends as cancelled and hears of it; not from inside; twice does nothing."""
    heard, store = list[Update](), DictStore()
    one = engine(tier=tier(), store=store)
    running = one.submit(greedy(prompt(20), 9), heard.append)
    parked = one.submit(greedy(prompt(5, 1), ready=lambda: False), heard.append)
    one.step()
    climbing = one.submit(greedy(prompt(6, 2)), lambda update: one.close())
    while climbing.finish is None:
        one.step()
    assert climbing.finish.reason == "cancelled", "its listener failed"
    late = one.submit(greedy(prompt(5, 3)), heard.append)
    one.close()
    one.close()
    for stream in (running, parked, late):
        assert stream.finish == ("cancelled", None)
    assert {update.stream for update in heard if update.finish} == {running, parked, late}
    assert one.is_empty() and one.is_idle and store.num_closed == 1 and store.entries
    verify(running.tokens, running.job)


def test_many_threads_in_little_room(tmp_path: Path) -> None:
    """Four of them submit, read and cancel while prefixes go out and come back, and another engine uses the files."""
    options: dict[str, Any] = {"tier": tier(tmp_path, io_threads=3), "step_tokens": 24, "max_requests": 4}
    one, two, faults = engine(24, **options), engine(24, **options), list[Exception]()

    def work(number: int, on: CheckedEngine) -> None:
        try:
            for turn in range(4):
                stream = on.submit(greedy([*prompt(26, (number + turn) % 3), turn], 3, turn_ends=[16]))
                if turn == 1:
                    next(stream)
                    stream.cancel()
                stream.result()
                verify(stream.tokens, stream.job)
                if turn == 2:
                    on._loop.books.prefixes.outside.forget(stream.job.chain.keys[:3])
        except Exception as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(number, (one, two)[number % 2])) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert faults == [] and one.is_empty() and two.is_empty()
    assert stats(one).num_kept + stats(two).num_kept > 0
    one.close()
    two.close()


def test_wrong_set_ups(tmp_path: Path) -> None:
    """One line each."""
    with pytest.raises(ConfigError, match="tier: a store needs memory before it; give a TierConfig"):
        engine(store=DictStore())
    with pytest.raises(StoreError, match="folder: a tier has one store"):
        engine(tier=tier(tmp_path), store=DictStore())
    tmp_path.chmod(0o755)
    with pytest.raises(StoreError, match="is open to others"):
        engine(tier=tier(tmp_path))
