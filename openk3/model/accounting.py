"""Count parameters, FLOPs, cache and memory of a K3 from its configuration alone, without building anything.

`total` counts what a checkpoint stores (A_log padded to a multiple of 128, router bias included) without the MTP
layer; `activated` counts what one token uses: its chosen experts and the LM head, but not the embedding table, the
vision tower or the router bias. For the released sizes both give the report's figures (report Table 1).
"""

from __future__ import annotations

from dataclasses import dataclass

from openk3.config.model import ConfigError, ModelConfig, TextConfig, VisionConfig

A_LOG_MULTIPLE = 128
MXFP4_GROUP = 32
BYTES = {"float32": 4, "bf16": 2, "fp8": 1}


@dataclass(frozen=True)
class Component:
    """Parameters of one part: stored, used by one token, and stored in float32 whatever the model's dtype."""

    name: str
    total: int
    activated: int
    float32: int = 0


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of one token, by cause."""

    weights: float  # two per activated parameter
    kda_state: float  # decay, error, write and read of the recurrent state
    mla_scores: float  # query-key scores and the weighted sum of values
    depth: float  # attention over depth sources
    mtp: float = 0.0  # the MTP layer and its second use of the head (training only)

    @property
    def total(self) -> float:
        """All of them together."""
        return self.weights + self.kda_state + self.mla_scores + self.depth + self.mtp

    def __mul__(self, factor: float) -> Flops:
        return Flops(
            *(factor * value for value in (self.weights, self.kda_state, self.mla_scores, self.depth, self.mtp))
        )


@dataclass(frozen=True)
class Account:
    """The books of one configuration; every figure is exact arithmetic on `config`."""

    config: ModelConfig
    components: tuple[Component, ...]
    mtp_layer: Component  # what one MTP layer holds, whether or not the configuration has it

    @property
    def total(self) -> int:
        """Parameters as stored, without the MTP layer."""
        return sum(part.total for part in self.components)

    @property
    def activated(self) -> int:
        """Parameters one token uses: chosen experts and LM head, no embedding, vision or router bias."""
        return sum(part.activated for part in self.components)

    @property
    def mtp(self) -> int:
        """Parameters of the MTP layer in this configuration (0 when it has none)."""
        return self.mtp_layer.total if self.config.text.num_nextn_predict_layers else 0

    @property
    def padding(self) -> int:
        """Zeros that the stored A_log tensors end in; a model in memory does not hold them."""
        linear = self.config.text.linear_attn_config
        return len(linear.kda_layers) * (padded_heads(linear.num_heads) - linear.num_heads)

    @property
    def in_memory(self) -> int:
        """Entries of a built model's parameters and router biases, the MTP layer included if there is one."""
        return self.total - self.padding + self.mtp

    @property
    def routed_experts(self) -> int:
        """Parameters of the routed experts (the part that MXFP4 packs), without the MTP layer's."""
        return next(part.total for part in self.components if part.name == "routed experts")

    @property
    def float32(self) -> int:
        """Parameters stored in float32 in every checkpoint, without the MTP layer's."""
        return sum(part.float32 for part in self.components)

    def by_dtype(self) -> dict[str, int]:
        """Parameters by the dtype the released layout stores them in, without the MTP layer."""
        rest = self.total - self.routed_experts - self.float32
        return {"mxfp4": self.routed_experts, "bf16": rest, "float32": self.float32}

    def weight_bytes(self, experts: str = "mxfp4", dtype: str = "bf16") -> int:
        """Bytes of the stored tensors, the MTP layer included if the configuration has one.

        `experts` is "mxfp4", "bf16" or "float32" for the routed experts; `dtype` "bf16" or "float32" for the rest.
        Raises ValueError for another name, or for MXFP4 when an expert width is no multiple of 32.
        """
        text = self.config.text
        packed = self.routed_experts
        kept, total = self.float32, self.total + self.mtp
        if self.mtp:
            packed += text.num_experts * expert_size(text)
            kept += self.mtp_layer.float32
        for name, allowed in ((experts, ("mxfp4", "bf16", "float32")), (dtype, ("bf16", "float32"))):
            if name not in allowed:
                raise ValueError(f"dtype {name!r} is unknown here; choose one of {', '.join(allowed)}")
        if experts == "mxfp4":
            check_mxfp4_widths(text)
            expert_bytes = packed // 2 + packed // MXFP4_GROUP
        else:
            expert_bytes = packed * BYTES[experts]
        return expert_bytes + 4 * kept + BYTES[dtype] * (total - packed - kept)

    @property
    def latent_values_per_layer(self) -> int:
        """Values that one MLA layer caches per token: normed latent and shared key."""
        return self.config.text.latent_dim

    def latent_bytes_per_token(self, dtype: str = "bf16") -> int:
        """Latent cache of all MLA layers for one token."""
        layers = len(self.config.text.linear_attn_config.full_attn_layers)
        return layers * self.latent_values_per_layer * BYTES[dtype]

    def kda_state_bytes_per_layer(self, dtype: str = "float32") -> int:
        """Recurrent state of one KDA layer for one sequence: heads x key dim x value dim."""
        linear = self.config.text.linear_attn_config
        return linear.num_heads * linear.head_dim**2 * BYTES[dtype]

    def conv_bytes_per_layer(self, dtype: str = "bf16") -> int:
        """The W - 1 raw inputs that the three short convolutions of one KDA layer still need, for one sequence."""
        linear = self.config.text.linear_attn_config
        return 3 * (linear.short_conv_kernel_size - 1) * linear.num_heads * linear.head_dim * BYTES[dtype]

    def state_bytes_per_request(self, state: str = "float32", dtype: str = "bf16") -> int:
        """Recurrent and convolution state of all KDA layers for one sequence; it does not grow with the length."""
        layers = len(self.config.text.linear_attn_config.kda_layers)
        return layers * (self.kda_state_bytes_per_layer(state) + self.conv_bytes_per_layer(dtype))

    def request_bytes(self, tokens: int, state: str = "float32", dtype: str = "bf16") -> int:
        """Everything cached for one sequence of `tokens` tokens."""
        return self.state_bytes_per_request(state, dtype) + tokens * self.latent_bytes_per_token(dtype)

    def forward_flops(self, context: float) -> Flops:
        """One token's forward pass when MLA sees `context` keys (itself included)."""
        text, linear = self.config.text, self.config.text.linear_attn_config
        state = 7 * linear.num_heads * linear.head_dim**2  # decay 1; error, write and read 2 each
        return Flops(
            weights=2.0 * self.activated,
            kda_state=float(len(linear.kda_layers) * state),
            mla_scores=float(len(linear.full_attn_layers) * _scores(text) * context),
            depth=6.0 * text.hidden_size * sum(depth_sources(text)),
        )

    def backward_flops(self, context: float) -> Flops:
        """One token's backward pass: each product has two gradients."""
        return self.forward_flops(context) * 2.0

    def training_flops(self, length: int) -> Flops:
        """Forward and backward of one token, averaged over a causal sequence of `length`, the MTP layer included."""
        text, context = self.config.text, (length + 1) / 2
        flops = self.forward_flops(context) * 3.0
        if not self.mtp:
            return flops
        head = text.vocab_size * text.hidden_size
        mtp = 3.0 * (2.0 * (self.mtp_layer.activated + head) + _scores(text) * context)
        return Flops(flops.weights, flops.kda_state, flops.mla_scores, flops.depth, mtp)

    def image_flops(self, patches: int) -> float:
        """Forward pass of the vision tower and projector over one item of `patches` patches (0 without vision)."""
        vision = self.config.vision
        if vision is None:
            return 0.0
        table = vision.init_pos_emb_height * vision.init_pos_emb_width * vision.vt_hidden_size
        scores = 4.0 * vision.vt_num_hidden_layers * vision.qkv_hidden_size * patches * patches
        return 2.0 * patches * (_vision_tower(vision) - table) + scores + patches / 2 * _projector(vision)


