"""Documents become packed training batches."""
