"""Train a language model with GRPO: ``python examples/run_grpo.py [key=value ...]``; see --help."""

from pathlib import Path

from nemo_like.algorithms.grpo.config import GRPOConfig
from nemo_like.compose.main import main


def run(config: GRPOConfig) -> None:
    """Ray and the workers start before torch is imported here: all import at the same time."""
    from nemo_like.algorithms.processes import started

    with started(config, "grpo") as processes:
        with processes.run.start_phase("imports"):
            from nemo_like.algorithms.grpo.loop import run_grpo
        run_grpo(config, processes)


if __name__ == "__main__":
    main("grpo", run, Path(__file__).parent.parent / "configs")
