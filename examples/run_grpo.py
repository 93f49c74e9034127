"""Train a language model with GRPO: ``python examples/run_grpo.py [key=value ...]``; see --help."""

from nemo_like.cli import train

if __name__ == "__main__":
    train("grpo")
