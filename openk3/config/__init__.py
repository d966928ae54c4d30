"""Frozen dataclasses that describe a model and a run; standard library only."""
