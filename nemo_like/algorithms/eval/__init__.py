"""Evaluation of a model."""
