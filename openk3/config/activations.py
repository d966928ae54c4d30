"""ActivationPolicy: how each group of tensors that a layer leaves for its backward pass is held until then."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from openk3.config.model import ConfigError

KEEP, RECOMPUTE, FP8 = "keep", "recompute", "fp8"
AUTO = "auto"


@dataclass(frozen=True)
class ActivationPolicy:
    """One of "keep", "recompute" and "fp8" for each group; `HOLDS` says which of them a group can have.

    "keep" and "recompute" give the same gradients bit by bit; "fp8" rounds what the backward pass reads to E4M3 in
    blocks of 32 values, the forward pass sees no rounded value. Router scores, routes and statistics of norms are
    always kept: they are small, and a route that is made anew must not differ.
    """

    depth_sources: str = KEEP  # embedding, blocks' sums and running sums, one for each sub-layer
    layer_inputs: str = KEEP  # normed depth mixtures that mixers and feed-forward parts read, and mixtures before norms
    kda_projections: str = KEEP  # q, k and v before their short convolutions
    kda_gates: str = KEEP  # decay logits, output gates
    kda_qkv: str = KEEP  # q, k and v behind the convolutions
    kda_outputs: str = KEEP  # before norm and gate
    mla_latents: str = KEEP  # low-rank queries, latents and shared keys before their norms
    mla_normed: str = KEEP  # the same behind the norms
    mla_qkv: str = KEEP  # heads' queries, keys and values
    mla_gates: str = KEEP
    mla_outputs: str = KEEP  # float32, before the gate
    gated_outputs: str = KEEP  # of both kinds of mixer: what the output projection reads
    moe_latents: str = KEEP  # routed experts' inputs and outputs in the latent space
    moe_hidden: str = KEEP  # gate and up of routed experts
    ffn_hidden: str = KEEP  # gate and up of shared experts and dense feed-forward parts
    situ: str = KEEP  # SiTU-GLU of them where a product reads it
    mixer: str = KEEP  # recompute: the whole mixer again, whatever the groups inside say
    ffn: str = KEEP  # recompute: the whole feed-forward part again, routes included
    vision: str = KEEP  # recompute: each block of the vision tower again

    def __post_init__(self) -> None:
        for name, held in self.groups().items():
            if held not in HOLDS[name]:
                raise ConfigError(f"activations: {name} can be {', '.join(HOLDS[name])}, got {held!r}")
        again = [part for part in ("mixer", "ffn") if getattr(self, part) == RECOMPUTE]
        rounded = self.layer_inputs == FP8 or (self.layer_inputs == RECOMPUTE and self.depth_sources == FP8)
        if again and rounded:
            raise ConfigError(
                f"activations: with {again[0]}=recompute, layer inputs must not come from FP8: rounded ones would give "
                "other outputs and routes than the forward pass had; keep layer_inputs, or depth_sources with them"
            )

    def groups(self) -> dict[str, str]:
        """Every group and how it is held."""
        return {spec.name: getattr(self, spec.name) for spec in dataclasses.fields(self)}

    @property
    def is_exact(self) -> bool:
        """Whether gradients are bit by bit those of keeping everything."""
        return FP8 not in self.groups().values()

    @classmethod
    def parse(cls, text: str) -> ActivationPolicy:
        """From `PRESET`, `GROUP=HOW,...` or `PRESET,GROUP=HOW,...`. Raises ConfigError naming what is wrong."""
        first, *rest = [part.strip() for part in text.split(",")]
        if "=" in first:
            first, rest = "none", [first, *rest]
        if first == AUTO:
            raise ConfigError(f"activations: {AUTO} chooses every group itself; give it alone, or a preset")
        if first not in PRESETS:
            choices = ", ".join((*PRESETS, AUTO))
            raise ConfigError(f"activations: {first!r} is none of {choices}, nor a list of GROUP=HOW")
        values = dict(PRESETS[first])
        for part in rest:
            name, equals, held = (word.strip() for word in part.partition("="))
            if not equals or name not in HOLDS:
                raise ConfigError(f"activations: {part!r} is not GROUP=HOW; groups are {', '.join(HOLDS)}")
            values[name] = held
        return cls(**values)

    def __str__(self) -> str:
        """The shortest text that `parse` reads as this."""
        best = ""
        for preset, values in PRESETS.items():
            default = preset_groups(values)
            changes = [f"{name}={held}" for name, held in self.groups().items() if held != default[name]]
            found = ",".join([preset, *changes])
            best = found if not best or len(found) < len(best) else best
        return best


_PRODUCTS = (KEEP, RECOMPUTE, FP8)
HOLDS: dict[str, tuple[str, ...]] = {spec.name: _PRODUCTS for spec in dataclasses.fields(ActivationPolicy)}
HOLDS |= dict.fromkeys(("depth_sources", "kda_outputs", "mla_outputs", "moe_latents"), (KEEP, FP8))
HOLDS |= dict.fromkeys(("mixer", "ffn", "vision"), (KEEP, RECOMPUTE))

_CHEAP = dict.fromkeys(("layer_inputs", "kda_qkv", "mla_normed", "gated_outputs", "situ"), RECOMPUTE)
_ROUNDED = ("kda_projections", "kda_gates", "kda_outputs", "mla_latents", "mla_gates", "mla_qkv")
_ROUNDED = (*_ROUNDED, "mla_outputs", "moe_latents", "moe_hidden", "ffn_hidden")
# What every preset changes: nothing; what costs no product; the same and FP8 for the rest of a layer; all but sources.
PRESETS: dict[str, dict[str, str]] = {
    "none": {},
    "selective": _CHEAP,
    "memory": _CHEAP | dict.fromkeys(_ROUNDED, FP8),
    "full": dict.fromkeys(("layer_inputs", "mixer", "ffn", "vision"), RECOMPUTE),
}


def preset_groups(values: dict[str, str]) -> dict[str, str]:
    """Every group as a preset has it."""
    return dict.fromkeys(HOLDS, KEEP) | values


def check(text: str) -> None:
    """Raise ConfigError unless `text` is "auto" or what `ActivationPolicy.parse` reads."""
    if text != AUTO:
        ActivationPolicy.parse(text)
