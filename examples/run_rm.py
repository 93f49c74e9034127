"""Train a reward model: ``python examples/run_rm.py [key=value ...]``; see --help."""

from pathlib import Path

from nemo_like.algorithms.rm.config import RewardModelConfig
from nemo_like.compose.main import main


def run(config: RewardModelConfig) -> None:
    """Imported only once the configuration is accepted: torch and Ray take seconds."""
    from nemo_like.algorithms.rm.loop import run_reward_model

    run_reward_model(config)


if __name__ == "__main__":
    main("rm", run, Path(__file__).parent.parent / "configs")
