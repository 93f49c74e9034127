"""Train a reward model: ``python examples/run_rm.py [key=value ...]``; see --help."""

from pathlib import Path

from nemo_like.cli import main
from nemo_like.config.text_run_schema import RewardModelRunConfig


def run(config: RewardModelRunConfig) -> None:
    """Imported only once the configuration is accepted: torch and Ray take seconds."""
    from nemo_like.algorithms.reward_model import run_reward_model

    run_reward_model(config)


if __name__ == "__main__":
    main("rm", run, Path(__file__).parent.parent / "configs")
