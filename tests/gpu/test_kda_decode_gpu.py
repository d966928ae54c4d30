"""Decoding kernels on a GPU, at the size of real layers: against float64, and bit for bit against each other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from kda_kernel_checks import errors
from torch import Tensor

from openk3.ops import KdaGate
from openk3.ops.kda.decode import (
    DecodePool,
    DecodeWeights,
    Projected,
    decode_kda,
    replay_kda,
    step_kda_in_place,
    verify_kda,
)

pytestmark = pytest.mark.gpu
K = V = 128
DRAFTS = 5


class Draw:
    """Random layers, pools and tokens on the GPU."""

    def __init__(self, H: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> None:
        self.H, self.dtype = H, dtype
        self.generator = torch.Generator("cuda").manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Standard normal values."""
        return torch.randn(shape, generator=self.generator, device="cuda").to(dtype or self.dtype)

    def weights(self) -> DecodeWeights:
        """Parameters of a layer, in float32."""
        convolutions = (0.5 * self.normal(self.H * K, 4, dtype=torch.float32) for _ in range(3))
        gate = KdaGate(*(0.5 * self.normal(*shape, dtype=torch.float32) for shape in ((self.H,), (self.H, K))))
        return DecodeWeights(*convolutions, gate, 1 + 0.1 * self.normal(V, dtype=torch.float32), 1e-5)

    def pool(self, slots: int, state: torch.dtype = torch.float32) -> DecodePool:
        """States and windows of this many slots."""
        windows = (self.normal(slots, self.H * K, 4) for _ in range(3))
        return DecodePool(self.normal(slots, self.H, K, V, dtype=state), *windows)

    def tokens(self, *rows: int) -> Projected:
        """Projections of tokens."""
        return Projected(*(self.normal(*rows, self.H * K) for _ in range(4)), self.normal(*rows, self.H))

    def gate(self, rows: int) -> Tensor:
        """Output gates of tokens."""
        return self.normal(rows, self.H * V)

    def slots(self, count: int, among: int, missing: int = 0) -> Tensor:
        """Distinct slots in random order, the last few of them missing."""
        slots = torch.randperm(among, generator=self.generator, device="cuda")[:count]
        slots[count - missing :] = -1
        return slots


@pytest.fixture(autouse=True)
def give_memory_back() -> Iterator[None]:
    """One test's memory is not the next one's."""
    yield
    torch.cuda.empty_cache()


def copy(pool: DecodePool, dtype: torch.dtype | None = None) -> DecodePool:
    """Another pool of the same values."""
    return DecodePool(*(x.clone() if dtype is None else x.to(dtype) for x in pool.tensors()))


def double(draw: DecodeWeights | Projected) -> DecodeWeights | Projected:
    """The same values in float64, which the definition computes."""
    if isinstance(draw, Projected):
        return Projected(*(x.double() for x in draw.tensors()))
    gate = KdaGate(draw.gate.A_log_H.double(), draw.gate.dt_bias_HK.double(), draw.gate.lower_bound)
    weights = (x.double() for x in draw.convolutions())
    return DecodeWeights(*weights, gate, draw.norm_weight_V.double(), draw.norm_eps)


def different(a: DecodePool, b: DecodePool) -> list[int]:
    """Slots in which any bit differs."""
    pairs = zip(a.tensors(), b.tensors())
    rows = [(x.flatten(1).view(torch.uint8) != y.flatten(1).view(torch.uint8)).any(1) for x, y in pairs]
    return torch.stack(rows).any(0).nonzero()[:, 0].tolist()


def stepped(
    tokens: Projected, gate: Tensor, weights: DecodeWeights, pool: DecodePool, plan: tuple[Tensor, list[int]]
) -> Tensor:
    """Outputs of `decode_kda` token by token; request n of `plan` (slots, lengths) has the next length[n] rows."""
    slots, lengths = plan
    y, starts = torch.zeros_like(gate), [sum(lengths[:n]) for n in range(len(lengths))]
    for position in range(max(lengths, default=0)):
        has = [n for n, length in enumerate(lengths) if length > position]
        rows = torch.tensor([starts[n] + position for n in has], device="cuda")
        y[rows] = decode_kda(tokens.rows(rows), gate[rows], weights, pool, slots[has])
    return y


