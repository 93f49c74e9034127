"""Distil a teacher into a student on its own samples: ``python examples/run_distillation.py``."""

from nemo_like.compose.main import train

if __name__ == "__main__":
    train("distillation")
