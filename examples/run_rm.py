"""Train a reward model: ``python examples/run_rm.py [key=value ...]``; see --help."""

from nemo_like.cli import train

if __name__ == "__main__":
    train("rm")
