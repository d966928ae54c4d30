"""Stable LatentMoE by kernels: projections, routing, experts, and the weighted sum with its norm."""
