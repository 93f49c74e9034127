"""Evaluate a model: ``python examples/run_eval.py [key=value ...]``; see --help."""

from nemo_like.cli import train

if __name__ == "__main__":
    train("eval")
