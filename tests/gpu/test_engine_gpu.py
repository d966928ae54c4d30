"""The engine on a GPU: graphs give what launches give, tokens are those of plain passes, whatever else happens."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache

import pytest
import torch
from checked_engine import CheckedEngine, engine, greedy
from engine_model import MEDIA, engine_config, engine_model, picture, prompt
from torch import Tensor

from openk3.config.model import LinearAttnConfig
from openk3.config.serve import CacheConfig, EngineConfig, PageShape, SpeculationConfig
from openk3.engine.engine import Engine
from openk3.engine.request import Completion, Request, SamplingParams
from openk3.engine.stream import Stream
from openk3.inputs.packed import MediaItem, Packed
from openk3.model.k3 import K3
from openk3.ops import KdaGate
from openk3.ops.kda.decode import DecodePool, DecodeWeights, Projected, decode_kda
from openk3.ops.kda.paged_decode import DecodePages, decode_pages

pytestmark = pytest.mark.gpu
TIE = 1e-4  # of the two largest logits, up to which another order of sums may choose the other token


@cache
def small() -> K3:
    """The engine tests' model in float32."""
    return copy.deepcopy(engine_model(torch.float32)).to("cuda")


@cache
def wide(seed: int = 0) -> K3:
    """Heads of 128 channels in bfloat16, which Gluon's kernels take on Hopper."""
    linear = LinearAttnConfig(head_dim=128, num_heads=2, kda_layers=(1, 2, 4), full_attn_layers=(3,))
    config = engine_config(linear_attn_config=linear)
    model = K3.build(config, seed=seed, dtype=torch.bfloat16, device="cuda").requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for value in model.parameters():
        if value.ndim >= 2:
            value.copy_(torch.randn(value.shape, generator=generator) * value.shape[-1] ** -0.5)
    return model


def engine_of(model: K3, graphs: bool, **options: int) -> Engine:
    """Pages of 16 tokens; passes of one token each as graphs, or the same ones launch by launch."""
    width = model.embed.weight.element_size()
    shape = PageShape.of(model.config, page_tokens=16, hash_tokens=4, value_bytes=width)
    limits = {"max_requests": 12, "max_tokens": 400} | options
    one = Engine(model, EngineConfig(CacheConfig(shape, 200, **limits), step_tokens=64))
    one._loop.runner.memory.poison(range(201))
    one._loop.runner.use_decode_steps(graphs)
    return one


def check_greedy(answer: Sequence[int], job_logits: Tensor) -> list[float]:
    """Each token is the most likely one, or nearly so; how far below the largest logit those are that are not."""
    chosen = torch.tensor(list(answer), device=job_logits.device)
    below = job_logits.max(-1).values - job_logits.gather(1, chosen[:, None]).squeeze(1)
    assert float(below.max()) <= TIE, f"token {int(below.argmax())} is {float(below.max())} below the largest"
    return below[below > 0].tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_step_in_pages(dtype: torch.dtype, measured: list[object]) -> None:
    """`decode_pages` and `decode_kda` give the same bits; other pages keep theirs."""
    H, P, N, C = 6, 9, 5, 6 * 128
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(kind)

    q_CW, k_CW, v_CW = (0.5 * normal(C, 4, kind=torch.float32) for _ in range(3))
    gate = KdaGate(0.5 * normal(H, kind=torch.float32), 0.5 * normal(H, 128, kind=torch.float32))
    weights = DecodeWeights(q_CW, k_CW, v_CW, gate, 1 + 0.1 * normal(128, kind=torch.float32), 1e-5)
    q_NC, k_NC, v_NC, decay_NC, output_gate = (normal(N, C) for _ in range(5))
    tokens = Projected(q_NC, k_NC, v_NC, decay_NC, normal(N, H))
    memory, inputs = normal(P, 2, H, 128, 128, kind=torch.float32), normal(P, 64 + 9 * C)
    pages = DecodePages(memory[:, 1], inputs[:, 64:].unflatten(-1, (3 * C, 3)))
    windows = [torch.zeros(P, C, 4, dtype=dtype, device="cuda") for _ in range(3)]
    for window, part in zip(windows, pages.inputs_PXW.split(C, 1)):
        window[..., 1:] = part
    pool, untouched = DecodePool(pages.state_PHKV.clone(), *windows), memory[:, 0].clone()
    page_N = torch.tensor([7, -1, 0, 8, 3], dtype=torch.int32, device="cuda")
    for _ in range(3):
        want = decode_kda(tokens, output_gate, weights, pool, page_N)
        assert torch.equal(decode_pages(tokens, output_gate, weights, pages, page_N), want)
    assert torch.equal(pages.state_PHKV, pool.state_SHKV) and torch.equal(memory[:, 0], untouched)
    assert torch.equal(pages.inputs_PXW, torch.cat([x[..., 1:] for x in pool.tensors()[1:]], 1))


