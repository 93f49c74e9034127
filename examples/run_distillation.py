"""Distil a teacher into a student on its own samples: ``python examples/run_distillation.py``."""

from nemo_like.cli import train

if __name__ == "__main__":
    train("distillation")
