"""The peer of `openk3 bench serve`: transformers' generate on the same shapes and requests, in another Python.

Run by another Python, which needs torch and transformers and not this package. The first line of its input is the work
(shapes, threads, requests), each further one names a way to answer them all; its output has a line of JSON for each.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import platform
import sys
import time
from typing import Any

import torch

CONTINUOUS = "continuous"  # transformers' own continuous batching; other ways name how experts are computed


def main() -> None:
    """Build the model, say so, then measure whatever is asked for until the input ends."""
    answer = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # transformers talks; the pipe is for answers
        work = json.loads(sys.stdin.readline())
        torch.set_num_threads(work["threads"])
        transformers = importlib.import_module("transformers")
        transformers.logging.set_verbosity_error()
        model = build(transformers, work)
        versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        say(answer, versions | {"python": platform.python_version(), "parameters": model.num_parameters()})
        for line in sys.stdin:
            try:
                found = measure(transformers, model, work, line.strip())
            except Exception as error:  # a way that this version cannot go is a row of the report, not its end
                found = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else ''}"}
            say(answer, found)


def say(answer: Any, found: dict[str, Any]) -> None:
    """One line."""
    answer.write(json.dumps(found) + "\n")
    answer.flush()


def build(transformers: Any, work: dict[str, Any]) -> Any:
    """A Kimi Linear model of these shapes with weights from a seed."""
    torch.manual_seed(work["seed"])
    config = transformers.KimiLinearConfig(**work["config"])
    config._attn_implementation = "sdpa"
    model = transformers.KimiLinearForCausalLM(config).to(getattr(torch, work["dtype"])).eval()
    return model.requires_grad_(False)


def measure(transformers: Any, model: Any, work: dict[str, Any], way: str) -> dict[str, Any]:
    """Seconds by the clock and of this process's CPU time that answering every request takes, and the tokens."""
    answer_all = continuous if way == CONTINUOUS else static
    if way != CONTINUOUS:
        model.set_experts_implementation(way)
    began, cpu_began = time.perf_counter(), time.process_time()
    with torch.inference_mode():
        tokens, firsts = answer_all(transformers, model, work)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    return {"tokens": tokens, "seconds": seconds, "cpu_seconds": cpu_seconds, "first_token_s": firsts}


def static(transformers: Any, model: Any, work: dict[str, Any]) -> tuple[int, list[float]]:
    """Batches in the order of arrival, padded on the left; each runs until its longest answer ends.

    Tokens behind a request's own length do not count.
    """
    requests, size, tokens = work["requests"], work["batch"], 0
    firsts, began = list[float](), time.perf_counter()
    for start in range(0, len(requests), size):
        batch = requests[start : start + size]
        longest = max(len(request["prompt"]) for request in batch)
        pads = [longest - len(request["prompt"]) for request in batch]
        ids = torch.tensor([[0] * pad + request["prompt"] for pad, request in zip(pads, batch)])
        mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in pads])
        first = _FirstToken()
        most = max(request["answer"] for request in batch)
        config = transformers.GenerationConfig(
            max_new_tokens=most, do_sample=False, use_cache=True, eos_token_id=None, pad_token_id=0
        )
        found = model.generate(ids, attention_mask=mask, generation_config=config, streamer=first)
        if found.shape[1] != longest + most:
            raise RuntimeError(f"{found.shape[1] - longest} tokens were generated, {most} asked for")
        tokens += sum(request["answer"] for request in batch)
        firsts += [first.time - began] * len(batch)
    return tokens, firsts


class _FirstToken(torch.nn.Module):
    """Notes when the first token of a batch came."""

    def __init__(self) -> None:
        super().__init__()
        self.time = 0.0
        self._calls = 0

    def put(self, value: torch.Tensor) -> None:
        """The prompts, then one token of each request at a time."""
        self._calls += 1
        if self._calls == 2:
            self.time = time.perf_counter()

    def end(self) -> None:
        """Nothing more."""


def continuous(transformers: Any, model: Any, work: dict[str, Any]) -> tuple[int, list[float]]:
    """transformers' continuous batching of the same requests; each has its own length."""
    config = transformers.GenerationConfig(do_sample=False, use_cache=True, eos_token_id=-1, pad_token_id=0)
    requests = work["requests"]
    with model.continuous_batching_context_manager(generation_config=config, block=True, timeout=5) as manager:
        for request in requests:
            manager.add_request(request["prompt"], max_new_tokens=request["answer"])
        tokens = done = 0
        while done < len(requests):
            found = manager.get_result(timeout=60)
            if found is None:
                raise RuntimeError("no answer came from continuous batching")
            if found.error:
                raise RuntimeError(found.error)
            tokens += len(found.generated_tokens)
            done += 1
    return tokens, []


if __name__ == "__main__":
    main()
