"""Known one-line faults of other implementations, applied one at a time: the golden comparison must notice each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from golden_checks import Golden, check_decode, check_leftpad, check_logits, check_merged, check_vision, golden
from torch import Tensor, nn
from torch.nn import functional as F

from openk3 import K3, Packed
from openk3.model import depth, hf_storage, k3, kda, mla, moe, vision
from openk3.model.cache import KdaCache
from openk3.model.depth import DepthStream
from openk3.ops.routing import Routes

Patch = pytest.MonkeyPatch
Check = Callable[[], None]


def text(*names: str) -> Check:
    """Logits of the two 37-token sequences of each named model in float32; all must be wrong."""
    return lambda: [check_logits(golden(name, torch.float32)) for name in names] and None


def l2(x: Tensor) -> Tensor:
    """x / sqrt(sum x^2 + 1e-6)."""
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def recurrence(
    *args: Any, fault: str = "", state_NHKV: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """KDA token by token with one line of it changed, in place of chunk_kda."""
    q, k, v, z, beta, gate = args
    q, k = (q, k) if fault == "no L2 norm" else (l2(q), l2(k))
    q, beta = q * q.shape[-1] ** -0.5, torch.sigmoid(beta)
    slope = 1.0 if fault == "gate without exp(A_log)" else gate.A_log_H.exp()[:, None]
    z = z + gate.dt_bias_HK
    g = (
        (-slope * F.softplus(z)).clamp_min(-5.0)
        if fault == "gate as clamped softplus"
        else -5 * torch.sigmoid(slope * z)
    )
    assert cu_seqlens is not None and state_NHKV is None
    outputs, states = [], []
    for start, end in zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:]):
        state = v.new_zeros(q.shape[1], q.shape[2], v.shape[2])
        for t in range(start, end):
            read, before = torch.einsum("hkv,hk->hv", state, q[t]), state
            state = g[t].exp().unsqueeze(-1) * state
            error = v[t] - torch.einsum("hkv,hk->hv", before if fault == "error before the decay" else state, k[t])
            state = state + torch.einsum("hk,hv->hkv", k[t] * beta[t].unsqueeze(-1), error)
            outputs.append(read if fault == "read before the write" else torch.einsum("hkv,hk->hv", state, q[t]))
        states.append(state)
    return torch.stack(outputs), torch.stack(states)


def reversed_taps(patch: Patch) -> None:
    """The last tap is the current token's."""
    run = kda.short_convs
    patch.setattr(kda, "short_convs", lambda xs, weights, **state: run(xs, [w.flip(1) for w in weights], **state))


def mixing(patch: Patch, mix: Callable[..., Any]) -> None:
    """Replace the depth mixture and keep phase one from hiding it."""
    patch.setattr(DepthStream, "_begin_phase_one", lambda _: False)
    patch.setattr(depth, "mix_depth", mix)


