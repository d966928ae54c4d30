"""Inference as a library: what requests keep in memory, and which of it they share."""