@pytest.mark.parametrize(("N", "H", "state"), [(1, 96, torch.float32), (64, 12, torch.float32), (9, 2, torch.bfloat16)])
def test_decode(N: int, H: int, state: torch.dtype) -> None:
    """Three steps against float64: outputs, states, windows; slots in any order, some of them missing."""
    draw = Draw(H, seed=N)
    weights, pool = draw.weights(), draw.pool(N + 3, state)
    untouched, wide, slots = copy(pool), copy(pool, torch.float64), draw.slots(N, N + 3, missing=N // 4)
    for _ in range(3):
        tokens, gate = draw.tokens(N), draw.gate(N)
        y = decode_kda(tokens, gate, weights, pool, slots)
        want = decode_kda(double(tokens), gate.double(), double(weights), wide, slots)
        found = errors({"y": y, "state": pool.state_SHKV}, {"y": want, "state": wide.state_SHKV})
        # Outputs are rounded once (1.7e-3); states not at all, or once a step.
        rounded = state == torch.bfloat16
        assert found["y"] < (5e-3 if rounded else 2.2e-3) and found["state"] < (5e-3 if rounded else 1e-6), found
        assert y.dtype == gate.dtype and not y[slots < 0].any()
    for mine, right in zip(pool.tensors()[1:], wide.tensors()[1:]):
        assert torch.equal(mine, right.to(mine.dtype))
    assert set(different(pool, untouched)) == set(slots[slots >= 0].tolist())


def test_decode_beside() -> None:
    """With `into` the new states go there and the old ones stay."""
    draw = Draw(12)
    weights, pool, slots = draw.weights(), draw.pool(8), draw.slots(6, 8)
    tokens, gate, old, into = draw.tokens(6), draw.gate(6), copy(pool), draw.pool(8)
    y = decode_kda(tokens, gate, weights, pool, slots, into=into)
    assert different(pool, old) == []
    assert torch.equal(decode_kda(tokens, gate, weights, pool, slots), y)
    assert set(different(pool, into)) == set(range(8)) - set(slots.tolist())


def test_decode_is_deterministic_and_may_be_captured() -> None:
    """A CUDA graph's replays on changed inputs give the bits of plain calls."""
    draw = Draw(96)
    weights, pool, slots = draw.weights(), draw.pool(10), draw.slots(8, 10)
    tokens, gate = draw.tokens(8), draw.gate(8)
    plain, stream = copy(pool), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        decode_kda(tokens, gate, weights, copy(pool), slots)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = decode_kda(tokens, gate, weights, pool, slots)
    for step in range(3):
        for static, fresh in zip(tokens.tensors(), draw.tokens(8).tensors()):
            static.copy_(fresh)
        slots.copy_(slots.roll(1) if step else slots)
        graph.replay()
        assert torch.equal(decode_kda(tokens, gate, weights, plain, slots), y)
    assert different(pool, plain) == []


def test_recurrence_only() -> None:
    """The bare step on a pool against float64."""
    draw = Draw(12)
    pool, slots, weights = draw.pool(20), draw.slots(16, 20, missing=2), draw.weights()
    tokens = [draw.normal(16, 12, K) for _ in range(4)] + [draw.normal(16, 12)]
    before, wide = copy(pool), copy(pool, torch.float64)
    o = step_kda_in_place(*tokens, gate=weights.gate, state_SHKV=pool.state_SHKV, slot_N=slots)
    wide_tokens, wide_gate = [x.double() for x in tokens], double(weights).gate
    want = step_kda_in_place(*wide_tokens, gate=wide_gate, state_SHKV=wide.state_SHKV, slot_N=slots)
    found = errors({"o": o, "state": pool.state_SHKV}, {"o": want, "state": wide.state_SHKV})
    assert found["o"] < 2.2e-3 and found["state"] < 3e-7, found
    assert set(different(pool, before)) == set(slots[slots >= 0].tolist())


def test_rows_that_are_nearly_zero() -> None:
    """Rows of q and k of norm 1e-3 weigh as much as what is added inside the root: from no state S = k (beta v)^T."""
    draw = Draw(12)
    pool, slots, weights = draw.pool(20), draw.slots(16, 20), draw.weights()
    pool.state_SHKV.zero_()
    tokens = [draw.normal(16, 12, K) for _ in range(4)] + [draw.normal(16, 12)]
    q, k = (x / x.float().norm(dim=2, keepdim=True).to(x.dtype) * 1e-3 for x in tokens[:2])
    step_kda_in_place(q, k, *tokens[2:], gate=weights.gate, state_SHKV=pool.state_SHKV, slot_N=slots)
    unit = k.double() / (k.double().square().sum(2, keepdim=True) + 1e-6).sqrt()
    want = unit[..., None] * (tokens[4].double().sigmoid()[..., None] * tokens[2]).unsqueeze(2)
    assert errors({"state": pool.state_SHKV[slots.long()]}, {"state": want})["state"] < 1e-6


def test_verify_is_stepping_and_writes_nothing() -> None:
    """Drafts of unequal number give the bits of steps one by one; states and windows stay."""
    draw, lengths = Draw(12), [3, 0, 5, 1, 2, 4]
    weights, pool, slots = draw.weights(), draw.pool(9), draw.slots(6, 9)
    tokens, gate = draw.tokens(sum(lengths)), draw.gate(sum(lengths))
    bounds = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    old = copy(pool)
    y = verify_kda(tokens, gate, weights, pool, slots, cu_seqlens=bounds)
    assert different(pool, old) == []
    assert torch.equal(stepped(tokens, gate, weights, pool, (slots, lengths)), y)


@pytest.mark.parametrize(
    ("state", "hopper"), [(torch.float32, True), (torch.bfloat16, True), (torch.float32, False)], ids=str
)
def test_case_D01_only_accepted_drafts_are_replayed(
    state: torch.dtype, hopper: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D01: whatever was accepted, from none to all, the state is that of the accepted tokens alone, bit for bit; the
    rows may come from the cache of the drafts or from the packed ones, and the next verification may replay them."""
    if not hopper:
        monkeypatch.setenv("OPENK3_GLUON", "0")
    draw, lengths = Draw(12, seed=1), [5, 4, 0, 5, 1, 3]
    weights, pool, slots = draw.weights(), draw.pool(9, state), draw.slots(6, 9)
    tokens, gate, kept = draw.tokens(sum(lengths)), draw.gate(sum(lengths)), draw.tokens(9, DRAFTS)
    bounds = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    accepted = [0, 2, 0, 5, 1, 1]
    count = torch.tensor(accepted, device="cuda", dtype=torch.int32)
    verify_kda(tokens, gate, weights, pool, slots, cu_seqlens=bounds, kept=kept)
    by_steps, by_rows, by_next = copy(pool), copy(pool), copy(pool)
    starts = bounds.tolist()
    chosen = [row for n, number in enumerate(accepted) for row in range(starts[n], starts[n] + number)]
    stepped(tokens.rows(torch.tensor(chosen, device="cuda")), gate[chosen], weights, by_steps, (slots, accepted))
    replay_kda(kept, weights, pool, slots, count)
    replay_kda(tokens, weights, by_rows, slots, count, cu_seqlens=bounds)
    assert different(pool, by_steps) == [] and different(by_rows, by_steps) == []
    more, more_gate = draw.tokens(sum(lengths)), draw.gate(sum(lengths))
    want = verify_kda(more, more_gate, weights, pool, slots, cu_seqlens=bounds)
    options = {"cu_seqlens": bounds, "kept": kept, "accepted_N": count}
    assert torch.equal(verify_kda(more, more_gate, weights, by_next, slots, **options), want)
    assert different(by_next, by_steps) == []


def test_case_K02_b_more_than_65535_requests_and_heads() -> None:
    """K02 b: a step of 700 requests of 96 heads."""
    draw = Draw(96)
    weights, pool, slots = draw.weights(), draw.pool(700), draw.slots(700, 700)
    tokens, gate = draw.tokens(700), draw.gate(700)
    wide = copy(pool, torch.float64)
    y = decode_kda(tokens, gate, weights, pool, slots)
    want = decode_kda(double(tokens), gate.double(), double(weights), wide, slots)
    found = errors({"y": y, "state": pool.state_SHKV}, {"y": want, "state": wide.state_SHKV})
    assert found["y"] < 2.2e-3 and found["state"] < 3e-7, found


def test_case_K02_c_pools_of_more_than_2_to_the_31_values() -> None:
    """K02 c: of 1,401 slots only the last one, beyond the limit, changes, and as a small pool's does."""
    draw, H = Draw(96), 96
    assert 1400 * H * K * V > 2**31
    weights, small, last = draw.weights(), draw.pool(1), torch.tensor([1400], device="cuda")
    pool = DecodePool(*(x.new_full((1401, *x.shape[1:]), 3.0) for x in small.tensors()))
    for big, one in zip(pool.tensors(), small.tensors()):
        big[1400] = one[0]
    tokens, gate = draw.tokens(1), draw.gate(1)
    y = decode_kda(tokens, gate, weights, pool, last)
    assert torch.equal(decode_kda(tokens, gate, weights, small, torch.zeros_like(last)), y)
    for big, one in zip(pool.tensors(), small.tensors()):
        assert torch.equal(big[1400], one[0])
        assert all(bool((big[slot] == 3).all()) for slot in (0, 1399))
        assert bool((big[:1400].amax() == 3) & (big[:1400].amin() == 3))
