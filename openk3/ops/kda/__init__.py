"""Kimi Delta Attention as functions on packed tokens."""
