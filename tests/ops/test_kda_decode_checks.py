"""Decoding refuses what does not fit before a kernel runs, and runs what lies in memory in an unusual way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from openk3.ops import KdaGate
from openk3.ops.kda.decode import (
    DecodePool,
    DecodeWeights,
    Projected,
    decode_kda,
    replay_kda,
    step_kda,
    step_kda_in_place,
    verify_kda,
)

N, S, D, H, K, V, W = 3, 5, 2, 2, 16, 32, 4
CHANNELS = {"q_TC": H * K, "k_TC": H * K, "v_TC": H * V, "decay_logit_TC": H * K, "beta_logit_TH": H}


@pytest.fixture(params=["reference", *(["triton"] if find_spec("triton") else [])], autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The definition, and the kernels in Triton's interpreter."""
    monkeypatch.setenv("OPENK3_BACKEND", request.param)
    return request.param


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal values."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed))


def rows(*before: int) -> Projected:
    """Projections."""
    return Projected(*(draw(*before, C, seed=n) for n, C in enumerate(CHANNELS.values())))


def arguments() -> dict[str, Any]:
    """Everything that the four functions of a layer take."""
    gate = KdaGate(draw(H), draw(H, K))
    channels = (H * K, H * K, H * V)
    return {
        "projected": rows(N),
        "output_gate": draw(N, H * V),
        "weights": DecodeWeights(*(draw(C, W) for C in channels), gate, draw(V), 1e-5),
        "pool": DecodePool(draw(S, H, K, V), *(draw(S, C, W) for C in channels)),
        "slot_N": torch.tensor([3, 0, 4]),
        "cu_seqlens": torch.tensor([0, 1, 1, 3]),
        "kept": rows(S, D),
        "accepted_N": torch.tensor([1, 0, 2]),
    }


def decode(x: dict[str, Any]) -> Tensor:
    """By the names of `arguments`."""
    return decode_kda(x["projected"], x["output_gate"], x["weights"], x["pool"], x["slot_N"], into=x.get("into"))


def verify(x: dict[str, Any]) -> Tensor:
    """By the names of `arguments`."""
    options = {name: x[name] for name in ("cu_seqlens", "kept", "accepted_N")}
    return verify_kda(x["projected"], x["output_gate"], x["weights"], x["pool"], x["slot_N"], **options)


def replay(x: dict[str, Any]) -> None:
    """Kept drafts, by the names of `arguments`."""
    replay_kda(x["kept"], x["weights"], x["pool"], x["slot_N"], x["accepted_N"])


def replay_rows(x: dict[str, Any]) -> None:
    """Packed drafts, by the names of `arguments`."""
    replay_kda(x["projected"], x["weights"], x["pool"], x["slot_N"], x["accepted_N"], cu_seqlens=x["cu_seqlens"])


def cut(holder: str, field: str) -> Callable[[dict[str, Any]], None]:
    """Leaves only the first of the last dimension of one field's tensor."""

    def change(x: dict[str, Any]) -> None:
        x[holder] = replace(x[holder], **{field: getattr(x[holder], field)[..., :1].clone()})

    return change


