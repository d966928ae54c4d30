"""Triton kernels of the KDA scan: the state walks through the tiles of a sequence, and segments of one are joined.

The state is held transposed, S^T [V, K], as the float32 accumulator of tensor-core products: then every left operand is
a converted accumulator, which stays in registers, and every right operand is a tile of the workspace. Per tile:
r^T = v^T + S^T nkd^T;  U^T = (r^T diag(beta)) inv^T;  o^T = S^T qd^T + U^T mqk^T;  S^T <- S^T diag(decay) + U^T kr.
"""

from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from openk3.ops.kda import gluon_launch
from openk3.ops.kda.gluon_launch import fits
from openk3.ops.kda.tiles import Span, Tiles
from openk3.ops.kda.workspace import Workspace


@dataclass(frozen=True)
class ScanOutputs:
    """Where a scan writes; None is not wanted. All are written for every tile, token and run of the span."""

    o: Tensor | None = None  # [T, H, V] of all tokens
    r: Tensor | None = None  # [tokens of the span, H, V]: what each token writes, U
    states: Tensor | None = None  # [X, H, V, K]: the transposed state entering each tile
    final: Tensor | None = None  # [P, H, K, V] float32
    saved: Tensor | None = None  # [rows, H, K, V] float32: states behind tiles that Span.mark_X names
    r_rest: Tensor | None = None  # as r: what rounding left of it
    states_rest: Tensor | None = None  # as states, from a workspace with kr_rest