def requests(count: int, **params: object) -> list[Request]:
    """Of several lengths, some with a common beginning."""
    options = {"max_tokens": 20, "temperature": 0} | params
    prompts = [prompt(5 + 7 * n % 40, n) if n % 3 else [*prompt(33, 100), *prompt(n, n)] for n in range(count)]
    return [Request(ids, SamplingParams(**options)) for ids in prompts]  # pyrefly: ignore


@pytest.mark.parametrize("make", [small, wide])
def test_graphs_and_launches_give_the_same_bits(make: object) -> None:
    """Tokens and log-probabilities of greedy and sampled answers, with requests that come and go."""
    model = make()  # pyrefly: ignore
    for params in ({}, {"temperature": 0.9, "seed": 5}, {"temperature": 1.1, "seed": 6, "top_k": 7, "top_p": 0.9}):
        answers = [
            [answer.tokens for answer in engine_of(model, graphs).generate(requests(12, **params))]
            for graphs in (True, False)
        ]
        assert answers[0] == answers[1]


def test_nothing_waits_for_the_device() -> None:
    """A pass of one token each, from its places to its logits."""
    one = engine_of(small(), True)
    assert one._loop.runner.decode is not None and one._loop.runner.decode.prepare()
    streams = [one.submit(request) for request in requests(5)]
    while any(len(stream.tokens) < 3 for stream in streams):
        one.step()
    run, seen = one._loop.runner.decode.run, []  # pyrefly: ignore

    def watched(works: Sequence[object]) -> object:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return run(works)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            seen.append(len(works))

    one._loop.runner.decode.run = watched  # pyrefly: ignore
    for stream in streams:
        stream.result()
    assert seen and max(seen) == 5


@pytest.mark.parametrize(
    "guesses", [None, SpeculationConfig("ngram", 4, adaptive=False), SpeculationConfig("mtp", 3, adaptive=False)]
)
def test_greedy_tokens_are_those_of_plain_passes(
    guesses: SpeculationConfig | None, measured: list[tuple[str, str, dict[str, float]]]
) -> None:
    """Hits, images, preemption, cancellation and little room, where memory is NaN until it is written."""
    model = small()
    one: CheckedEngine = engine(30, step_tokens=24, model=model, speculation=guesses, max_requests=6)
    assert one._loop.runner.decode is not None and one._loop.runner.decode.graphs
    shared, streams = prompt(30, 1), list[Stream]()
    for n in range(18):
        ids = [*shared[: (30, 13, 8, 0)[n % 4]], *prompt(1 + n, n)]
        images = []
        if n % 5 == 0:
            pixels, grid = picture(n % 2, dtype=torch.float32)
            ids.insert(2, MEDIA)
            images = [MediaItem(pixels.to("cuda"), grid)]
        repeats = [*ids, *ids[-6:]] if n % 3 == 0 and not images else ids
        streams.append(one.submit(greedy(repeats, 12, images=images, priority=n % 2)))
    passes, taken = 0, []
    takes = one._loop.runner.decode.run
    one._loop.runner.decode.run = lambda works: taken.append(len(works)) or takes(works)  # pyrefly: ignore
    while any(stream.finish is None for stream in streams):
        one.step()
        passes += 1
        if passes % 11 == 5 and one.scheduler.running:
            one.scheduler.preempt(one.scheduler.running[passes % len(one.scheduler.running)])
        if passes == 20:
            streams[3].cancel()
            streams[7].cancel()
    below = list[float]()
    for stream in streams:
        assert stream.finish is not None and stream.finish.error is None
        if stream.tokens:
            job = stream.job
            below += check_greedy([token.id for token in stream.tokens], _plain(job, model))
    assert taken and one.is_empty()
    case = f"{guesses.draft if guesses else 'no guesses'}, {passes} passes, {len(taken)} as graphs"
    measured.append(("engine", case, {"ties": len(below) / 1e4, "below": max(below, default=0.0)}))


