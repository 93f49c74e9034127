"""Train a language model with PPO: ``python examples/run_ppo.py [key=value ...]``; see --help."""

from pathlib import Path

from nemo_like.algorithms.ppo.config import PPOConfig
from nemo_like.compose.main import main


def run(config: PPOConfig) -> None:
    """Ray and the workers start before torch is imported here: all import at the same time."""
    from nemo_like.algorithms.processes import started

    with started(config, "ppo") as processes:
        with processes.run.start_phase("imports"):
            from nemo_like.algorithms.ppo.loop import run_ppo
        run_ppo(config, processes)


if __name__ == "__main__":
    main("ppo", run, Path(__file__).parent.parent / "configs")
