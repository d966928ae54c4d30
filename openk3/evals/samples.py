"""Sampled continuations, many at a time, and the share of their lines that could be Python."""

from __future__ import annotations

import io
import tokenize
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from openk3.inputs.packed import Packed
from openk3.inputs.tokenizer import Tokenizer
from openk3.model.k3 import K3
from openk3.ops.sampling import sample

# What a line may break off inside of, or close without having opened it.
_FRAGMENT = ("multi-line", "triple-quoted", "unmatched", "was never closed", "does not match opening")


@dataclass(frozen=True)
class Sample:
    """A prompt and what the model wrote after it; `finished` if it ended by itself."""

    prompt: str
    text: str
    finished: bool


def sample_texts(
    model: K3,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    max_tokens: int,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
) -> list[Sample]:
    """Continue all prompts at once, each from the start of a document."""
    bos, eos = tokenizer.special["[BOS]"], tokenizer.special["[EOS]"]
    starts = [[bos, *tokenizer.encode(prompt)] for prompt in prompts]
    generator = torch.Generator(model.embed.weight.device).manual_seed(seed)
    pick = partial(sample, generator=generator, temperature=temperature, top_p=top_p, top_k=0)
    written = continue_all(model, starts, max_tokens=max_tokens, stop_id=eos, pick=pick)
    return [
        Sample(prompt, tokenizer.decode(ids[:-1] if ids[-1] == eos else ids), ids[-1] == eos)
        for prompt, ids in zip(prompts, written, strict=True)
    ]


@torch.no_grad()
def continue_all(
    model: K3, prompts: Sequence[Sequence[int]], *, max_tokens: int, stop_id: int, pick: Callable[[Tensor], Tensor]
) -> list[list[int]]:
    """Up to `max_tokens` ids after each prompt, `stop_id` included where it came; one pass for every token of all.

    `pick` chooses ids_N from logits_NV.
    """
    device = model.embed.weight.device
    cache = model.new_cache(len(prompts))
    packed = Packed.join(prompts).to(device)
    rows = packed.cu_seqlens[1:].long() - 1
    written: list[list[int]] = [[] for _ in prompts]
    for _ in range(max_tokens):
        # Embedded here: a sampled image placeholder is a token without an image.
        h_TD = model.backbone(model.embed(packed.token_ids_T), packed.cu_seqlens, cache)
        ids = pick(model.logits(h_TD[rows])).tolist()
        for ids_so_far, token in zip(written, ids, strict=True):
            if stop_id not in ids_so_far[-1:]:
                ids_so_far.append(token)
        if all(ids_so_far[-1] == stop_id for ids_so_far in written):
            break
        # A sequence that has ended goes on unread, so that the others keep their places.
        packed = Packed.join([[token] for token in ids]).to(device)
        rows = torch.arange(len(prompts), device=device)
    return written


def python_share(samples: Sequence[Sample]) -> float:
    """The fraction of complete, non-blank sampled lines that tokenise as Python; 0 if there are none.

    The first line counts from the prompt's last line on; the last one only if the model ended there.
    """
    lines = [line for sample in samples for line in _complete_lines(sample)]
    return sum(map(tokenises, lines)) / len(lines) if lines else 0.0


def tokenises(line: str) -> bool:
    """Whether Python's tokenizer accepts the line as part of a program.

    Indentation is left out, and a line may open brackets and strings that it does not close and close ones that it did
    not open, as lines in the middle of a statement do.
    """
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(line.strip() + "\n").readline))
    except tokenize.TokenError as error:
        return any(reason in str(error) for reason in _FRAGMENT)
    except SyntaxError:
        return False
    return not any(token.type == tokenize.ERRORTOKEN and token.string.strip() for token in tokens)


def _complete_lines(sample: Sample) -> list[str]:
    lines = (sample.prompt.rpartition("\n")[2] + sample.text).split("\n")
    kept = lines if sample.finished else lines[:-1]
    return [line for line in kept if line.strip()]
