"""The kernels of KDA's forward pass, in Triton's interpreter, against their formulas in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kda_checks import kda_inputs, run
from kda_tile_formulas import Cut, forward_scan, tile_rows
from kda_tile_formulas import Workspace as Exact
from kda_tile_formulas import prepare as exact_prepare
from torch import Tensor

from openk3.ops import KdaGate, recurrent_kda
from openk3.ops.kda import fused
from openk3.ops.kda.fused import Forward, fused_forward, split_tiles
from openk3.ops.kda.prepare_kernel import Workspace, prepare
from openk3.ops.kda.scan_kernel import ScanOutputs, fold, scan, scan_maps
from openk3.ops.kda.tiles import Span, Tiles, tile_table
from openk3.ops.kda.workspace import kept

LENGTHS = [33, 0, 7, 70, 0]
FIELDS = ("nkd", "qd", "kr", "inv", "mqk", "decay", "beta")


def table(lengths: list[int], *, checkpoints: tuple[int, ...] = (), part_tiles: int | None = None) -> Tiles:
    """The tiles of packed sequences."""
    bounds = tuple(torch.tensor([0, *lengths]).cumsum(0).tolist())
    return tile_table(bounds, torch.device("cpu"), checkpoints=checkpoints, part_tiles=part_tiles)


def off(got: Tensor, want: Tensor) -> float:
    """Norm of the difference by the norm of what is right."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def float32(inputs: dict[str, Tensor]) -> tuple[tuple[Tensor, ...], KdaGate, Tensor]:
    """Tokens, gate and states as the kernels take them."""
    narrow = {name: x.float() for name, x in inputs.items()}
    tokens = tuple(narrow[name] for name in ("q", "k", "v", "decay_logit", "beta_logit"))
    return tokens, KdaGate(narrow["A_log"], narrow["dt_bias"]), narrow["state"]


def narrowed(space: Exact) -> Workspace:
    """The exact workspace as the kernels have it."""
    return Workspace(**{name: getattr(space, name).float().contiguous() for name in FIELDS})


@pytest.mark.parametrize("chunk", [16, 32])
@pytest.mark.parametrize("keys", ["random", "near"])
def test_prepare(chunk: int, keys: str) -> None:
    """Every tensor of the workspace, ragged tiles included; keys that are nearly one, with beta near 1."""
    inputs = kda_inputs(LENGTHS, H=2, K=16)
    if keys == "near":
        inputs["k"] = inputs["k"][:1] + 0.01 * inputs["k"]
        inputs["beta_logit"] = inputs["beta_logit"] + 8
        inputs["decay_logit"] -= 12
    inputs = {name: x.float().double() for name, x in inputs.items()}
    (q, k, _, logit, beta), gate, _ = float32(inputs)
    bounds = tuple(torch.tensor([0, *LENGTHS]).cumsum(0).tolist())
    got = prepare(q, k, logit, beta, gate, span=tile_table(bounds, q.device, chunk=chunk).sequences())
    want = exact_prepare(tile_rows(inputs, Cut.of(LENGTHS, chunk)))
    assert all(off(getattr(got, name), getattr(want, name)) < 3e-6 for name in FIELDS)


@pytest.mark.parametrize("chunk", [16, 32])
def test_prepare_of_rows_that_are_nearly_zero(chunk: int) -> None:
    """Rows of q and k of norm 1e-3 weigh as much as what is added inside the root, and zero rows give zero."""
    inputs = kda_inputs([40], H=2, K=16)
    for name in ("q", "k"):
        inputs[name] = inputs[name] / inputs[name].norm(dim=2, keepdim=True) * 1e-3
        inputs[name][5] = 0
    inputs = {name: x.float().double() for name, x in inputs.items()}
    (q, k, _, logit, beta), gate, _ = float32(inputs)
    got = prepare(q, k, logit, beta, gate, span=tile_table((0, 40), q.device, chunk=chunk).sequences())
    want = exact_prepare(tile_rows(inputs, Cut.of([40], chunk)))
    assert all(off(getattr(got, name), getattr(want, name)) < 3e-6 for name in FIELDS)


