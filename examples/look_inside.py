"""What a trained model does with a text: which experts it uses, which depth it reads, how fast each layer forgets.

python examples/look_inside.py [RUN]
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from openk3 import K3, Packed, Tokenizer
from openk3.commands.runs import find_model
from openk3.model.trace import Recorder

TEXT = "import os\n\n\ndef main():\n    print(os.getcwd())\n"


def main() -> None:
    """Run once with a recorder and print three small tables."""
    directory = find_model(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
    model, tokenizer = K3.from_pretrained(directory), Tokenizer.load(directory)
    ids = [tokenizer.special["[BOS]"], *tokenizer.encode(TEXT)]
    seen = Recorder()
    with torch.no_grad():
        losses = model.loss(Packed.join([ids]), seen)
    print(f"{directory}: {len(ids)} tokens, {losses.lm / torch.log(torch.tensor(2.0)):.2f} bits per token\n")

    print("busiest expert over the mean, per layer")
    for layer, routes in sorted(seen.routes.items()):
        counts = torch.bincount(routes.expert_ids_Tk.flatten(), minlength=model.config.text.num_experts)
        print(f"  layer {layer}: {counts.max() / counts.float().mean():.2f}  {counts.tolist()}")
    print("\nhow much of each depth source the last read takes (embedding, blocks, running sum)")
    last = model.config.text.num_hidden_layers
    print("  " + "  ".join(f"{share:.2f}" for share in seen.depths[last, "output"].mean(0)))
    print("\ntokens until a KDA layer has forgotten half, median over channels")
    for layer, g_THK in sorted(seen.decays.items()):
        print(f"  layer {layer}: {(-0.6931 / g_THK).median():.1f}")


if __name__ == "__main__":
    main()
