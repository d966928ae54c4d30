"""Many answers at once from one engine: a shared beginning is computed once, and each answer streams as it comes.

python examples/many_requests.py [RUN]
"""

from __future__ import annotations

import sys
from pathlib import Path

from openk3 import K3, Tokenizer
from openk3.commands.runs import find_model
from openk3.config.serve import CacheConfig, EngineConfig
from openk3.engine.engine import Engine
from openk3.engine.request import Request, SamplingParams

SHARED = '"""Files and folders: small functions that do one thing each, and say what they return."""\n\nimport os\n\n\n'
ENDS = ("def size(path):\n", "def parent(path):\n", "def lines(path):\n", "class Folder:\n")


def main() -> None:
    """Ask for four continuations, read the first as it streams, then the others."""
    directory = find_model(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
    model, tokenizer = K3.from_pretrained(directory), Tokenizer.load(directory)
    cache = CacheConfig.of(model.config, 64 * 2**20, value_bytes=4)
    engine = Engine(model, EngineConfig(cache, step_tokens=512))
    shared = [tokenizer.special["[BOS]"], *tokenizer.encode(SHARED)]
    engine.generate([Request(shared, SamplingParams(max_tokens=1))])

    params = SamplingParams(max_tokens=24, temperature=0.8, seed=1)
    streams = [engine.submit(Request([*shared, *tokenizer.encode(end)], params)) for end in ENDS]
    decoder = tokenizer.decoder()
    print(ENDS[0], end="")
    for token in streams[0]:
        print(decoder.feed(token.id), end="", flush=True)
    print()
    for end, answer in zip(ENDS, [stream.result() for stream in streams]):
        bits = -sum(answer.logprobs) / len(answer.tokens) / 0.6931
        cached = f"{answer.num_cached} of {answer.num_prompt} prompt tokens from the cache"
        print(f"{end.strip()} {len(answer.tokens)} tokens, {bits:.1f} bits each, {cached}")
    stats = engine.stats()
    print(f"{stats.num_computed} tokens in {stats.num_steps} passes, {stats.num_pages_held} pages still held")


if __name__ == "__main__":
    main()