def account(config: ModelConfig) -> Account:
    """The account of `config`."""
    text, linear = config.text, config.text.linear_attn_config
    width, moe = text.hidden_size, sum(text.is_moe_layer(i) for i in range(text.num_hidden_layers))
    dense, kda = text.num_hidden_layers - moe, len(linear.kda_layers)
    embedding, expert, shared = text.vocab_size * width, expert_size(text), _shared_experts(text)
    vectors = (6 * text.num_hidden_layers + 3) * width
    dense_total = dense * 3 * width * text.intermediate_size
    chosen = moe * text.num_experts_per_token * expert
    parts = [
        Component("routed experts", moe * text.num_experts * expert, chosen),
        Component("KDA attention", kda * _kda(text), kda * _kda(text), kda * _kda_float32(text)),
        Component("MLA attention", *(2 * [len(linear.full_attn_layers) * _mla(text)])),
        Component("shared experts", *(2 * [moe * shared])),
        Component("latent projections", *(2 * [moe * 2 * width * text.routed_expert_hidden_size])),
        Component("routed expert norm", *(2 * [moe * text.routed_expert_hidden_size])),
        Component("router", *(2 * [moe * text.num_experts * width])),
        Component("router bias", moe * text.num_experts, 0, moe * text.num_experts),
        Component("dense FFN", dense_total, dense_total),
        Component("norms and depth queries", vectors, vectors),
        Component("embedding", embedding, 0),
        Component("LM head", embedding, embedding),
    ]
    if config.vision is not None:
        parts.append(Component("vision tower", _vision_tower(config.vision), 0))
        parts.append(Component("projector", _projector(config.vision), 0))
    return Account(config, tuple(parts), _mtp_layer(text))