def test_prepare_rounds_with_care() -> None:
    """In bfloat16: what rounding takes from an entry of the inverse, the next one has; what is lost is kept."""
    inputs = kda_inputs([64], H=2, K=16)
    inputs["k"] = inputs["k"][:1] + 0.01 * inputs["k"]
    inputs["beta_logit"], inputs["decay_logit"] = inputs["beta_logit"] + 6, inputs["decay_logit"] - 14
    tokens, gate, _ = float32(inputs)
    q, k, _, logit, beta = (x.bfloat16() for x in tokens)
    exact = inputs | {"q": q.double(), "k": k.double(), "decay_logit": logit.double(), "beta_logit": beta.double()}
    want = exact_prepare(tile_rows(exact, Cut.of([64], 32)))
    span = tile_table((0, 64), q.device).sequences()
    got = prepare(q, k, logit, beta, gate, span=span, rests=kept(1))
    assert off(got.inv, want.inv) < 3e-3
    sums = (want.inv.bfloat16().double() - want.inv).sum(2), (got.inv.double() - want.inv).sum(2)
    assert sums[1].norm() < 0.2 * sums[0].norm()
    for name in ("kr", "nkd", "qd", "inv"):
        both = getattr(got, name).double() + getattr(got, f"{name}_rest").double()
        assert off(getattr(got, name), getattr(want, name)) > 1e-3 and off(both, getattr(want, name)) < 2e-5, name
    bare = prepare(q, k, logit, beta, gate, span=span)
    assert all(getattr(bare, name) is None for name in kept(1)) and torch.equal(bare.inv, got.inv)


def test_scan_outputs() -> None:
    """o, r, entering states, final states and saved ones, each where it belongs, from sequences and from a slab."""
    inputs = kda_inputs(LENGTHS, H=2, K=16, V=32)
    cut = Cut.of(LENGTHS, 32)
    space = exact_prepare(tile_rows(inputs, cut))
    o, r, states, final = forward_scan(space, inputs["v"], inputs["state"], cut)
    tiles, v, initial = table(LENGTHS, part_tiles=1), inputs["v"].float(), inputs["state"].float()
    got = ScanOutputs(*(torch.full(x.shape, torch.nan) for x in (o, r, states, final)))
    saved = torch.full((tiles.num_saved, *final.shape[1:]), torch.nan)
    scan(narrowed(space), v, tiles.sequences(), initial, ScanOutputs(got.o, got.r, got.states, got.final, saved))
    assert all(off(x, y) < 1e-6 for x, y in zip((got.o, got.r, got.states, got.final), (o, r, states, final)))
    assert torch.equal(got.final[1], initial[1])
    inner = [part for part in range(tiles.num_parts) if part not in tiles.sequence_parts]
    entering = states[[tiles.part_first[part] for part in inner]].mT
    assert off(saved[inner], entering) < 1e-6

    low, high = 1, 6  # the second part of the first sequence to the last but one of the fourth
    span = tiles.slab(low, high)
    tile, token = slice(span.tile_low, span.tile_low + 4), slice(span.token_low, span.token_low + span.num_tokens)
    part = Workspace(**{name: getattr(narrowed(space), name)[tile] for name in FIELDS})
    first = torch.stack([states[x].mT if n % 2 == 0 else initial[1] for n, x in zip((0, 1, 0, 0, 0), (1, 0, 2, 3, 4))])
    got = ScanOutputs(r=torch.full((span.num_tokens, 2, 32), torch.nan), states=torch.full((4, 2, 32, 16), torch.nan))
    scan(part, v, span, first.float(), got)
    assert off(got.r, r[token]) < 1e-6 and off(got.states, states[tile]) < 1e-6


