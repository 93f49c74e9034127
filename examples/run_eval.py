"""Evaluate a model: ``python examples/run_eval.py [key=value ...]``; see --help."""

from pathlib import Path

from nemo_like.cli import main
from nemo_like.config.sampling_run_schema import EvalRunConfig


def run(config: EvalRunConfig) -> None:
    """Imported only once the configuration is accepted: torch and Ray take seconds."""
    from nemo_like.algorithms.evaluation import run_eval

    run_eval(config)


if __name__ == "__main__":
    main("eval", run, Path(__file__).parent.parent / "configs")
