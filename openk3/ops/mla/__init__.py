"""Gated multi-head latent attention as functions on packed tokens."""
