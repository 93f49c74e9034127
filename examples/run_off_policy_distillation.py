"""Distil a teacher on given texts: ``python examples/run_off_policy_distillation.py``."""

from nemo_like.cli import train

if __name__ == "__main__":
    train("off_policy_distillation")
