"""Drafts in a KDA layer: they leave the state alone, and what is accepted of them is replayed from their inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_model import close, random_ids, tiny_config, tiny_model

from openk3 import Packed
from openk3.model.cache import Drafts, KdaCache, Sequences, States
from openk3.model.init import initialize
from openk3.model.kda import KimiDeltaAttention

WIDTH = 32


def layer() -> KimiDeltaAttention:
    """A float64 layer: width 32, 2 heads of 16."""
    kda = KimiDeltaAttention(tiny_config().text, 0).double().requires_grad_(False)
    initialize(kda, 0, 0.3)
    return kda


def sequences(*lengths: int) -> Sequences:
    """The layout of a pass."""
    return Sequences(torch.tensor([0, *lengths]).cumsum(0).to(torch.int32))


def random_states(count: int) -> KdaCache:
    """Of `count` sequences."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(count, 2, 16, 16), *[(count, 32, 4)] * 3]
    parts = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return KdaCache(parts[0], parts[1:])


def by_steps(kda: KimiDeltaAttention, x_TD: torch.Tensor, cache: KdaCache) -> torch.Tensor:
    """One token after the other, of one sequence."""
    outputs = []
    for x_1D in x_TD.split(1):
        outputs.append(kda(x_1D, sequences(1), cache))
        cache.commit()
    return torch.cat([x_TD.new_zeros(0, WIDTH), *outputs])


def compare(got: States, want: States) -> None:
    """States, and of the windows the inputs that count."""
    close(got[0], want[0])
    for mine, other in zip(got[1], want[1]):
        close(mine[..., 1:], other[..., 1:])


@pytest.mark.parametrize("accepted", range(8))
def test_d01_the_accepted_and_nothing_else(accepted: int) -> None:
    """D01: seven drafts of which `accepted` are right, and a second rejection behind it, in one batch with a sequence
    that accepts another number; state, window and the next output are those of plain decoding."""
    kda, x_ND = layer(), torch.randn(2, 1 + 7 + 5, WIDTH, dtype=torch.float64)
    counts = (accepted, (accepted + 3) % 8)
    cache, before = random_states(2), random_states(2)
    plain = [KdaCache(before.state_NHKV[n : n + 1], [w[n : n + 1] for w in before.windows]) for n in range(2)]
    for first, width in ((0, 8), (8, 3)):
        cache.drafts = Drafts(slice(0, 2))
        y_TD = kda(x_ND[:, first : first + width].flatten(0, 1), sequences(width, width), cache)
        cache.commit()
        assert torch.equal(cache.state_NHKV, before.state_NHKV)
        taken = [1 + min(count, width - 1) for count in counts]
        rows = torch.cat([n * width + torch.arange(count) for n, count in enumerate(taken)])
        assert cache.drafts.inputs is not None
        states = kda.replay(cache.drafts.inputs.rows(rows), sequences(*taken), cache.read(slice(0, 2)))
        for n, count in enumerate(taken):
            want = by_steps(kda, x_ND[n, first : first + count], plain[n])
            close(y_TD[n * width : n * width + count], want)
            part = slice(n, n + 1)
            compare((states[0][part], tuple(w[part] for w in states[1])), plain[n].read(slice(0, 1)))
        cache = KdaCache(states[0], states[1])
        before = KdaCache(states[0].clone(), [w.clone() for w in states[1]])
    x_ND = torch.randn(2, WIDTH, dtype=torch.float64)
    close(kda(x_ND, sequences(1, 1), cache), torch.cat([by_steps(kda, x_ND[n : n + 1], plain[n]) for n in range(2)]))


def test_steps_drafts_and_prompts_in_one_pass() -> None:
    """Only the sequences between are drafts; the others are written, and only the drafts' inputs are kept."""
    kda, lengths = layer(), (1, 1, 3, 4, 9)
    x_TD = torch.randn(sum(lengths), WIDTH, dtype=torch.float64)
    cache, plain = random_states(5), random_states(5)
    want = kda(x_TD, sequences(*lengths), plain)
    cache.drafts = Drafts(slice(2, 4))
    written: list[tuple[slice, States]] = []
    cache.write = lambda which, states: written.append((which, states))  # pyrefly: ignore
    close(kda(x_TD, sequences(*lengths), cache), want)
    plain.commit()
    assert [which for which, _ in written] == [slice(0, 2), slice(4, 5)]
    for which, states in written:
        compare(states, plain.read(which))
    assert cache.drafts.inputs is not None and len(cache.drafts.inputs.q_TC) == 7
    assert cache.drafts.inputs.q_TC.untyped_storage().nbytes() == 7 * 32 * 8
    states = kda.replay(cache.drafts.inputs, sequences(3, 4), cache.read(slice(2, 4)))
    compare(states, plain.read(slice(2, 4)))


def test_kernels_verify_and_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the decoding kernels in Triton's interpreter: outputs, states and windows as by the definition, in float32."""
    torch.manual_seed(0)
    kda, x_TD, layout = layer().float(), torch.randn(5, WIDTH), sequences(2, 3)

    def outcome() -> tuple[torch.Tensor, States]:
        like = random_states(2)
        cache = KdaCache(like.state_NHKV.float(), [w.float() for w in like.windows])
        cache.drafts = Drafts(slice(0, 2))
        y_TD = kda(x_TD, layout, cache)
        assert cache.drafts.inputs is not None
        kept = cache.drafts.inputs.rows(torch.tensor([0, 2, 3]))
        return y_TD, kda.replay(kept, sequences(1, 2), cache.read(slice(0, 2)))

    with torch.no_grad():
        want_TD, want = outcome()
        launched: list[str] = []
        with monkeypatch.context() as kernels:
            for where in ("openk3.model.kda", "openk3.ops.kda.decode"):
                kernels.setattr(f"{where}.pick", lambda *args, **options: "triton")
            from openk3.ops.kda import decode_launch

            def watch(name: str) -> None:
                run: Any = getattr(decode_launch, name)
                kernels.setattr(decode_launch, name, lambda *a, **k: launched.append(name) or run(*a, **k))

            watch("verify")
            watch("replay")
            got_TD, got = outcome()
    assert launched == ["verify", "replay"]
    torch.testing.assert_close(got_TD, want_TD, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got[0], want[0], rtol=1e-4, atol=1e-4)
    for mine, other in zip(got[1], want[1]):
        torch.testing.assert_close(mine[..., 1:], other[..., 1:], rtol=1e-5, atol=1e-5)


def test_the_rows_of_the_mtp_layer_without_running_it() -> None:
    """`latent` is what a pass adds to the cache."""
    model = tiny_model()
    assert model.mtp is not None
    ids, cache = random_ids([9])[0], model.new_cache(1)
    with torch.no_grad():
        h_TD = model.hidden(Packed.join([ids]))[:-1]
        model.draft(h_TD, torch.tensor(ids[1:]), torch.tensor([0, 8], dtype=torch.int32), cache)
        assert cache.mtp is not None
        close(model.mtp.latent(h_TD, model.embed(torch.tensor(ids[1:]))), cache.mtp.latents()[0])