def mix_normed(sources: list[Tensor], query: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Keys are normalised, values must stay raw."""
    _, probs_TL = MIX_DEPTH(sources, query, norm, eps)
    keys = torch.stack([v * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps) for v in sources], 1)
    return (probs_TL.unsqueeze(-1) * keys).sum(1), probs_TL


MIX_DEPTH = depth.mix_depth


def mix_scaled(sources: list[Tensor], query: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Depth scores have no 1/sqrt(width)."""
    return MIX_DEPTH(sources, query * len(query) ** -0.5, norm, eps)


def block_size(patch: Patch, change: int) -> None:
    """A block one layer longer or shorter."""
    open_stream = k3.open_stream

    def other(x_TD: Tensor, config: Any, *args: Any) -> DepthStream:
        size = config.attn_res_block_size + change
        return open_stream(x_TD, dataclasses.replace(config, attn_res_block_size=size), *args)

    patch.setattr(k3, "open_stream", other)


def bias_in_the_weights(patch: Patch) -> None:
    """The balancing bias chooses; it must not weigh."""
    route = moe.route

    def biased(scores_TE: Tensor, bias_E: Tensor, k: int, **options: Any) -> Routes:
        routes = route(scores_TE, bias_E, k, **options)
        weights_Tk = (scores_TE + bias_E).gather(1, routes.expert_ids_Tk)
        weights_Tk = weights_Tk / weights_Tk.sum(1, keepdim=True) * options["scale"]
        return routes._replace(weights_Tk=weights_Tk)

    patch.setattr(moe, "route", biased)


def swiglu(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """No caps."""
    return F.silu(gate) * up


def capped_sigmoid(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """The sigmoid must see the gate before its cap."""
    capped = beta * torch.tanh(gate / beta)
    return capped * torch.sigmoid(capped) * linear_beta * torch.tanh(up / linear_beta)


def modules(name: str, kind: type[nn.Module]) -> list[Any]:
    """The modules of one kind in a golden model."""
    return [module for module in golden(name, torch.float32).model.modules() if isinstance(module, kind)]


def latent_eps(patch: Patch) -> None:
    """Both latent norms have eps 1e-6, not rms_norm_eps."""
    for module in modules("text_b", mla.GatedMLA):
        patch.setattr(module.q_a_layernorm, "eps", 1e-5)
        patch.setattr(module.kv_a_layernorm, "eps", 1e-5)


def set_all(patch: Patch, name: str, kind: type[nn.Module], field: str, value: Any) -> None:
    """One attribute of every module of a kind."""
    for module in modules(name, kind):
        patch.setattr(module, field, value)


FROM_PRETRAINED = K3.from_pretrained


def without_gates(*args: Any, **options: Any) -> K3:
    """A loaded model whose MLA layers have lost their output gate."""
    model = FROM_PRETRAINED(*args, **options)
    for module in model.modules():
        if isinstance(module, mla.GatedMLA):
            module.g_proj = None
    return model


def shared_key_normed(patch: Patch) -> None:
    """Only the latent is normed; the shared key part is cached as projected."""
    latent = mla.GatedMLA._latent

    def normed(self: mla.GatedMLA, joint_TC: Tensor) -> Tensor:
        latent_TC, shared_TR = latent(self, joint_TC).split((self.kv_rank, self.shared), -1)
        return torch.cat((latent_TC, F.rms_norm(shared_TR, shared_TR.shape[-1:])), -1)

    patch.setattr(mla.GatedMLA, "_latent", normed)


def high_nibble_first(patch: Patch) -> None:
    """The low nibble is the even column."""
    unpack = hf_storage.dequantize_mxfp4
    patch.setattr(hf_storage, "dequantize_mxfp4", lambda packed, *rest: unpack(packed << 4 | packed >> 4, *rest))


def padding_kept(patch: Patch) -> None:
    """Padding is stripped before the convolution and the state can see it."""
    from_padded = Packed.from_padded.__func__
    patch.setattr(
        Packed, "from_padded", classmethod(lambda cls, ids, mask: from_padded(cls, ids, torch.ones_like(mask)))
    )


def window_lost(patch: Patch) -> None:
    """Decoding continues the convolution from the prompt's last tokens."""
    write = KdaCache.write
    patch.setattr(
        KdaCache, "write", lambda self, which, s: write(self, which, (s[0], tuple(torch.zeros_like(w) for w in s[1])))
    )


def shared_key_forgotten(patch: Patch) -> None:
    """The absorbed score has two terms."""
    absorbed = mla.absorbed_attention
    patch.setattr(
        mla, "absorbed_attention", lambda q, shared, *args, **kw: absorbed(q, torch.zeros_like(shared), *args, **kw)
    )


def rows_before_columns(patch: Patch) -> None:
    """The first of two rotary pairs turns with the column."""
    angles = vision.rotary_angles
    patch.setattr(
        vision, "rotary_angles", lambda grid, dim: angles(grid, dim).unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    )


def corners_aligned(patch: Patch) -> None:
    """The position table is resized with align_corners false."""
    interpolate = F.interpolate

    def aligned(x: Tensor, **options: Any) -> Tensor:
        return interpolate(x, **{**options, "align_corners": True})

    patch.setattr(vision.F, "interpolate", aligned)


def frames_apart(patch: Patch) -> None:
    """The released tower attends over all frames of an item at once."""
    patch.setattr(vision.FrameAttention, "_run", lambda self, q, k, v, run: vision._attend(q, k, v, run[0] * run[1]))


def merged_by_columns(patch: Patch) -> None:
    """The four merged patches stand row by row."""
    merge = vision.merge_patches
    patch.setattr(vision, "merge_patches", lambda x, grid: merge(x, grid)[:, [0, 2, 1, 3]])


def time_on_stills(patch: Patch) -> None:
    """A still image gets no temporal vector, not even frame 0's."""
    position = vision.position_embedding

    def timed(table: Tensor, rows: int, columns: int) -> Tensor:
        where = position(table, rows, columns)
        return where + vision.time_embedding(1, where.shape[1], where)

    patch.setattr(vision, "position_embedding", timed)


def labels_on_images(patch: Patch) -> None:
    """Image positions carry no label."""
    shifted = Packed.shifted_labels
    patch.setattr(Packed, "shifted_labels", lambda self: shifted(dataclasses.replace(self, labels_T=None)))


def kda_fault(name: str) -> Callable[[Patch], None]:
    """The recurrence with one fault in place of the chunkwise form."""
    return lambda patch: patch.setattr(kda, "chunk_kda", partial(recurrence, fault=name))


A, B, BOTH = text("text_a"), text("text_b"), text("text_a", "text_b")
FRESH = partial(lambda: check_logits(Golden("text_a", torch.float32)))
PACKED = partial(lambda: check_logits(Golden("mxfp4_a", torch.float32)))
LEFTPAD = partial(lambda: check_leftpad(golden("text_a", torch.float32)))
DECODE = partial(lambda: check_decode(golden("text_a", torch.float32)))
IMAGE = partial(lambda: check_vision(golden("mm_a", torch.float32), "vision_image"))
VIDEO = partial(lambda: check_vision(golden("mm_a", torch.float32), "vision_video"))
MERGED = partial(lambda: check_merged(golden("mm_a", torch.float32), "mm_image"))

FAULTS: dict[str, tuple[Callable[[Patch], None], Check]] = {
    **{
        name: (kda_fault(name), A)
        for name in (
            "error before the decay",
            "read before the write",
            "no L2 norm",
            "gate without exp(A_log)",
            "gate as clamped softplus",
        )
    },
    "reversed convolution taps": (reversed_taps, A),
    "depth values normed": (lambda patch: mixing(patch, mix_normed), A),
    "depth scores scaled": (lambda patch: mixing(patch, mix_scaled), A),
    "block one layer longer": (lambda patch: block_size(patch, 1), A),
    "block one layer shorter": (lambda patch: block_size(patch, -1), A),
    "bias in the weights": (bias_in_the_weights, B),
    "SwiGLU": (lambda patch: patch.setattr(moe, "situ_glu", swiglu), A),
    "sigmoid of the capped gate": (lambda patch: patch.setattr(moe, "situ_glu", capped_sigmoid), A),
    "scaling factor ignored": (lambda patch: set_all(patch, "text_b", moe.Router, "scale", 1.0), B),
    "latent eps 1e-5": (latent_eps, B),
    "attention scaled by the content width": (lambda p: set_all(p, "text_a", mla.GatedMLA, "scale", 0.25), A),
    "attention without output gate": (lambda patch: patch.setattr(K3, "from_pretrained", without_gates), FRESH),
    "shared key normed": (shared_key_normed, A),
    "high nibble first": (high_nibble_first, PACKED),
    "padding enters the convolution": (padding_kept, LEFTPAD),
    "window lost between prompt and decoding": (window_lost, DECODE),
    "shared key forgotten when decoding": (shared_key_forgotten, DECODE),
    "rotary rows before columns": (rows_before_columns, IMAGE),
    "position table with aligned corners": (corners_aligned, IMAGE),
    "time vector on still images": (time_on_stills, IMAGE),
    "frames attended apart": (frames_apart, VIDEO),
    "merged by columns": (merged_by_columns, IMAGE),
    "labels on image positions": (labels_on_images, MERGED),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_golden_comparison_notices(fault: str, monkeypatch: Patch) -> None:
    """With the fault applied, the same check that the golden tests run fails on values."""
    apply, check = FAULTS[fault]
    apply(monkeypatch)
    with pytest.raises(AssertionError, match="not close"):
        check()


@pytest.mark.parametrize("check", {id(check): check for _, check in FAULTS.values()}.values())
def test_checks_pass_without_a_fault(check: Check) -> None:
    """Each comparison holds when nothing is changed, so a failure above is the fault's."""
    check()


def test_recurrence_without_a_fault_passes(monkeypatch: Patch) -> None:
    """The replaced recurrence itself is right."""
    monkeypatch.setattr(kda, "chunk_kda", recurrence)
    BOTH()
