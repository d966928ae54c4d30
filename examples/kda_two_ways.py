"""Kimi Delta Attention by definition and in chunks: the same numbers, gradients too, at very different speed.

python examples/kda_two_ways.py [TOKENS]
"""

from __future__ import annotations

import sys
import time

import torch

from openk3.ops import KdaGate, chunk_kda, recurrent_kda

T, H, K, V = int(sys.argv[1]) if len(sys.argv) > 1 else 512, 4, 32, 32


def main() -> None:
    """Compute both, compare, and carry the state over a split."""
    torch.manual_seed(0)
    q, k, decay_logit = (torch.randn(T, H, K, dtype=torch.float64) for _ in range(3))
    v, beta_logit = torch.randn(T, H, V, dtype=torch.float64), torch.randn(T, H, dtype=torch.float64)
    gate = KdaGate(torch.zeros(H, dtype=torch.float64), torch.full((H, K), -4.0, dtype=torch.float64))
    outputs = {}
    for name, kda in (("token by token", recurrent_kda), ("in chunks", chunk_kda)):
        leaf = v.clone().requires_grad_()
        began = time.perf_counter()
        o, state = kda(q, k, leaf, decay_logit, beta_logit, gate)
        o.square().sum().backward()
        outputs[name] = (o.detach(), state.detach(), leaf.grad)
        print(f"{name:>15}: {1000 * (time.perf_counter() - began):8.1f} ms forward and backward")
    differences = [float((a - b).abs().max()) for a, b in zip(*outputs.values(), strict=True)]
    print("largest differences: output {:.1e}, state {:.1e}, gradient {:.1e}".format(*differences))

    half = T // 2
    first, state = chunk_kda(q[:half], k[:half], v[:half], decay_logit[:half], beta_logit[:half], gate)
    second, _ = chunk_kda(q[half:], k[half:], v[half:], decay_logit[half:], beta_logit[half:], gate, state_NHKV=state)
    split = float((torch.cat([first, second]) - outputs["in chunks"][0]).abs().max())
    print(f"two halves with the state carried over: {split:.1e}")


if __name__ == "__main__":
    main()
