"""Scoring a trained model and showing what it learned."""
