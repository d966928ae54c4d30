"""Kernels for the few tokens of decoding steps."""
