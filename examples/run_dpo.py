"""Train on preferences with DPO: ``python examples/run_dpo.py [key=value ...]``; see --help."""

from nemo_like.cli import train

if __name__ == "__main__":
    train("dpo")