def put(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Another value of an argument."""
    return lambda x: x.update({name: value})


def to(holder: str, field: str, kind: Any) -> Callable[[dict[str, Any]], None]:
    """One field's tensor in another format or elsewhere."""

    def change(x: dict[str, Any]) -> None:
        x[holder] = replace(x[holder], **{field: getattr(x[holder], field).to(kind)})

    return change


def gate_of(A_log_H: Tensor, dt_bias_HK: Tensor) -> Callable[[dict[str, Any]], None]:
    """Another gate."""

    def change(x: dict[str, Any]) -> None:
        x["weights"] = replace(x["weights"], gate=KdaGate(A_log_H, dt_bias_HK))

    return change


def small_target(x: dict[str, Any]) -> None:
    """Fewer slots to write to than to read from."""
    x["into"] = DecodePool(*(y[:2].clone() for y in x["pool"].tensors()))


LAYER = {
    "filter": (cut("weights", "conv_k_CW"), "conv_k_CW"),
    "norm": (cut("weights", "norm_weight_V"), "norm_weight_V"),
    "A_log": (gate_of(draw(1), draw(H, K)), "A_log_H"),
    "flat bias": (gate_of(draw(H), draw(H * K)), "dt_bias_HK"),
    "window taps": (cut("pool", "window_q_SCW"), "window_q_SCW"),
    "window elsewhere": (to("pool", "window_v_SCW", "meta"), "on meta"),
    "state": (lambda x: x.update(pool=replace(x["pool"], state_SHKV=draw(S, K, V))), "S, H, K, V"),
    "expanded states": (
        lambda x: x.update(pool=replace(x["pool"], state_SHKV=draw(1, H, K, V).expand(S, -1, -1, -1))),
        "pool.state_SHKV: its values share memory",
    ),
    "windows that overlap": (
        lambda x: x.update(pool=replace(x["pool"], window_k_SCW=draw(100).as_strided((S, H * K, W), (2, 2, 1)))),
        "pool.window_k_SCW: its values share memory",
    ),
    "no windows": (
        lambda x: x.update(pool=DecodePool(x["pool"].state_SHKV, None, None, None)),
        "pool.window_q_SCW: expected a tensor, got NoneType",
    ),
    "eps as text": (lambda x: x.update(weights=replace(x["weights"], norm_eps="x")), "norm_eps: .* number, got 'x'"),
    "no gate": (lambda x: x.update(weights=replace(x["weights"], gate=None)), "gate: expected a KdaGate, got NoneType"),
    "no norm": (
        lambda x: x.update(weights=replace(x["weights"], norm_weight_V=None)),
        "norm_weight_V: expected a tensor, got NoneType",
    ),
    "no slots": (put("slot_N", None), "slot_N: expected .* got NoneType"),
    "slots below -1": (put("slot_N", torch.tensor([0, -2, 1])), "slot_N: slot -2 in a pool of 5; -1 means no request"),
    "integer states": (to("pool", "state_SHKV", torch.int64), "floating point"),
    "slots as floats": (put("slot_N", torch.tensor([0.0, 1.0, 2.0])), "slot_N"),
    "slots as booleans": (put("slot_N", torch.tensor([True, False, True])), "slot_N"),
    "slots as a list": (put("slot_N", [0, 1, 2]), "slot_N: expected .* got list"),
    "a matrix of slots": (put("slot_N", torch.tensor([[0, 1, 2]])), "slot_N"),
    "no such slot": (put("slot_N", torch.tensor([0, 1, S])), f"slot {S} in a pool of {S}"),
    "one slot twice": (put("slot_N", torch.tensor([1, 0, 1])), "distinct"),
}
ROWS = {f"{field} cut": (cut("projected", field), field.split("_T")[0]) for field in CHANNELS if field != "q_TC"} | {
    "q cut": (cut("projected", "q_TC"), "projected.q_TC: expected"),
    "float64 row": (to("projected", "v_TC", torch.float64), "projected.v_TC: .* all float64 or none"),
    "row as an array": (
        lambda x: x.update(projected=replace(x["projected"], k_TC=x["projected"].k_TC.numpy())),
        "projected.k_TC: expected a tensor, got ndarray",
    ),
    "integer row": (to("projected", "k_TC", torch.int64), "floating point"),
}
GATES = {"gate cut": (lambda x: x.update(output_gate=draw(N, 1)), "output gate")}
BOUNDS = {
    "bounds of fewer": (put("cu_seqlens", torch.tensor([0, 1, 3])), "cu_seqlens"),
    "falling bounds": (put("cu_seqlens", torch.tensor([0, 2, 1, 3])), "must rise"),
    "bounds past the rows": (put("cu_seqlens", torch.tensor([0, 1, 2, 4])), "must rise within the 3 rows"),
    "bounds below the rows": (put("cu_seqlens", torch.tensor([-1, 1, 2, 3])), "must rise"),
    "no bounds of many": (
        lambda x: x.update(
            cu_seqlens=torch.arange(20, 0, -1), slot_N=torch.full((19,), -1), accepted_N=torch.zeros(19).int()
        ),
        r"integers that must rise within the 3 rows; got \[20, 19, 18, 17, \.\.\., 4, 3, 2, 1\]",
    ),
}
COUNTS = {
    "fewer counts": (put("accepted_N", torch.tensor([1])), "accepted_N"),
    "negative counts": (put("accepted_N", torch.tensor([1, -1, 2])), "accepted_N: request 1 has . rows, of which -1"),
    "counts past the rows": (
        put("accepted_N", torch.tensor([1, 0, 9])),
        "accepted_N: request 2 has 2 rows, of which 9",
    ),
}
NO_BOUNDS = {"no bounds": (put("cu_seqlens", None), "cu_seqlens: expected .* got NoneType")}
NO_COUNTS = {"no counts": (put("accepted_N", None), "accepted_N: expected .* got NoneType")}
KEPT = {
    "kept slots": (put("kept", rows(2, D)), "kept.q_TC: 2 slots beside 5 states"),
    "kept packed": (put("kept", rows(S)), r"kept.q_TC: expected \[S, D, C\]"),
    "kept cut": (cut("kept", "v_TC"), "kept.v_TC: expected"),
}
STORED = {
    "kept format": (to("kept", "k_TC", torch.bfloat16), "kept.k_TC: torch.bfloat16"),
    "expanded kept": (
        lambda x: x.update(kept=replace(x["kept"], k_TC=draw(1, 1, H * K).expand(S, D, -1))),
        "kept.k_TC: its values share memory",
    ),
    "kept depth": (put("kept", rows(S, 1)), "room for 1 rows"),
}
FEWER = {"fewer slots": (put("slot_N", torch.tensor([0, 1])), "2 slots for 3 tokens")}
INTO = {"fewer slots to write": (small_target, "into.state_SHKV")}
REFUSED = [
    pytest.param(op, *case, id=f"{op.__name__}-{name}")
    for op, cases in (
        (decode, LAYER | ROWS | GATES | FEWER | INTO),
        (verify, LAYER | ROWS | GATES | BOUNDS | NO_BOUNDS | COUNTS | KEPT | STORED),
        (replay, LAYER | KEPT | COUNTS | NO_COUNTS),
        (replay_rows, LAYER | ROWS | BOUNDS | COUNTS | NO_COUNTS),
    )
    for name, case in cases.items()
]


@pytest.mark.parametrize(("op", "change", "words"), REFUSED)
def test_what_does_not_fit_is_refused(
    op: Callable[[dict[str, Any]], Any], change: Callable[[dict[str, Any]], None], words: str
) -> None:
    """One clear line, with definition and kernels alike, and nothing written."""
    x = arguments()
    change(x)
    before = [y.clone() if isinstance(y, Tensor) else y for y in x["pool"].tensors()]
    with pytest.raises(ValueError, match=words) as error:
        op(x)
    assert "\n" not in str(error.value)
    assert all(y is was or y.is_meta or torch.equal(y, was) for y, was in zip(x["pool"].tensors(), before))


STEPS: dict[str, tuple[str, Callable[[Tensor], Tensor], str]] = {
    "fewer keys": ("k", lambda x: x[:1], "k: expected"),
    "flat values": ("v", lambda x: x.flatten(1), "v: expected"),
    "integers": ("q", lambda x: x.long(), "floating point"),
    "float64": ("v", lambda x: x.double(), "all float64 or none"),
    "beta of one head": ("beta_logit", lambda x: x[:, :1], "beta_logit: expected"),
    "biases": ("dt_bias", lambda x: x.flatten(), "dt_bias_HK"),
    "states": ("state", lambda x: x[0], "S, H, K, V"),
    "an array": ("k", lambda x: x.numpy(), "k: expected a tensor, got ndarray"),
    "a list": ("beta_logit", lambda x: x.tolist(), "beta_logit: expected a tensor, got list"),
    "no A_log": ("A_log", lambda x: None, "A_log_H: expected a tensor, got NoneType"),
}


def step_arguments() -> dict[str, Any]:
    """Five tensors of tokens, and what `step_kda_in_place` takes besides."""
    tokens = (draw(N, H, K), draw(N, H, K), draw(N, H, V), draw(N, H, K), draw(N, H))
    return {"tokens": tokens, "gate": KdaGate(draw(H), draw(H, K)), "state_SHKV": draw(S, H, K, V)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"slot_N": None}, "slot_N: expected 3 integers in a tensor .* got NoneType"),
        ({"slot_N": torch.tensor([0, -2, 1])}, "slot_N: slot -2 in a pool of 5"),
        ({"gate": None}, "gate: expected a KdaGate, got NoneType"),
        ({"state_SHKV": None}, "state_SHKV: expected a tensor, got NoneType"),
        ({"state_SHKV": draw(1, H, K, V).expand(S, -1, -1, -1)}, "state_SHKV: its values share memory"),
        ({"state_SHKV": draw(S, 1, K, V).expand(-1, H, -1, -1)}, "state_SHKV: its values share memory"),
    ],
)
def test_a_step_in_place_of_what_does_not_fit_is_refused(change: dict[str, Any], words: str) -> None:
    """What is missing is named, and so is a state that is written to in two places at once."""
    x = step_arguments() | {"slot_N": torch.tensor([3, 0, 4])} | change
    with pytest.raises(ValueError, match=words):
        step_kda_in_place(*x.pop("tokens"), **x)