def test_states_for_gradients_add_up_in_two_parts() -> None:
    """Keys that are nearly one: a state is what is left of many writes, and errors of keys and writes stay in it."""
    inputs = kda_inputs([160], H=2, K=16, V=32)
    inputs["k"] = inputs["k"][:1] + 0.01 * inputs["k"]
    inputs["beta_logit"], inputs["decay_logit"] = inputs["beta_logit"] + 6, inputs["decay_logit"] - 14
    inputs = {name: x.bfloat16().double() for name, x in inputs.items()}
    space = exact_prepare(tile_rows(inputs, Cut.of([160], 32)))
    want = forward_scan(space, inputs["v"], inputs["state"], Cut.of([160], 32))[2]
    tokens, gate, state = float32(inputs)
    q, k, v, logit, beta = (x.bfloat16() for x in tokens)
    span = tile_table((0, 160), q.device).sequences()
    errors = []
    for backward in (False, True):
        narrow = prepare(q, k, logit, beta, gate, span=span, rests=("kr_rest",) if backward else ())
        got = ScanOutputs(r=torch.empty_like(v), states=torch.empty(want.shape, dtype=v.dtype))
        scan(narrow, v, span, state, got)
        assert got.states is not None
        errors.append(off(got.states[1:], want[1:]))
    assert errors[1] < 2.5e-3 < 1.2 * errors[0]


def test_writes_for_gradients_add_up_in_two_parts() -> None:
    """What is left of rounding lies beside what tokens write; and what they read is the state in two parts."""
    inputs = kda_inputs([160], H=2, K=16, V=32)
    inputs["decay_logit"] = inputs["decay_logit"] - 14
    inputs["v"] = inputs["v"].bfloat16().double()
    cut = Cut.of([160], 32)
    space = exact_prepare(tile_rows(inputs, cut))
    space = replace(space, **{name: getattr(space, name).bfloat16().double() for name in ("nkd", "inv")})
    _, want, states, _ = forward_scan(space, inputs["v"], inputs["state"], cut)
    rest = (space.kr - space.kr.bfloat16()).bfloat16().contiguous()
    narrow = {name: getattr(space, name).bfloat16().contiguous() for name in ("nkd", "qd", "kr", "inv", "mqk")}
    narrow |= {name: getattr(space, name).float().contiguous() for name in ("decay", "beta")}
    v, span = inputs["v"].bfloat16(), table([160]).sequences()
    got = ScanOutputs(r=torch.empty_like(v), r_rest=torch.empty_like(v), states=states.bfloat16())
    scan(Workspace(**narrow, kr_rest=rest), v, span, inputs["state"].float(), got)
    assert got.r is not None and got.r_rest is not None
    assert off(got.r, want) > 1e-3 and off(got.r.double() + got.r_rest.double(), want) < 2e-5


def few_heads_workspace(space: Exact) -> Workspace:
    """An exact workspace in bfloat16 with all that rounding leaves of it."""
    names = ("nkd", "qd", "kr", "inv", "mqk")
    narrow = {name: getattr(space, name).bfloat16().contiguous() for name in names}
    narrow |= {x: (getattr(space, x[:-5]) - narrow[x[:-5]].double()).bfloat16().contiguous() for x in kept(1)}
    return Workspace(**narrow, decay=space.decay.float().contiguous(), beta=space.beta.float().contiguous())


def test_few_heads_lose_nothing_on_the_way() -> None:
    """With keys, kr and the inverse in two parts, so are the writes and states."""
    inputs = kda_inputs([160], H=2, K=16, V=32)
    inputs["decay_logit"] = inputs["decay_logit"] - 14
    inputs["v"] = inputs["v"].bfloat16().double()
    cut = Cut.of([160], 32)
    space = exact_prepare(tile_rows(inputs, cut))
    _, want, states, _ = forward_scan(space, inputs["v"], inputs["state"], cut)
    v, span = inputs["v"].bfloat16(), table([160]).sequences()
    writes, found = torch.zeros(2, *v.shape, dtype=v.dtype), torch.zeros(2, *states.shape, dtype=v.dtype)
    outputs = ScanOutputs(r=writes[0], r_rest=writes[1], states=found[0], states_rest=found[1])
    scan(few_heads_workspace(space), v, span, inputs["state"].float(), outputs)
    assert off(writes[0], want) > 1e-3 and off(writes.double().sum(0), want) < 2e-5
    assert off(found[0], states) > 1e-3 and off(found.double().sum(0), states) < 2e-5


