"""Fine-tune a language model: ``python examples/run_sft.py [key=value ...]``; see --help."""

from nemo_like.cli import train

if __name__ == "__main__":
    train("sft")
