"""What each operation of a training step must compute and move on a GPU, and the shortest time that leaves it.

Bytes are the least with every tensor in bfloat16 and each operation one kernel: inputs read once, outputs written once,
and again for the backward pass. Weights are read for every micro-batch, and their gradients are added to float32 sums.
A step cannot be faster than the sum over operations of the slower of both; nothing is recomputed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from openk3.config.model import ModelConfig, TextConfig
from openk3.model.accounting import account, depth_sources

NARROW, WIDE = 2, 4  # bytes of a bfloat16 and a float32 value
# A weight in a micro-batch: read by the forward and the input's gradient, its gradient written and added to a sum.
WEIGHT_BYTES = 2 * NARROW + 2 * NARROW + 2 * WIDE
# A weight in an optimizer step by Muon: gradient (also for the norm), momentum, bfloat16 matrix, master, narrow copy.
MUON_BYTES = 2 * WIDE + 2 * WIDE + 3 * NARROW + 2 * WIDE + NARROW
# By AdamW: gradient (also for the norm), two moments, master, narrow copy.
ADAMW_BYTES = 2 * WIDE + 4 * WIDE + 2 * WIDE + NARROW


@dataclass(frozen=True)
class Machine:
    """Rates that one GPU reaches in practice, and the peak that utilisation refers to."""

    name: str
    matmul_flops: float  # bfloat16 products of large matrices
    bytes_per_second: float  # a large copy, read plus written
    peak_flops: float
    memory: float  # bytes that tensors can have


H200 = Machine("H200", 700e12, 4.28e12, 989e12, 139 * 2.0**30)


@dataclass(frozen=True)
class Operation:
    """One kind of operation of the whole model, for one token of training: forward and backward."""

    name: str
    flops: float
    bytes: float

    def seconds(self, machine: Machine) -> float:
        """The slower of computing and moving."""
        return max(self.flops / machine.matmul_flops, self.bytes / machine.bytes_per_second)

    def binds(self, machine: Machine) -> str:
        """Which of the two it is."""
        return "FLOPs" if self.flops / machine.matmul_flops > self.bytes / machine.bytes_per_second else "bytes"


@dataclass(frozen=True)
class Roofline:
    """The operations of a training step, by token, for sequences of `length` in micro-batches of `micro_batch`."""

    operations: tuple[Operation, ...]
    model_flops: float  # of a token, as `Account.training_flops` counts them
    length: int
    micro_batch: int

    def seconds(self, machine: Machine = H200) -> float:
        """Least time of a token."""
        return sum(operation.seconds(machine) for operation in self.operations)

    def mfu(self, machine: Machine = H200) -> float:
        """Model FLOPs over peak FLOPs at that time."""
        return self.model_flops / (self.seconds(machine) * machine.peak_flops)


def roofline(config: ModelConfig, *, length: int = 8192, micro_batch: int = 32768, batch: int = 1 << 19) -> Roofline:
    """The roofline of training `config` on text: sequences of `length`, optimizer steps of `batch` tokens."""
    text, books = config.text, account(config)
    mtp = bool(books.mtp)
    layers, kda = text.num_hidden_layers, len(text.linear_attn_config.kda_layers)
    dense = sum(not text.is_moe_layer(i) for i in range(layers))
    found: dict[str, Operation] = {}
    parts = (
        *((part, 1.0) for part in _depth(text)),
        *((part, float(kda)) for part in _kda(text, micro_batch)),
        *((part, float(layers - kda + mtp)) for part in _mla(text, (length + 1) / 2, micro_batch)),
        *((part, float(layers - dense + mtp)) for part in _moe(text, micro_batch)),
        *((part, float(dense)) for part in _ffn("dense FFN", text, text.intermediate_size, micro_batch)),
        *((part, 1.0 + mtp) for part in _head(text, micro_batch)),
        *((part, float(mtp)) for part in _mtp(text, micro_batch)),
        (_optimizer(config, batch), 1.0),
    )
    for part, times in parts:
        old = found.get(part.name, Operation(part.name, 0.0, 0.0))
        found[part.name] = Operation(part.name, old.flops + times * part.flops, old.bytes + times * part.bytes)
    operations = tuple(operation for operation in found.values() if operation.bytes)
    return Roofline(operations, books.training_flops(length).total, length, micro_batch)


def _linear(name: str, inner: int, outer: int, micro_batch: int, rows: float = 1.0) -> Operation:
    """A projection of `rows` rows a token: three products, each reading two of input, output and weight."""
    weights = inner * outer
    moved = 3 * NARROW * rows * (inner + outer) + WEIGHT_BYTES * weights / micro_batch
    return Operation(name, 6.0 * rows * weights, moved)


def _values(name: str, values: float, flops: float = 0.0) -> Operation:
    """An operation that moves bfloat16 values and computes next to nothing."""
    return Operation(name, flops, NARROW * values)


def _depth(text: TextConfig) -> Iterator[Operation]:
    """Depth reads with the norm behind them, the running sums, and the last norm."""
    width = text.hidden_size
    counts = depth_sources(text)
    reads = sum(3 * sources + sources + 3 for sources in counts)  # sources, their gradients twice, output, its gradient
    writes = 2 * text.num_hidden_layers * 3
    yield _values("depth reads and norms", width * (reads + writes), 18.0 * width * sum(counts))


def _kda(text: TextConfig, micro_batch: int) -> Iterator[Operation]:
    linear, width = text.linear_attn_config, text.hidden_size
    inner = linear.num_heads * linear.head_dim
    shapes = [(width, inner)] * 4 + [(width, linear.head_dim), (linear.head_dim, inner), (width, linear.num_heads)]
    for shape in (*shapes, (inner, width)):
        yield _linear("KDA projections", *shape, micro_batch)
    yield _values("short convolutions", 3 * 5 * inner, 6.0 * 3 * inner * linear.short_conv_kernel_size)
    state = 3.0 * 7 * linear.num_heads * linear.head_dim**2
    yield _values("KDA", 14 * inner, state)
    yield _values("KDA output norm and gate", 8 * inner)


def _mla(text: TextConfig, context: float, micro_batch: int) -> Iterator[Operation]:
    width, heads, rank = text.hidden_size, text.num_attention_heads, text.kv_lora_rank
    key, value = text.qk_head_dim, text.v_head_dim
    shapes = [(width, text.q_lora_rank), (text.q_lora_rank, heads * key), (width, text.latent_dim)]
    shapes += [(rank, heads * (text.qk_nope_head_dim + value)), (heads * value, width)]
    shapes += [(width, heads * value)] * text.mla_use_output_gate
    for shape in shapes:
        yield _linear("MLA projections", *shape, micro_batch)
    flops = 3.0 * 2 * heads * (key + value) * context
    yield _values("MLA attention", heads * (6 * key + 6 * value), flops)
    yield _values("MLA norms and gates", 5 * (text.q_lora_rank + rank) + 8 * heads * value * text.mla_use_output_gate)


def _moe(text: TextConfig, micro_batch: int) -> Iterator[Operation]:
    width, latent, inner = text.hidden_size, text.routed_expert_hidden_size, text.moe_intermediate_size
    chosen, experts = text.num_experts_per_token, text.num_experts
    yield _linear("router", width, experts, micro_batch)
    yield Operation("router", 0.0, 3.0 * WIDE * experts)
    yield _linear("latent projections", width, latent, micro_batch)
    yield _linear("latent projections", latent, width, micro_batch)
    yield _values("latent projections", 5 * latent)
    yield _values("dispatch and combine", 4 * (1 + chosen) * latent)
    weights = 3 * latent * inner
    moved = 3 * 3 * NARROW * chosen * (latent + inner) + WEIGHT_BYTES * experts * weights / micro_batch
    yield Operation("experts", 6.0 * chosen * weights, moved)
    yield _values("expert activations", 8 * chosen * inner)
    if text.num_shared_experts:
        yield from _ffn("shared experts", text, text.shared_intermediate_size, micro_batch)


def _ffn(name: str, text: TextConfig, inner: int, micro_batch: int) -> Iterator[Operation]:
    for shape in [(text.hidden_size, inner)] * 2 + [(inner, text.hidden_size)]:
        yield _linear(name, *shape, micro_batch)
    yield _values(name, 8 * inner)


def _head(text: TextConfig, micro_batch: int) -> Iterator[Operation]:
    """Logits written, read for the loss and replaced by their gradient, which two products read."""
    weights = text.hidden_size * text.vocab_size
    moved = NARROW * (5.0 * text.vocab_size + 6.0 * text.hidden_size) + WEIGHT_BYTES * weights / micro_batch
    yield Operation("head and loss", 6.0 * weights, moved)
    yield _values("embedding", 4 * text.hidden_size)


def _mtp(text: TextConfig, micro_batch: int) -> Iterator[Operation]:
    yield _linear("MTP projection", 2 * text.hidden_size, text.hidden_size, micro_batch)
    yield _values("MTP projection", 5 * 6 * text.hidden_size)


def _optimizer(config: ModelConfig, batch: int) -> Operation:
    """One step's share of a token: every parameter once. Newton-Schulz's products take about as long as these bytes."""
    books = account(config)
    tables = sum(part.total for part in books.components if part.name in ("embedding", "LM head", "router"))
    total = books.in_memory
    return Operation("optimizer", 0.0, (MUON_BYTES * (total - tables) + ADAMW_BYTES * tables) / batch)
