"""Scoring, baselines and the run report."""
