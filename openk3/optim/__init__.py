"""Parameter updates and expert balancing."""
