"""This process: device, rank, logs and metrics."""
