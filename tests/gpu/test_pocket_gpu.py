"""The model that comes with the package: greedy tokens on the GPU are those of the CPU until two logits nearly tie."""

from __future__ import annotations

import pytest
import torch

from openk3.commands.runs import SHIPPED
from openk3.inputs.chat import encode_chat, render
from openk3.inputs.packed import Packed
from openk3.inputs.tokenizer import Tokenizer
from openk3.model.generate import generate
from openk3.model.k3 import K3

pytestmark = pytest.mark.gpu
NEAR_TIE = 1e-2
QUESTIONS = ("What does happy mean?", "What is 1204 - 877?", "Who are you?", "Spell garden.", "What is an otter?")


def greedy(model: K3, ids: list[int], stop: int) -> list[int]:
    """The most likely answer."""
    return list(generate(model, ids, max_tokens=72, temperature=0.0, stop_ids=(stop,)))


@torch.no_grad()
def gaps(model: K3, ids: list[int], tokens: list[int]) -> list[float]:
    """How far the two largest logits are apart at each token of the answer."""
    logits = model(Packed.join([ids + tokens]).to(model.embed.weight.device))[len(ids) - 1 : -1]
    top = logits.float().topk(2, -1).values
    return (top[:, 0] - top[:, 1]).tolist()


def test_greedy_tokens_are_the_cpus_up_to_a_near_tie() -> None:
    """Steps by kernels and graphs beside the definition, both in float32."""
    tokenizer = Tokenizer.load(SHIPPED)
    stop = tokenizer.special["<|end_of_msg|>"]
    cpu, gpu = (K3.from_pretrained(SHIPPED, dtype=torch.float32, device=device) for device in ("cpu", "cuda"))
    for question in QUESTIONS:
        ids, _ = encode_chat(tokenizer, render([{"role": "user", "content": question}], thinking=True, effort="max"))
        want, got = greedy(cpu, ids, stop), greedy(gpu, ids, stop)
        near = [min(pair) < NEAR_TIE for pair in zip(gaps(cpu, ids, want), gaps(gpu, ids, want))]
        sure = near.index(True) if True in near else len(want)
        assert sure >= 5 and got[:sure] == want[:sure], (question, sure)
