"""Train a language model with GRPO: ``python examples/run_grpo.py [key=value ...]``; see --help."""

from pathlib import Path

from nemo_like.cli import main
from nemo_like.config.sampling_run_schema import GRPORunConfig


def run(config: GRPORunConfig) -> None:
    """Imported only once the configuration is accepted: torch and Ray take seconds."""
    from nemo_like.algorithms.grpo import run_grpo

    run_grpo(config)


if __name__ == "__main__":
    main("grpo", run, Path(__file__).parent.parent / "configs")