def test_maps_and_fold() -> None:
    """Parts as maps, joined: the states that enter them in the scan of whole sequences."""
    lengths = [0, 75, 40, 100]
    inputs = kda_inputs(lengths, H=2, K=16, V=32)
    cut = Cut.of(lengths, 32)
    space = exact_prepare(tile_rows(inputs, cut))
    states = forward_scan(space, inputs["v"], inputs["state"], cut)[2]
    tiles, initial = table(lengths, part_tiles=2), inputs["state"].float()
    maps = scan_maps(narrowed(space), inputs["v"].float(), tiles.parts())
    entering = torch.full((tiles.num_parts, *initial.shape[1:]), torch.nan)
    low = 2  # in two steps, the second one from within the second sequence
    fold(maps[:low], entering, initial, tiles=tiles, parts=(0, low))
    entering[low] = states[tiles.part_first[low]].mT
    fold(maps[low:], entering, initial, tiles=tiles, parts=(low, tiles.num_parts))
    assert torch.equal(entering[0], initial[0])
    assert off(entering[1:], states[list(tiles.part_first[1:-1])].mT) < 1e-6
    fold(maps, entering, None, tiles=tiles, parts=(0, tiles.num_parts))
    assert not entering[list(tiles.sequence_parts[:-1])].any() and entering.isfinite().all()
    eye = torch.eye(16).expand(2, -1, -1)
    assert torch.equal(maps[0, :, 32:], eye) and not maps[0, :, :32].any()


def test_maps_for_gradients_add_up_in_two_parts() -> None:
    """The states that parts start from in the backward pass, too, where keys are nearly one; no others change."""
    inputs = kda_inputs([320], H=2, K=16, V=32)
    inputs["k"] = inputs["k"][:1] + 0.01 * inputs["k"]
    inputs["beta_logit"], inputs["decay_logit"] = inputs["beta_logit"] + 6, inputs["decay_logit"] - 14
    inputs = {name: x.bfloat16().double() for name, x in inputs.items()}
    states = forward_scan(
        exact_prepare(tile_rows(inputs, Cut.of([320], 32))), inputs["v"], inputs["state"], Cut.of([320], 32)
    )[2]
    tokens, gate, state = float32(inputs)
    tiles = table([320], part_tiles=5)
    tokens = tuple(x.bfloat16() for x in tokens)
    found = [fused_forward(tokens, gate, state, tiles, split=True, careful=careful) for careful in (False, True)]
    entering = [x.entering_PHKV for x in found]
    errors = [off(x[1], states[5].mT) for x in entering if x is not None]
    assert errors[1] < 2e-3 < 0.3 * errors[0]
    tile_alone = fused_forward(tokens, gate, state, tiles, split=False, careful=True)
    assert torch.equal(tile_alone.o_THV, fused_forward(tokens, gate, state, tiles, split=False).o_THV)


def forward(
    inputs: dict[str, Tensor], lengths: list[int], *, split: bool, part_tiles: int | None, checkpoints: tuple[int, ...]
) -> Forward:
    """The whole forward pass in float32."""
    tokens, gate, state = float32(inputs)
    tiles = table(lengths, checkpoints=checkpoints, part_tiles=part_tiles)
    return fused_forward(tokens, gate, state, tiles, split=split)


@pytest.mark.parametrize("split", [False, True])
def test_split_and_checkpoints(split: bool) -> None:
    """Outputs, final states, and states at positions in and between tiles, at parts' borders and at sequences' ends,
    whether parts are scanned at once or not; and the states entering parts agree."""
    lengths, checkpoints = [100, 0, 70], (1, 40, 100, 132, 150, 170)
    inputs = kda_inputs(lengths, H=1, K=16, V=16)
    o, final = run(recurrent_kda, inputs, lengths)
    got = forward(inputs, lengths, split=split, part_tiles=2, checkpoints=checkpoints)
    assert off(got.o_THV, o) < 5e-6 and off(got.final_NHKV, final) < 2e-6
    for position, state in zip(checkpoints, got.checkpoints_MHKV, strict=True):
        n, start = (0, 0) if position <= 100 else (2, 100)
        names = ("q", "k", "v", "decay_logit", "beta_logit")
        part = inputs | {name: inputs[name][start:position] for name in names} | {"state": inputs["state"][n : n + 1]}
        assert off(state, run(recurrent_kda, part)[1][0]) < 5e-6
    other = forward(inputs, lengths, split=not split, part_tiles=2, checkpoints=checkpoints)
    assert off(got.entering_PHKV, other.entering_PHKV) < 5e-6