def padded_heads(heads: int) -> int:
    """Entries of a stored A_log: `heads` rounded up to a multiple of 128, as in the release (96 -> 128)."""
    return -(-heads // A_LOG_MULTIPLE) * A_LOG_MULTIPLE


def expert_size(text: TextConfig) -> int:
    """Parameters of one routed expert: gate, up and down between latent and expert width."""
    return 3 * text.routed_expert_hidden_size * text.moe_intermediate_size


def check_mxfp4_widths(text: TextConfig) -> None:
    """Raise ConfigError unless both input widths of a routed expert are multiples of the MXFP4 group of 32."""
    for name in ("routed_expert_hidden_size", "moe_intermediate_size"):
        if getattr(text, name) % MXFP4_GROUP:
            raise ConfigError(
                f"text_config.{name}: {getattr(text, name)} is no multiple of {MXFP4_GROUP}, so the experts cannot be "
                "packed as MXFP4; choose bf16 or float32 for them"
            )


def depth_sources(text: TextConfig) -> list[int]:
    """Sources that each depth mix of one forward pass reads, in order (report eqs. 8-10)."""
    size, layers = text.attn_res_block_size, text.num_hidden_layers
    counts = []
    for i in range(layers):
        full = text.attn_res_mode == "full"
        before_mixer = 2 * i + 1 if full else -(-i // size) + 1
        counts += [before_mixer] if i else []
        counts.append(2 * i + 2 if full else i // size + 2)
    counts.append(2 * layers + 1 if text.attn_res_mode == "full" else (layers - 1) // size + 2)
    return counts


def _scores(text: TextConfig) -> int:
    return 2 * text.num_attention_heads * (text.qk_head_dim + text.v_head_dim)


def _kda_float32(text: TextConfig) -> int:
    linear = text.linear_attn_config
    channels = linear.num_heads * linear.head_dim
    conv = 3 * channels * linear.short_conv_kernel_size
    return conv + padded_heads(linear.num_heads) + channels + linear.head_dim


def _kda(text: TextConfig) -> int:
    linear, width = text.linear_attn_config, text.hidden_size
    channels = linear.num_heads * linear.head_dim
    projections = 5 * channels * width + linear.num_heads * width
    return projections + linear.head_dim * (width + channels) + _kda_float32(text)


def _mla(text: TextConfig) -> int:
    width, heads = text.hidden_size, text.num_attention_heads
    queries = text.q_lora_rank * (width + 1 + heads * text.qk_head_dim)
    latents = text.latent_dim * width + text.kv_lora_rank
    expanded = heads * (text.qk_nope_head_dim + text.v_head_dim) * text.kv_lora_rank
    outputs = (1 + text.mla_use_output_gate) * heads * text.v_head_dim * width
    return queries + latents + expanded + outputs


def _shared_experts(text: TextConfig) -> int:
    return 3 * text.hidden_size * text.shared_intermediate_size


def _mtp_layer(text: TextConfig) -> Component:
    """enorm, hnorm, eh_proj, final norm, and one MLA + LatentMoE decoder layer with its six vectors."""
    width, latent = text.hidden_size, text.routed_expert_hidden_size
    rest = 2 * width * width + 9 * width + _mla(text) + _shared_experts(text)
    rest += 2 * width * latent + latent + text.num_experts * width
    activated = rest + text.num_experts_per_token * expert_size(text)
    total = rest + text.num_experts * (expert_size(text) + 1)
    return Component("MTP layer", total, activated, text.num_experts)


def _vision_tower(vision: VisionConfig) -> int:
    width = vision.vt_hidden_size
    patch = 3 * vision.patch_size**2 * width
    table = vision.init_pos_emb_height * vision.init_pos_emb_width * width
    block = 4 * vision.qkv_hidden_size * width + 2 * vision.vt_intermediate_size * width + 2 * width
    return patch + table + vision.vt_num_hidden_layers * block + width


def _projector(vision: VisionConfig) -> int:
    merged = vision.vt_hidden_size * vision.merge_kernel_size[0] * vision.merge_kernel_size[1]
    return merged * merged + merged * vision.text_hidden_size + vision.text_hidden_size
