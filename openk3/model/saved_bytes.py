"""What a training step's forward pass holds for its backward pass, by group of tensors and policy, from sizes alone.

Two forms: `kernels` (a GPU) and the definition (plain PyTorch), which saves more: probabilities of attention, chunks of
KDA, rows copied to experts. Bytes are those of one text token among sequences of one length, the MTP layer included.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from openk3.config.activations import FP8, HOLDS, KEEP, RECOMPUTE, ActivationPolicy
from openk3.config.model import ModelConfig, TextConfig
from openk3.model.accounting import Account, account, depth_sources
from openk3.model.roofline import Machine
from openk3.ops.mla.reference import kept_scores

# Of a device's memory; the rest is for what operations use while they run, and for what lies between allocations.
USABLE = 0.85
FP8_BYTES = 1 + 1 / 32  # of a value: E4M3, and a scale for 32 of them
CORE = "kda_core"  # of the definition: what waits inside the chunkwise form
REST = "rest"  # routes, statistics of norms, and what only the definition keeps


@dataclass(frozen=True)
class Form:
    """How a step runs: by kernels or by definition, bytes of a value, length of its sequences, whether it is traced."""

    kernels: bool = True
    value: int = 2
    length: int = 8192
    routing_traced: bool = True  # as in training: Quantile Balancing reads the scores

    @property
    def wide(self) -> int:
        """Bytes of a value of at least float32."""
        return max(4, self.value)


@dataclass(frozen=True)
class Held:
    """Values of a token in one group of one part of the model, and what making them again costs."""

    group: str
    bytes: float
    part: str = ""  # "mixer", "ffn" or neither
    flops: float = 0.0
    moved: float = 0.0  # bytes, where no product is made
    value: int = 2
    only_for: str = ""  # held only where this group is made again from it
    inside: str = ""  # made again where this group is

    def under(self, policy: Mapping[str, str]) -> tuple[float, float, float]:
        """(bytes held, FLOPs, bytes moved) of a token."""
        if any(name and policy[name] == RECOMPUTE for name in (self.part, self.inside)):
            return 0.0, 0.0, 0.0
        if self.only_for and policy[self.only_for] != RECOMPUTE:
            return 0.0, 0.0, 0.0
        how = policy.get(self.group, KEEP)
        if how == RECOMPUTE:
            return 0.0, self.flops, self.moved
        if how == FP8:  # read, written as bytes; read as bytes, written
            return self.bytes / self.value * FP8_BYTES, 0.0, 2 * self.bytes * (1 + FP8_BYTES / self.value)
        return self.bytes, 0.0, 0.0


@dataclass(frozen=True)
class Saved:
    """The books of one policy, of one token unless it is said otherwise."""

    groups: dict[str, float]  # bytes by group
    flops: float  # added by what is made again
    moved: float  # bytes that making again and rounding move beside products
    again: float  # most bytes that making one whole part of a layer again holds at once
    fixed: float  # bytes of the micro-batch: gradients of head and norm, which the forward pass makes

    @property
    def total(self) -> float:
        """Bytes of a token."""
        return sum(self.groups.values())

    def peak(self, tokens: int) -> float:
        """Bytes of a micro-batch as its backward pass begins, without weights and optimizer."""
        return tokens * (self.total + self.again) + self.fixed

    def seconds(self, machine: Machine) -> float:
        """Least time of a token that is added."""
        return self.flops / machine.matmul_flops + self.moved / machine.bytes_per_second


def saved(config: ModelConfig, policy: ActivationPolicy, form: Form = Form()) -> Saved:
    """The books of `config` under `policy`."""
    how = policy.groups()
    groups: dict[str, float] = dict.fromkeys((*HOLDS, CORE, REST), 0.0)
    flops = moved = 0.0
    parts = {"mixer": 0.0, "ffn": 0.0}
    for held, times in _layers(config, form):
        kept, more, bytes_moved = held.under(how)
        groups[held.group] += times * kept
        flops, moved = flops + times * more, moved + times * bytes_moved
    for part in parts:
        if how[part] == RECOMPUTE:
            flops += _forward_flops(account(config), part, form.length)
            parts[part] = _largest(config, form, part)
    mtp = bool(config.text.num_nextn_predict_layers)
    fixed = (1 + mtp) * form.wide * config.text.vocab_size * config.text.hidden_size
    found = {name: count for name, count in groups.items() if count}
    return Saved(found, flops, moved, max(parts.values()), float(fixed))


def state_bytes(books: Account, value: int = 2) -> float:
    """Bytes of weights, float32 masters if weights are narrower, momenta and sums of gradients."""
    tables = sum(part.total for part in books.components if part.name in ("embedding", "LM head", "router"))
    return books.in_memory * (value + (4 if value < 4 else 0) + 4 + 4) + 4 * tables


def choose(config: ModelConfig, tokens: int, memory: float, machine: Machine, form: Form = Form()) -> ActivationPolicy:
    """The exact policy that costs the least time of those tried for `tokens` to fit a device of `memory` bytes.

    Groups are made again one after the other, the most bytes for a second first; "full" if all of them do not suffice,
    whether that fits or not.
    """
    room, policy = USABLE * memory - state_bytes(account(config), form.value), ActivationPolicy()
    tried = [name for name, choices in HOLDS.items() if RECOMPUTE in choices and name not in ("mixer", "ffn", "vision")]
    while (books := saved(config, policy, form)).peak(tokens) > room and tried:
        found: list[tuple[float, str]] = []
        for name in tried:
            other = saved(config, ActivationPolicy(**policy.groups() | {name: RECOMPUTE}), form)
            less, more = books.total - other.total, other.seconds(machine) - books.seconds(machine)
            found.append((less / more if more > 0 else 0.0, name))
        best = max(found)[1]
        tried.remove(best)
        policy = ActivationPolicy(**policy.groups() | {best: RECOMPUTE})
    return policy if saved(config, policy, form).peak(tokens) <= room else ActivationPolicy.parse("full")


def _layers(config: ModelConfig, form: Form) -> Iterator[tuple[Held, float]]:
    """Everything that is held, and how many times."""
    text = config.text
    mtp, layers = bool(text.num_nextn_predict_layers), text.num_hidden_layers
    kda = len(text.linear_attn_config.kda_layers)
    dense = sum(not text.is_moe_layer(i) for i in range(layers))
    yield from ((held, 1.0) for held in _depth(text, form))
    yield from ((held, float(kda)) for held in _kda(text, form))
    yield from ((held, float(layers - kda + mtp)) for held in _mla(text, form))
    yield from ((held, float(layers - dense + mtp)) for held in _moe(text, form))
    yield from ((held, float(dense)) for held in _ffn(text, text.intermediate_size, form))
    width = text.hidden_size
    ends = (1 + mtp) * (form.wide * width + form.wide) + 8  # gradients of hidden states, the last norm, ids
    yield Held(REST, ends + mtp * (4 * width * form.value + 2 * form.wide + 16)), 1.0


def _depth(text: TextConfig, form: Form) -> Iterator[Held]:
    n, width, mtp = form.value, text.hidden_size, bool(text.num_nextn_predict_layers)
    sub_layers, counts = 2 * text.num_hidden_layers, depth_sources(text)
    yield _held("depth_sources", (1 + sub_layers + 3 * mtp) * width, n)
    mixtures = 1 if form.kernels else len(counts)
    read = sum(counts) + len(counts) * (1 if form.kernels else 3) + 2 * mtp
    yield _held("layer_inputs", (sub_layers + mixtures + 2 * mtp) * width, n, moved=n * width * read)
    statistics = sum(counts) * (3 * 4 if form.kernels else 2 * form.wide)
    inverses = (2 if form.kernels else len(counts) + 1) + 2 * mtp
    yield Held(REST, statistics + inverses * form.wide)


def _kda(text: TextConfig, form: Form) -> Iterator[Held]:
    linear, width, n = text.linear_attn_config, text.hidden_size, form.value
    heads, narrow = linear.num_heads, linear.head_dim
    inner = heads * narrow
    yield _held("kda_projections", 3 * inner, n, "mixer", flops=2.0 * width * 3 * inner)
    copied = not form.kernels and n < 4  # decay logits, before they are read
    yield _held("kda_gates", (2 - copied) * inner, n, "mixer", flops=2.0 * (width + narrow) * inner)
    if form.kernels:
        yield _held("kda_qkv", 3 * inner, n, "mixer", moved=6 * inner * n)
    else:
        yield Held(CORE, _core_values(text, form) * form.wide, "mixer")
        # Before the activation of convolutions and what their first tokens reach, opened decay gates, sizes of q and k.
        taps = linear.short_conv_kernel_size
        edges = 3 * taps * (taps - 1) / form.length
        yield Held(REST, ((4 + copied + edges) * inner + 2 * heads) * form.wide, "mixer")
    yield _held("kda_outputs", inner, n, "mixer")
    yield _held("gated_outputs", inner, n, "mixer", moved=3 * inner * n)
    yield Held(REST, (narrow + (heads if form.kernels else 0)) * n + heads * form.wide, "mixer")


def _core_values(text: TextConfig, form: Form) -> float:
    """Values of a token that the chunkwise definition keeps: normed q and k, gates, and its chunks' products."""
    linear = text.linear_attn_config
    K = V = linear.head_dim
    chunk = 16 if form.length <= 16 else 64 if linear.num_heads <= 8 and K >= 64 else 32
    tiles = chunk // 16
    factors = chunk + 1 + tiles * (2 + max(0, tiles - 1).bit_length())
    chunks = math.ceil(form.length / chunk) * chunk / form.length
    products = 7 * K + V + 1 + 3 * chunk + K * (V + factors) / chunk
    return linear.num_heads * (2 * K + 1 + chunks * products + K * V / form.length)


