"""Train a language model with PPO: ``python examples/run_ppo.py [key=value ...]``; see --help."""

from nemo_like.cli import train

if __name__ == "__main__":
    train("ppo")