def scan(workspace: Workspace, v_THV: Tensor, span: Span, initial_PHKV: Tensor | None, outputs: ScanOutputs) -> None:
    """Scan each run of the span from its own initial state (float32; None: zero)."""
    if fits(workspace, v_THV, initial_PHKV, *vars(outputs).values()):
        _gluon().scan(workspace, v_THV, span, initial_PHKV, outputs)
        return
    _, H, V = v_THV.shape
    runs, K = span.num_runs, workspace.qd.shape[3]
    states, few = outputs.states is not None, outputs.states_rest is not None
    options = scan_settings(V, compute_capability(v_THV.device), states=states, few=few)
    form = (options.pop("AHEAD"), span.even, False)
    if runs * H == 0:
        return
    w, out = workspace, outputs
    scan_kernel[(runs * H * (V // options["BV"]),)](
        *(w.nkd, w.qd, w.kr, *((None,) * 3 if out.states is None else (w.kr_rest, w.nkd_rest, w.inv_rest))),
        *(w.inv, w.mqk, w.decay, w.beta, v_THV, initial_PHKV),
        *(out.o, out.r, out.r_rest, out.states, out.states_rest, out.final, out.saved),
        *(span.start_X, span.length_X, span.mark_X, span.first_P, span.token_P, span.tile_low, span.token_low, H),
        K=K,
        V=V,
        C=span.chunk,
        FORM=form,
        **options,
    )


def scan_maps(workspace: Workspace, v_THV: Tensor, span: Span) -> Tensor:
    """Each run as an affine map of the state: [P, H, V + K, K] float32, more exactly where the workspace has `kr_rest`.

    Rows 0..V-1 are the transposed state that leaves the run when zero enters, the others the transposed transition.
    """
    if fits(workspace, v_THV):
        return _gluon().scan_maps(workspace, v_THV, span)
    _, H, V = v_THV.shape
    runs, K = span.num_runs, workspace.qd.shape[3]
    maps = torch.empty(runs, H, V + K, K, dtype=torch.float32, device=v_THV.device)
    options = scan_settings(
        V,
        compute_capability(v_THV.device),
        states=workspace.kr_rest is not None,
        few=workspace.nkd_rest is not None,
    )
    options["BV"] = min(options["BV"], K)
    form = (options.pop("AHEAD"), span.even, True)
    if runs * H == 0:
        return maps
    w = workspace
    scan_kernel[(runs * H * ((V + K) // options["BV"]),)](
        *(w.nkd, w.qd, w.kr, w.kr_rest, w.nkd_rest, w.inv_rest, w.inv, w.mqk, w.decay, w.beta, v_THV, None),
        *(None, None, None, None, None, maps, None),
        *(span.start_X, span.length_X, span.mark_X, span.first_P, span.token_P, span.tile_low, span.token_low, H),
        K=K,
        V=V,
        C=span.chunk,
        FORM=form,
        **options,
    )
    return maps


def fold(
    maps: Tensor, entering_PHKV: Tensor, initial_NHKV: Tensor | None, *, tiles: Tiles, parts: tuple[int, int]
) -> None:
    """Fill in the states entering parts [low, high) of entering [P, H, K, V] float32, from the maps of these parts.

    The state entering a sequence is its initial one (None: zero); that of a part which goes on from an earlier part
    than low must be there.
    """
    _, H, K, V = entering_PHKV.shape
    first, end = tiles.sequences_of(*parts)
    if (end - first) * H == 0:
        return
    initial = initial_NHKV if initial_NHKV is None or first == 0 else initial_NHKV[first:]
    bounds = tiles.parts_N[first:] if first else tiles.parts_N
    programs, arguments = (end - first) * H * (V // 16), (maps, entering_PHKV, initial, bounds, *parts, H)
    constants, options = {"K": K, "V": V, "BV": 16}, {"num_warps": 8, "num_stages": 2}
    if maps.device.type == "cuda":
        gluon_launch.launch(fold_kernel, programs, arguments, constants, options)
    else:
        fold_kernel[(programs,)](*arguments, **constants, **options)


def scan_settings(V: int, arch: int, *, states: bool = False, few: bool = False) -> dict[str, int]:
    """Block of value channels, whether decay is loaded a tile ahead, and launch options, for an arch such as 90.

    With `states`, which are stored and add up in two parts, larger blocks run out of registers; and still sooner where
    heads are `few`, with more in two parts.
    """
    if arch == 90:
        block = min(V, (32 if few else 64) if states else 128)
        if states:
            return {"BV": block, "AHEAD": 1, "num_warps": 8 if block == 64 else 4, "num_stages": 3}
        return {"BV": block, "AHEAD": 1, "num_warps": 8 if block == 128 else 4, "num_stages": 3}
    return {"BV": min(V, 32), "AHEAD": 0, "num_warps": 8 if few and V > 16 else 4, "num_stages": 2}


@lru_cache
def _gluon() -> ModuleType:
    """The twins for Hopper; importing them anew for every call takes time."""
    from openk3.ops.kda import scan_gluon

    return scan_gluon


@lru_cache
def compute_capability(device: torch.device) -> int:
    """Such as 90 for sm_90; of a CPU, whose kernels are interpreted, as well."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@triton.jit(
    do_not_specialize=["H", "tile_low", "token_low"],
    do_not_specialize_on_alignment=["start_ptr", "length_ptr", "mark_ptr", "first_ptr", "token_ptr"],
)
def scan_kernel(
    nkd_ptr,
    qd_ptr,
    kr_ptr,
    kr_rest_ptr,
    nkd_rest_ptr,
    inv_rest_ptr,
    inv_ptr,
    mqk_ptr,
    decay_ptr,
    beta_ptr,
    v_ptr,
    initial_ptr,
    o_ptr,
    r_ptr,
    r_rest_ptr,
    states_ptr,
    states_rest_ptr,
    final_ptr,
    saved_ptr,
    start_ptr,
    length_ptr,
    mark_ptr,
    first_ptr,
    token_ptr,
    tile_low,
    token_low,
    H,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BV: tl.constexpr,
    FORM: tl.constexpr,
):
    """BV value channels of one head of one run. FORM: (AHEAD, EVEN, MAPS).

    AHEAD: decay is loaded a tile ahead. EVEN tiles follow from the run's first token: loads that wait for a load of the
    tile's place cannot run far ahead. MAPS: also blocks of the identity as a state, without v.
    """
    AHEAD: tl.constexpr = FORM[0]
    EVEN: tl.constexpr = FORM[1]
    MAPS: tl.constexpr = FORM[2]
    io = nkd_ptr.dtype.element_ty
    precision: tl.constexpr = "ieee" if nkd_ptr.dtype.element_ty == tl.float32 else "tf32"
    blocks: tl.constexpr = (V + K) // BV if MAPS else V // BV
    heads = tl.cast(H, tl.int64)
    program = tl.program_id(0).to(tl.int64)
    block = program % blocks
    head = (program // blocks) % H
    run = program // blocks // H
    low = tl.load(first_ptr + run) - tile_low
    high = tl.load(first_ptr + run + 1) - tile_low
    first = tl.load(token_ptr + run)
    end = tl.load(token_ptr + run + 1)
    value = block * BV + tl.arange(0, BV)
    channel = tl.arange(0, K)
    c = tl.arange(0, C)
    inner = (run * H + head) * (K * V) + channel[None, :] * V + value[:, None]  # of a state [K, V], transposed
    state = tl.zeros((BV, K), tl.float32)
    if MAPS:
        state += tl.where(value[:, None] - V == channel[None, :], 1.0, 0.0)
    elif initial_ptr is not None:
        state = tl.load(initial_ptr + inner).to(tl.float32)
    eye = tl.where(c[:, None] == c[None, :], 1.0, 0.0).to(io)
    if AHEAD:
        decay = tl.load(decay_ptr + (low * heads + head) * K + channel, mask=(channel < K) & (low < high), other=0.0)
    for tile in range(low, high):
        at = tile * heads + head
        if EVEN:
            start = first + (tile - low) * C
            length = end - start
        else:
            start = tl.load(start_ptr + tile)
            length = tl.load(length_ptr + tile)
        wide = at * (C * K) + c[:, None] * K + channel[None, :]
        square = at * (C * C) + c[:, None] * C + c[None, :]
        live = (c < length)[:, None]
        if MAPS:
            live = live & (value < V)[None, :]
        tokens = ((start + c[:, None]) * heads + head) * V + value[None, :]
        v = tl.load(v_ptr + tokens, mask=live, other=0.0).to(io)
        nkd = tl.load(nkd_ptr + wide)
        kr = tl.load(kr_ptr + wide)
        inv = tl.load(inv_ptr + square)
        if AHEAD:  # not an operand of a product, so the compiler does not load it ahead; it costs registers
            more = tile + 1 < high
            next_decay = tl.load(decay_ptr + (at + heads) * K + channel, mask=(channel < K) & more, other=0.0)
        else:
            decay = tl.load(decay_ptr + at * K + channel)
        beta = tl.load(beta_ptr + at * C + c)
        left = state.to(io)
        if states_ptr is not None:
            tl.store(states_ptr + at * (V * K) + value[:, None] * K + channel[None, :], left)
        error = tl.dot(tl.trans(v), eye, input_precision=precision)
        error = tl.dot(left, tl.trans(nkd), error, input_precision=precision)
        if kr_rest_ptr is not None:
            rest = (state - left.to(tl.float32)).to(io)
            if states_rest_ptr is not None:
                tl.store(states_rest_ptr + at * (V * K) + value[:, None] * K + channel[None, :], rest)
            error = tl.dot(rest, tl.trans(nkd), error, input_precision=precision)
        if nkd_rest_ptr is not None:
            nkd_rest = tl.load(nkd_rest_ptr + wide)
            error = tl.dot(left, tl.trans(nkd_rest), error, input_precision=precision)
        strong = error * beta[None, :]
        write = tl.dot(strong.to(io), tl.trans(inv), input_precision=precision)
        if precision != "ieee":  # in two parts: the rounding of one would be felt
            rest = (strong - strong.to(io).to(tl.float32)).to(io)
            write = tl.dot(rest, tl.trans(inv), write, input_precision=precision)
        if inv_rest_ptr is not None:
            inv_rest = tl.load(inv_rest_ptr + square)
            write = tl.dot(strong.to(io), tl.trans(inv_rest), write, input_precision=precision)
        exact = write
        write = write.to(io)
        if r_ptr is not None:
            writes = ((start - token_low + c[:, None]) * heads + head) * V + value[None, :]
            tl.store(r_ptr + writes, tl.trans(write), mask=live)
            if r_rest_ptr is not None:
                tl.store(r_rest_ptr + writes, tl.trans((exact - write.to(tl.float32)).to(io)), mask=live)
        if AHEAD:  # the next tile waits for the state, nothing for the outputs
            state = tl.dot(write, kr, state * decay[None, :], input_precision=precision)
            decay = next_decay
        if o_ptr is not None:
            qd = tl.load(qd_ptr + wide)
            mqk = tl.load(mqk_ptr + square)
            out = tl.dot(left, tl.trans(qd), input_precision=precision)
            out = tl.dot(write, tl.trans(mqk), out, input_precision=precision)
            tl.store(o_ptr + tokens, tl.trans(out.to(o_ptr.dtype.element_ty)), mask=live)
        if not AHEAD:
            state = tl.dot(write, kr, state * decay[None, :], input_precision=precision)
        if kr_rest_ptr is not None:  # gradients of what reads these states want them better than outputs do
            state = tl.dot(write, tl.load(kr_rest_ptr + wide), state, input_precision=precision)
            state = tl.dot((exact - write.to(tl.float32)).to(io), kr, state, input_precision=precision)
        if saved_ptr is not None:
            mark = tl.load(mark_ptr + tile).to(tl.int64)
            if mark >= 0:
                tl.store(saved_ptr + (mark * H + head) * (K * V) + channel[None, :] * V + value[:, None], state)
    if MAPS:
        tl.store(final_ptr + ((run * H + head) * (V + K) + value[:, None]) * K + channel[None, :], state)
    elif final_ptr is not None:
        tl.store(final_ptr + inner, state)


@triton.jit(do_not_specialize=["H", "low", "high"], do_not_specialize_on_alignment=["parts_ptr"])
def fold_kernel(
    maps_ptr,
    entering_ptr,
    initial_ptr,
    parts_ptr,
    low,
    high,
    H,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
):
    """BV value channels of one head of one sequence: the states entering its parts, from that entering the first."""
    blocks: tl.constexpr = V // BV
    heads = tl.cast(H, tl.int64)
    program = tl.program_id(0).to(tl.int64)
    value = (program % blocks) * BV + tl.arange(0, BV)
    head = (program // blocks) % H
    sequence = program // blocks // H
    channel = tl.arange(0, K)
    begin = tl.load(parts_ptr + sequence)
    first = tl.maximum(begin, low)
    last = tl.minimum(tl.load(parts_ptr + sequence + 1), high) - 1
    inner = channel[None, :] * V + value[:, None]
    goes_on = (inner >= 0) & (begin < low)
    entering = entering_ptr + (first * heads + head) * (K * V) + inner
    state = tl.load(entering, mask=goes_on, other=0.0)
    if initial_ptr is not None:
        state += tl.load(initial_ptr + (sequence * heads + head) * (K * V) + inner, mask=~goes_on, other=0.0)
    tl.store(entering, state)
    for part in range(first, last):
        rows = maps_ptr + ((part - low) * heads + head) * ((V + K) * K)
        transition = tl.load(rows + (V + channel[:, None]) * K + channel[None, :])
        written = tl.load(rows + value[:, None] * K + channel[None, :])
        state = tl.dot(state, transition, written, input_precision="tf32x3")
        tl.store(entering_ptr + ((part + 1) * heads + head) * (K * V) + inner, state)


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """What the launchers compile at K = V = 128 in bfloat16, for compute capability `arch`."""
    given: dict[str, Any] = dict.fromkeys(("nkd_ptr", "qd_ptr", "kr_ptr", "inv_ptr", "mqk_ptr", "v_ptr"), "*bf16")
    given |= dict.fromkeys(("start_ptr", "length_ptr", "mark_ptr", "first_ptr", "token_ptr"), "*i32:1")
    given |= dict.fromkeys(("decay_ptr", "beta_ptr"), "*fp32") | dict.fromkeys(("tile_low", "token_low", "H"), "i32")
    given |= dict.fromkeys(("kr_rest_ptr", "nkd_rest_ptr", "inv_rest_ptr", "initial_ptr", "o_ptr", "r_ptr"))
    given |= dict.fromkeys(("r_rest_ptr", "states_ptr", "states_rest_ptr", "final_ptr", "saved_ptr"))
    given |= {"K": 128, "V": 128, "C": 32, "FORM": (True, False)}  # EVEN and MAPS; AHEAD goes before them
    state, cut = {"initial_ptr": "*fp32"}, {"FORM": (False, False)}
    outputs = {"o_ptr": "*bf16", "final_ptr": "*fp32"}
    saving = outputs | {"saved_ptr": "*fp32"}
    backward = dict.fromkeys(("r_ptr", "r_rest_ptr", "states_ptr", "kr_rest_ptr"), "*bf16")
    maps: dict[str, Any] = {"final_ptr": "*fp32", "FORM": (True, True)}
    few = dict.fromkeys(("nkd_rest_ptr", "inv_rest_ptr"), "*bf16")
    variants = [state | saving, saving, state | saving | cut, saving | cut, state | outputs, outputs]
    variants += [state | backward, backward, maps, maps | {"FORM": (False, True)}, maps | {"kr_rest_ptr": "*bf16"}]
    variants += [some | backward | few | {"states_rest_ptr": "*bf16"} for some in (state, {})]
    variants += [maps | {"kr_rest_ptr": "*bf16"} | few]
    cases = []
    for variant in variants:
        launch = scan_settings(128, arch, states="kr_rest_ptr" in variant, few="nkd_rest_ptr" in variant)
        arguments: dict[str, Any] = given | variant | {"BV": launch.pop("BV")}
        arguments["FORM"] = (launch.pop("AHEAD"), *arguments["FORM"])
        cases.append((scan_kernel, arguments, launch))
    folding = dict.fromkeys(("maps_ptr", "entering_ptr", "initial_ptr"), "*fp32") | {"parts_ptr": "*i32:1"}
    folding |= dict.fromkeys(("low", "high", "H"), "i32") | {"K": 128, "V": 128, "BV": 16}
    given_or_not = (folding, folding | {"initial_ptr": None})
    return [*cases, *((fold_kernel, some, {"num_warps": 8, "num_stages": 2}) for some in given_or_not)]
