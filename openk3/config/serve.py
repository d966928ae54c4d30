"""PageShape, CacheConfig and EngineConfig: how a serving engine's memory is cut into equal pages, and its limits."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from openk3.config.model import ConfigError, ModelConfig, TextConfig
from openk3.config.outer_tier import TierConfig

HASH_TOKENS = 512  # the most tokens between two places where a prefix can be reused (report section 5.4.1)
ROW_ALIGNMENT = 16  # bytes: rows hold numbers of several widths, and kernels load them by 16 bytes
DRAFTS = ("mtp", "ngram")
CPU_STEP_TOKENS, GPU_STEP_TOKENS = 2048, 16384
GRAPH_PROMPT_INTERVAL = 32
GPU_CUT_TOKENS = 1024
_MOST = 2**48


@dataclass(frozen=True)
class PageShape:
    """What one page holds: latents of `page_tokens` tokens of every MLA layer, or states of one group of KDA layers.

    A page has one row per MLA layer, and a KDA layer's state takes one row, so a state of the whole model is spread
    over `kda_groups` pages. Prefixes are found at multiples of `hash_tokens`, whatever the page's size.
    """

    page_tokens: int
    hash_tokens: int
    layers_per_page: int  # rows: MLA layers, and that of the MTP layer
    kda_groups: int  # pages that one state of all KDA layers takes
    row_bytes: int  # one layer's part of a page

    def __post_init__(self) -> None:
        _check_numbers(self, may_be_zero={"kda_groups"})
        if self.hash_tokens > HASH_TOKENS:
            raise ConfigError(f"hash_tokens: must be at most {HASH_TOKENS}, got {self.hash_tokens}")
        if self.page_tokens % self.hash_tokens:
            raise ConfigError(
                f"page_tokens: {self.page_tokens} is no multiple of hash_tokens {self.hash_tokens}; change one of them"
            )

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        *,
        page_tokens: int | None = None,
        hash_tokens: int = HASH_TOKENS,
        value_bytes: int = 2,
        tensor_parallel: int = 1,
    ) -> PageShape:
        """Pages for a model, of a size that one KDA layer's state fills (6,144 tokens for the released one).

        `page_tokens` overrides the size: a small model's state may be worth fewer tokens than one hash block, or more
        than its requests have. `value_bytes` is the width of a latent and of a convolution input (8: states have it
        too); `tensor_parallel` splits the heads of a state, but not the latents. Raises ConfigError naming the field.
        """
        text, linear = model.text, model.text.linear_attn_config
        numbers = {"hash_tokens": hash_tokens, "value_bytes": value_bytes, "tensor_parallel": tensor_parallel}
        for name, value in numbers.items():
            _check_number(name, value)
        if not linear.full_attn_layers:
            raise ConfigError("linear_attn_config.full_attn_layers: pages need at least one MLA layer")
        if linear.num_heads % tensor_parallel:
            raise ConfigError(f"tensor_parallel: {tensor_parallel} does not divide {linear.num_heads} KDA heads")
        state = 0
        if linear.kda_layers:
            state = kda_row_bytes(text, value_bytes) // tensor_parallel + carry_bytes(text, value_bytes)
        token = text.latent_dim * value_bytes
        if page_tokens is None:
            page_tokens = max(1, _ceil(state, token * hash_tokens)) * hash_tokens
        else:
            _check_number("page_tokens", page_tokens)
        rows = len(linear.full_attn_layers) + text.num_nextn_predict_layers
        groups = _ceil(len(linear.kda_layers), rows)
        row_bytes = _ceil(max(state, page_tokens * token), ROW_ALIGNMENT) * ROW_ALIGNMENT
        return cls(page_tokens, hash_tokens, rows, groups, row_bytes)

    @property
    def page_bytes(self) -> int:
        """Bytes of a whole page; memory divided by it is the number of pages."""
        return self.layers_per_page * self.row_bytes

    @property
    def blocks_per_page(self) -> int:
        """Hash blocks that a page of latents holds."""
        return self.page_tokens // self.hash_tokens

    def latent_pages(self, num_tokens: int) -> int:
        """Pages that the latents of so many tokens take."""
        return _ceil(num_tokens, self.page_tokens)


@dataclass(frozen=True)
class CacheConfig:
    """One engine's page memory."""

    pages: PageShape
    num_pages: int
    max_requests: int = 256  # requests that hold pages at the same time
    max_tokens: int = 1048576  # longest request, prompt and answer together
    checkpoint_pages: int = 1  # a long prompt leaves a state checkpoint every so many pages; 0: only where turns end
    cut_tokens: int = 0  # no pass ends early for a checkpoint that would save fewer tokens; see EngineConfig.on

    def __post_init__(self) -> None:
        _check_numbers(self, may_be_zero={"checkpoint_pages", "cut_tokens"})
        least = self.pages_for(1)
        if self.num_pages < least:
            raise ConfigError(
                f"num_pages: one request of one token takes {least} pages ({least * self.pages.page_bytes} bytes),"
                f" got {self.num_pages}"
            )

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        memory_bytes: int,
        *,
        value_bytes: int = 2,
        hash_tokens: int | None = None,
        max_requests: int = 256,
        max_tokens: int = 1048576,
    ) -> CacheConfig:
        """As many pages as fit into memory, in a shape that suits the model.

        Unless `hash_tokens` says otherwise, a page of a small model holds about a dozen hash blocks, as one of the
        released model does. Raises ConfigError if not even one request fits.
        """
        if hash_tokens is None:
            text = model.text
            worth = kda_row_bytes(text, value_bytes) // (text.latent_dim * value_bytes)  # a state, in tokens
            hash_tokens = min(HASH_TOKENS, max(16, 2 ** (max(1, worth // 8).bit_length() - 1)))
        pages = PageShape.of(model, hash_tokens=hash_tokens, value_bytes=value_bytes)
        return cls(pages, max(1, memory_bytes // pages.page_bytes), max_requests, max_tokens)

    @property
    def checkpoint_tokens(self) -> int:
        """Tokens between two checkpoints of a prompt; 0: none but where turns end."""
        return self.checkpoint_pages * self.pages.page_tokens

    def pages_for(self, num_tokens: int) -> int:
        """Pages that a request of so many tokens holds: its latents and its running state."""
        return self.pages.latent_pages(num_tokens) + self.pages.kda_groups


@dataclass(frozen=True)
class SpeculationConfig:
    """Guesses at what comes next, of which a pass computes several at once; answers are the same with and without.

    `draft` makes them: "mtp", the model's own MTP layer, or "ngram", what followed the same tokens earlier in the
    request. At most `most_drafts` per request and pass; `adaptive` asks for as many as are worth their time.
    """

    draft: str = "mtp"
    most_drafts: int = 8
    adaptive: bool = True

    def __post_init__(self) -> None:
        if self.draft not in DRAFTS:
            raise ConfigError(f"draft: must be one of {', '.join(DRAFTS)}, got {str(self.draft)[:40]!r}")
        _check_numbers(self, may_be_zero=set())


@dataclass(frozen=True)
class EngineConfig:
    """One engine: its memory, and how it shares its time."""

    cache: CacheConfig
    step_tokens: int = 0  # most tokens in one pass: its length in time, and the memory of its activations; 0: see `on`
    patience: int = 256  # steps of waiting that outweigh one level of priority; also see Scheduler
    speculation: SpeculationConfig | None = None
    tier: TierConfig | None = None  # memory behind the pages
    prompt_interval: int = 0  # passes of which one computes prompts while others decode, see Shares; 0: see `on`

    def __post_init__(self) -> None:
        _check_numbers(self, may_be_zero={"patience", "step_tokens", "prompt_interval"})

    def on(self, *, gpu: bool, graphs: bool) -> EngineConfig:
        """With what suits a device where it was left open; `graphs`: all passes of decoding are CUDA graphs.

        A pass with prompts costs a GPU's host ten times one without, hardly more the longer it is: so few, long ones,
        and none more for the sake of some hundred tokens that others need not compute.
        """
        cache = self.cache
        if gpu and not cache.cut_tokens:
            cache = dataclasses.replace(cache, cut_tokens=GPU_CUT_TOKENS)
        step_tokens = self.step_tokens or (GPU_STEP_TOKENS if gpu else CPU_STEP_TOKENS)
        interval = self.prompt_interval or (GRAPH_PROMPT_INTERVAL if graphs else 1)
        return dataclasses.replace(self, cache=cache, step_tokens=step_tokens, prompt_interval=interval)


def kda_row_bytes(text: TextConfig, value_bytes: int = 2) -> int:
    """Bytes of one KDA layer's state and of the last W - 1 raw inputs of its three convolutions.

    A state is in float32 at least: `value_bytes` of 8 are for a float64 model.
    """
    linear = text.linear_attn_config
    state = linear.num_heads * linear.head_dim**2 * max(4, value_bytes)
    return state + 3 * (linear.short_conv_kernel_size - 1) * linear.num_heads * linear.head_dim * value_bytes


def carry_bytes(text: TextConfig, value_bytes: int = 2) -> int:
    """Bytes of what a state keeps for the MTP layer: the hidden vector of the last token, read beside the next one."""
    return text.hidden_size * value_bytes if text.num_nextn_predict_layers else 0


def _ceil(value: int, unit: int) -> int:
    return -(-value // unit)


def _check_number(name: str, value: object, least: int = 1) -> None:
    if type(value) is not int or not least <= value <= _MOST:
        raise ConfigError(f"{name}: must be a whole number of at least {least}, got {str(value)[:40]}")


def _check_numbers(config: PageShape | CacheConfig | SpeculationConfig | EngineConfig, may_be_zero: set[str]) -> None:
    for spec in dataclasses.fields(config):
        if spec.type == "int":
            _check_number(spec.name, getattr(config, spec.name), 0 if spec.name in may_be_zero else 1)