def test_a_state_may_lie_in_another_order(backend: str) -> None:
    """Transposed or every other slot: nothing shares memory, so only kernels refuse it, which want it contiguous."""
    x = step_arguments()
    tokens, slots = x.pop("tokens"), torch.tensor([3, 0, 4])
    want = step_kda_in_place(*tokens, **x | {"state_SHKV": x["state_SHKV"].clone()}, slot_N=slots)
    for state in (x["state_SHKV"].mT.contiguous().mT, x["state_SHKV"].repeat_interleave(2, 0)[::2]):
        if backend == "reference":
            got = step_kda_in_place(*tokens, gate=x["gate"], state_SHKV=state, slot_N=slots)
            torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
        else:
            with pytest.raises(ValueError, match="state_SHKV: the kernels need contiguous tensors"):
                step_kda_in_place(*tokens, gate=x["gate"], state_SHKV=state, slot_N=slots)


@pytest.mark.parametrize("name", [*STEPS, "more states"])
def test_a_step_of_what_does_not_fit_is_refused(name: str) -> None:
    """Nothing is stretched over heads or requests."""
    x = {"q": draw(N, H, K), "k": draw(N, H, K), "v": draw(N, H, V), "decay_logit": draw(N, H, K)}
    x |= {"beta_logit": draw(N, H), "A_log": draw(H), "dt_bias": draw(H, K), "state": draw(N, H, K, V)}
    field, change, words = STEPS.get(name, ("state", lambda y: torch.cat([y, y]), "6 states for 3 tokens"))
    x[field] = change(x[field])
    *tokens, A_log, dt_bias, state = x.values()
    gate = KdaGate(A_log, dt_bias)
    with pytest.raises(ValueError, match=words):
        step_kda(*tokens, gate, state)
    if name != "more states":
        with pytest.raises(ValueError, match=words):
            step_kda_in_place(*tokens, gate=gate, state_SHKV=state, slot_N=torch.arange(N))