@pytest.mark.parametrize("room", [5, 2**17])
def test_parts_scanned_at_once_read_what_none_of_them_writes(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts start in any order: nothing that a scan reads is among what it writes, and what parts start from is what
    the maps gave, bit for bit, behind it. With gates that forget little the two ways to a state differ in many bits."""
    inputs = kda_inputs([200, 170], H=1, K=16, V=16)
    inputs["decay_logit"] -= 12
    started: list[Tensor] = []

    def watched(workspace: Workspace, v_THV: Tensor, span: Span, initial: Tensor, outputs: ScanOutputs) -> None:
        written = [x for x in (outputs.o, outputs.final, outputs.saved) if x is not None]
        assert initial.untyped_storage().data_ptr() not in [x.untyped_storage().data_ptr() for x in written]
        started.append(initial.clone())
        scan(workspace, v_THV, span, initial, outputs)

    monkeypatch.setattr(fused, "_SLAB_TILES", room)
    monkeypatch.setattr(fused, "scan", watched)
    for checkpoints in ((), (40, 300)):
        started.clear()
        got = forward(inputs, [200, 170], split=True, part_tiles=2, checkpoints=checkpoints)
        assert got.entering_PHKV is not None and torch.equal(got.entering_PHKV, torch.cat(started))


@pytest.mark.parametrize("split", [False, True])
def test_slabs(split: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workspaces of a few tiles at a time: the same results, and the same maps."""
    lengths, checkpoints = [100, 20, 0, 170], (40, 200)
    inputs = kda_inputs(lengths, H=1, K=16, V=16)
    want = forward(inputs, lengths, split=split, part_tiles=2, checkpoints=checkpoints)
    assert off(want.o_THV, run(recurrent_kda, inputs, lengths)[0]) < 5e-6
    monkeypatch.setattr(fused, "_SLAB_TILES", 5)
    got = forward(inputs, lengths, split=split, part_tiles=2, checkpoints=checkpoints)
    for name, value in vars(want).items():
        other = getattr(got, name)
        assert (other is None) == (value is None) and (value is None or off(other, value) < 5e-6), name


def test_without_a_state_or_tokens() -> None:
    """No initial state is zeros; no tokens leave the states as they were."""
    inputs = kda_inputs([70], H=1, K=16, V=16)
    tokens, gate, state = float32(inputs)
    tiles = table([70])
    nothing, zeros = (fused_forward(tokens, gate, s, tiles, split=False) for s in (None, torch.zeros_like(state)))
    assert torch.equal(nothing.o_THV, zeros.o_THV) and torch.equal(nothing.final_NHKV, zeros.final_NHKV)
    none = tuple(x[:0] for x in tokens)
    empty = fused_forward(none, gate, state, table([0]), split=False)
    assert empty.o_THV.shape == (0, 1, 16) and torch.equal(empty.final_NHKV, state)


@pytest.mark.parametrize(
    ("tiles", "heads", "parts"),
    [
        ([256], 96, None),  # heads alone fill the device
        ([256], 12, 11),  # as many parts as multiprocessors for twelve heads
        ([4096], 12, 11),
        ([32], 12, None),  # too short to pay for the maps
        ([32] * 8, 12, None),  # as many sequences as would be parts
        ([1] * 200 + [4096], 12, 20),  # one long sequence among many short ones
        ([], 12, None),
        ([0, 0], 12, None),
    ],
)
def test_when_to_split(tiles: list[int], heads: int, parts: int | None) -> None:
    """On 132 multiprocessors; none at all, as on a CPU, never splits."""
    most = split_tiles(tiles, heads, 132)
    assert (most is None) == (parts is None) and (most is None or -(-max(tiles) // most) == parts)
    assert split_tiles(tiles, heads, 0) is None
