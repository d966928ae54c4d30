"""Train a K3 in a loop of one's own: build, batch, step, without a run folder.

python examples/train_by_hand.py FILE... [--steps N]
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from openk3 import Packed, Tokenizer, recipes
from openk3.train.pretrain import fit_to_tokenizer
from openk3.train.state import TrainState
from openk3.train.step import train_step


def main() -> None:
    """Windows of 128 tokens, eight a step, drawn from the files in order."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    flags = parser.parse_args()
    texts = [path.read_text(encoding="utf-8") for path in flags.files]
    tokenizer = Tokenizer.train(texts, 1024)
    ids = [token for text in texts for token in [tokenizer.special["[BOS]"], *tokenizer.encode(text)]]
    windows = [ids[start : start + 128] for start in range(0, len(ids) - 127, 128)]
    print(f"{len(ids):,} tokens, {len(windows):,} windows")

    config = dataclasses.replace(recipes.pretrain("tiny"), steps=flags.steps)
    state = TrainState.build(fit_to_tokenizer(config, tokenizer))
    while state.step < state.total_steps:
        chosen = [windows[(8 * state.step + i) % len(windows)] for i in range(8)]
        values = train_step(state, [Packed.join(chosen)])
        if state.step % 10 == 0 or state.step == state.total_steps:
            print(
                f"step {state.step:4}: loss {values['lm']:.3f}, gradient norm {values['grad_norm']:.2f}, "
                f"busiest expert {values['max_load']:.2f} x the mean"
            )


if __name__ == "__main__":
    main()