def _plain(job: object, model: K3) -> Tensor:
    """Logits of a pass without a cache, where the job's answer begins."""
    ids = job.token_ids  # pyrefly: ignore
    count = job.num_prompt  # pyrefly: ignore
    with torch.no_grad():
        x_TD = model.inputs(Packed.join([ids[:count]], list(job.prompt.images)).to("cuda"))  # pyrefly: ignore
        x_TD = torch.cat((x_TD, model.embed(torch.tensor(ids[count:], dtype=torch.int64, device="cuda"))))
        bounds = torch.tensor([0, len(ids)], dtype=torch.int32, device="cuda")
        return model.logits(model.backbone(x_TD, bounds))[count - 1 : -1]


def test_other_weights_are_read() -> None:
    """In place, where they lay; in another place; by load_weights: each time as a new engine answers."""
    model, other = copy.deepcopy(wide()), wide(3)
    one = engine_of(model, True)
    before = texts(one.generate(requests(6)))

    def fresh() -> list[list[int]]:
        return texts(engine_of(model, True).generate(requests(6)))

    assert before == fresh()
    model.layers[0].ffn.down_proj.weight.mul_(-1)  # pyrefly: ignore
    one.load_weights(model)
    changed = texts(one.generate(requests(6)))
    assert changed == fresh() != before
    for value in model.parameters():
        value.data = value.data * 1.25
    one.load_weights(model)
    torch.cuda.empty_cache()
    moved = texts(one.generate(requests(6)))
    assert moved == fresh() != changed
    one.load_weights(other)
    assert texts(one.generate(requests(6))) == texts(engine_of(other, True).generate(requests(6)))


def test_a_hook_is_called() -> None:
    """Whoever hooks himself in is called in the next pass, which no graph does; without him, graphs again."""
    one, calls = engine_of(copy.deepcopy(small()), True), list[int]()
    before = texts(one.generate(requests(3)))
    hook = one._loop.runner.model.layers[1].register_forward_hook(lambda *args: calls.append(1))
    one._loop.books.new_weights("hooked")
    assert texts(one.generate(requests(3))) == before and len(calls) > 19
    hook.remove()
    calls.clear()
    one._loop.books.new_weights("unhooked")
    assert texts(one.generate(requests(3))) == before and not calls


def texts(answers: Sequence[Completion]) -> list[list[int]]:
    """Ids of answers."""
    return [answer.token_ids for answer in answers]


@pytest.mark.parametrize("guesses", [None, SpeculationConfig("ngram", 3, adaptive=False)])
def test_sampling_with_speculation_is_plain_sampling(
    guesses: SpeculationConfig | None, measured: list[tuple[str, str, dict[str, float]]]
) -> None:
    """Chi-square of the first two tokens of 3,000 answers against the model's own probabilities."""
    model, ids, count, keep = small(), [*prompt(9, 4), *prompt(9, 4)[:5]], 3000, 5
    width = model.embed.weight.element_size()
    shape = PageShape.of(model.config, page_tokens=16, hash_tokens=4, value_bytes=width)
    config = EngineConfig(CacheConfig(shape, 400, max_requests=64, max_tokens=40), 512, speculation=guesses)
    one = Engine(model, config)
    params = [SamplingParams(max_tokens=3, temperature=1.0, top_k=keep, seed=n) for n in range(count)]
    seen = Counter(tuple(answer.token_ids[:2]) for answer in one.generate([Request(ids, each) for each in params]))

    def probabilities(tokens: list[int]) -> dict[int, float]:
        with torch.no_grad():
            logits_V = model(Packed.join([tokens]).to("cuda"))[-1].double()
        values, best = logits_V.topk(keep)
        return dict(zip(best.tolist(), values.softmax(-1).tolist()))

    want = {(a, b): p * q * count for a, p in probabilities(ids).items() for b, q in probabilities([*ids, a]).items()}
    assert set(seen) <= set(want)
    rare = {pair for pair, expected in want.items() if expected < 5}
    cells = [(seen[pair], want[pair]) for pair in want if pair not in rare]
    cells.append((sum(seen[pair] for pair in rare), max(1e-9, sum(want[pair] for pair in rare))))
    chi2 = sum((a - b) ** 2 / b for a, b in cells)
    limit = len(cells) + 5 * (2 * len(cells)) ** 0.5
    measured.append(("chi2", f"{guesses.draft if guesses else 'plain'}, {len(cells)} cells", {"chi2": chi2 / 1e4}))
    assert chi2 < limit, f"{chi2:.1f} for {len(cells)} cells"


@pytest.fixture(autouse=True)
def give_memory_back() -> Iterator[None]:
    """One test's memory is not the next one's."""
    yield
    torch.cuda.empty_cache()
