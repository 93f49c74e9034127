"""nemo-like: reinforcement learning and post-training of language models on Ray."""

__version__ = "0.1.0"
