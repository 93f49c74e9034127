"""Train a language model with PPO: ``python examples/run_ppo.py [key=value ...]``; see --help."""

from pathlib import Path

from nemo_like.cli import main
from nemo_like.config.sampling_run_schema import PPORunConfig


def run(config: PPORunConfig) -> None:
    """Imported only once the configuration is accepted: torch and Ray take seconds."""
    from nemo_like.algorithms.ppo import run_ppo

    run_ppo(config)


if __name__ == "__main__":
    main("ppo", run, Path(__file__).parent.parent / "configs")
