"""Distillation on the student's samples, and on given texts."""