@pytest.mark.parametrize("op", [decode, verify, replay, replay_rows])
def test_small_tensors_may_lie_anywhere(op: Callable[[dict[str, Any]], Any]) -> None:
    """Slots, bounds, counts and norm weights as columns of tables: the same results as side by side."""
    plain, strided = arguments(), arguments()
    for name in ("slot_N", "cu_seqlens", "accepted_N"):
        strided[name] = torch.stack(
            [strided[name].to(torch.int32), torch.full_like(strided[name], 1, dtype=torch.int32)], 1
        )[:, 0]
    weight_V = torch.stack([strided["weights"].norm_weight_V, torch.zeros(V)], 1)[:, 0]
    strided["weights"] = replace(strided["weights"], norm_weight_V=weight_V)
    want, got = op(plain), op(strided)
    assert want is None or torch.equal(got, want)
    for mine, right in zip(strided["pool"].tensors(), plain["pool"].tensors()):
        assert torch.equal(mine, right)


@pytest.mark.parametrize("op", [decode, verify])
def test_decoding_leaves_no_graph(op: Callable[[dict[str, Any]], Any]) -> None:
    """Parameters that train do not make pools that are written in place parts of an ever growing graph."""
    x = arguments()
    x["weights"] = replace(x["weights"], norm_weight_V=x["weights"].norm_weight_V.requires_grad_())
    assert not op(x).requires_grad
    assert not any(y.requires_grad for y in x["pool"].tensors())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("count", [-1, 100])
def test_kernels_cut_counts_to_what_there_is(packed: bool, count: int, backend: str) -> None:
    """On a GPU nobody looks at counts: kernels take them between none and all rows of a request, none of the next."""
    x, most = arguments(), arguments()
    bounds = x["cu_seqlens"] if packed else None
    most["accepted_N"] = (bounds.diff() if bounds is not None else torch.full((N,), D)) * (count > 0)
    (replay_rows if packed else replay)(most)
    x["accepted_N"] = torch.full((N,), count)
    if backend == "triton":
        from openk3.ops.kda import decode_launch

        rows = x["projected" if packed else "kept"]
        decode_launch.replay(rows, x["weights"], x["pool"], x["slot_N"], x["accepted_N"], cu_seqlens=bounds)
        for mine, right in zip(x["pool"].tensors(), most["pool"].tensors()):
            assert torch.equal(mine, right)
    else:
        with pytest.raises(ValueError, match="accepted_N: request 0 has"):
            (replay_rows if packed else replay)(x)


def test_counts_of_no_request_do_not_matter() -> None:
    """Slot -1 accepts whatever is left in its place."""
    x, most = arguments(), arguments()
    for y, count in ((x, 77), (most, 0)):
        y["slot_N"], y["accepted_N"] = torch.tensor([3, -1, 4]), torch.tensor([1, count, 2])
        replay(y)
    for mine, right in zip(x["pool"].tensors(), most["pool"].tensors()):
        assert torch.equal(mine, right)