def _mla(text: TextConfig, form: Form) -> Iterator[Held]:
    n, width, heads = form.value, text.hidden_size, text.num_attention_heads
    latents = text.q_lora_rank + text.latent_dim
    queries, values = heads * text.qk_head_dim, heads * text.v_head_dim
    expanded = heads * text.qk_nope_head_dim + values
    flops = 2.0 * (text.q_lora_rank * queries + text.kv_lora_rank * expanded)
    yield _held("mla_latents", latents, n, "mixer", flops=2.0 * width * latents)
    yield _held("mla_normed", latents, n, "mixer", moved=2 * latents * n)
    copies = 0 if form.kernels else queries
    yield _held("mla_qkv", queries + expanded + copies, n, "mixer", flops=flops, moved=2 * copies * n)
    yield _held("mla_outputs", values, form.wide, "mixer")
    if text.mla_use_output_gate:
        gates = _held("mla_gates", values, n, "mixer", flops=2.0 * width * values)
        if form.kernels:
            yield gates
        else:  # the product keeps opened gates
            yield dataclasses.replace(gates, only_for="gated_outputs")
            yield Held(REST, values * n, "mixer")
        yield _held("gated_outputs", values, n, "mixer", moved=values * (2 * n + form.wide))
    scores = heads if form.kernels else kept_scores(form.length, heads)
    yield Held(REST, 2 * form.wide + scores * form.wide, "mixer")


