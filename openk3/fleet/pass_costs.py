"""What a pass of an engine takes in time: a few constants, measured on a replica or reckoned from a model's arithmetic.

seconds = pass + token * (tokens in the pass) + pair * (pairs of a new token and one that it attends to, in prompts)
        + row * (cached rows that decoding tokens attend to) + load * (tokens from the outer tier, once a request)

The pairs are the quadratic term of the MLA layers; KDA layers cost the same for every token. A decoding token reads its
whole context but computes little, so its rows have a constant of their own. `request` and `parse` (per token of the
prompt, cached or not) are what a request takes before it reaches the engine, on no account of others.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from openk3.fleet.trace import TraceError

MOST_SECONDS = 1_000_000  # of a constant: no sum of a simulation overflows
LARGEST_FILE = 1 << 20  # bytes


@dataclass(frozen=True)
class PassCosts:
    """Seconds, each per what its name says."""

    pass_s: float
    token_s: float
    pair_s: float
    row_s: float
    load_s: float = 0.0
    request_s: float = 0.0
    parse_s: float = 0.0

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            if type(value) not in (int, float) or not 0 <= value <= MOST_SECONDS:
                raise TraceError(f"{spec.name}: must be 0 to {MOST_SECONDS:,} seconds, got {str(value)[:40]}")
        if not self.pass_s and not self.token_s:
            raise TraceError("pass_s: a pass that takes no time at all; give pass_s or token_s")

    def prompt_s(self, start: int, num_tokens: int) -> float:
        """A chunk of a prompt behind `start` tokens."""
        return num_tokens * self.token_s + (num_tokens * start + num_tokens * (num_tokens + 1) / 2) * self.pair_s

    def decode_s(self, context: int) -> float:
        """One decoding token behind `context` tokens."""
        return self.token_s + context * self.row_s

    def door_s(self, num_tokens: int) -> float:
        """A prompt on its way to the engine."""
        return self.request_s + num_tokens * self.parse_s

    def prefill_s(self, cached: int, num_tokens: int, passes: int, loaded: int = 0) -> float:
        """A request alone on a replica: its time to first token; of its cached tokens, `loaded` come from outside."""
        whole = self.door_s(num_tokens) + loaded * self.load_s + passes * self.pass_s
        return whole + self.prompt_s(cached, num_tokens - cached)


# The released model on two nodes of eight H200, reckoned, not measured. 104e9 activated parameters and 24 MLA layers of
# 96 heads (192 + 128 wide) take 2.08e11 operations a token and 1.47e6 a pair; 16 GPUs of 989e12 operations a second are
# taken to reach 40 % of that. A decoding pass reads 1.45e12 bytes of experts at 80 % of 16 x 4.8e12 bytes a second; a
# row of latents is 24 x 1,152 bytes, shared out over the GPUs, at half of that rate, and comes back from CPU memory at
# 16 x 20e9 bytes a second.
K3_RECKONED = PassCosts(pass_s=0.024, token_s=3.3e-5, pair_s=2.3e-10, row_s=7.2e-10, load_s=8.6e-8, request_s=0.01)


def read_costs(path: Path) -> PassCosts:
    """From a JSON file: an object with these constants, or one with it under "costs". Raises TraceError, OSError."""
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST_FILE + 1)
        if len(text) > LARGEST_FILE:
            raise ValueError(f"more than {LARGEST_FILE:,} bytes")
        found = json.loads(text)
        found = found.get("costs", found)
        return PassCosts(**found)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        names = ", ".join(spec.name for spec in dataclasses.fields(PassCosts))
        raise TraceError(f"{path}: needs an object with {names} ({str(error)[:120]})") from None
