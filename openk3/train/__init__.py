"""The optimizer step, pretraining and checkpoints."""