def _moe(text: TextConfig, form: Form) -> Iterator[Held]:
    n, k, latent = form.value, text.num_experts_per_token, text.routed_expert_hidden_size
    inner = text.moe_intermediate_size
    flops = 2.0 * 3 * k * latent * inner
    hidden = 2 * k * inner
    if form.kernels:
        yield _held("moe_latents", 3 * latent, n, "ffn")
        yield _held("moe_hidden", hidden, n, "ffn", flops=flops)
        # Choices, weights and chosen scores, thresholds; rows, slots, tiles; sizes of mixtures.
        scores = 4 * text.num_experts * form.routing_traced
        yield Held(REST, 8 * k + 8 * k + 4 + scores + text.num_experts / 8 + 8 * k + 4, "ffn")
    else:
        yield _held("moe_latents", (2 * k + 2) * latent, n, "ffn")
        yield _held("moe_hidden", hidden, n, "ffn", flops=flops)
        act = _held("situ", k * inner, n, "ffn", moved=3 * k * inner * n)
        yield dataclasses.replace(act, inside="moe_hidden")
        router = (form.wide * text.hidden_size if form.value < 4 else 0) + form.wide * text.num_experts
        yield Held(REST, router + 16 * k + form.wide * (2 + 2 * k), "ffn")
    if text.num_shared_experts:
        yield from _ffn(text, text.shared_intermediate_size, form)


def _ffn(text: TextConfig, inner: int, form: Form) -> Iterator[Held]:
    n = form.value
    yield _held("ffn_hidden", 2 * inner, n, "ffn", flops=2.0 * text.hidden_size * 2 * inner)
    yield _held("situ", inner, n, "ffn", moved=3 * inner * n)


def _held(group: str, values: float, size: int, part: str = "", *, flops: float = 0.0, moved: float = 0.0) -> Held:
    return Held(group, values * size, part, flops, moved, size)


def _largest(config: ModelConfig, form: Form, part: str) -> float:
    """Most bytes of a token that one mixer or feed-forward part holds."""
    text = config.text
    kinds = (_kda(text, form), _mla(text, form)) if part == "mixer" else (_moe(text, form),)
    dense = _ffn(text, text.intermediate_size, form) if part == "ffn" else iter(())
    return max(sum(held.bytes for held in kind) for kind in (*kinds, dense))


def _forward_flops(books: Account, part: str, length: int) -> float:
    """Of all mixers or all feed-forward parts, the MTP layer's included."""
    forward = books.forward_flops((length + 1) / 2)
    mixers = ("KDA attention", "MLA attention")
    ffns = ("routed experts", "shared experts", "latent projections", "router", "dense FFN")
    names = mixers if part == "mixer" else ffns
    flops = 2.0 * sum(each.activated for each in books.components if each.name in names)
    text = books.config.text
    if part == "mixer":
        flops += forward.kda_state + forward.mla_scores
    if books.mtp:
        layers = max(1, len(text.linear_attn_config.full_attn_layers))
        mla = next(each.activated for each in books.components if each.name == "MLA attention")
        mixer = (2.0 * mla + forward.mla_scores) / layers
        width, experts = text.hidden_size, 2.0 * (books.mtp_layer.activated - 2 * text.hidden_size**2)
        flops += mixer if part == "mixer" else experts - 2.0 * mla / layers - 18.0 * width
    return flops
