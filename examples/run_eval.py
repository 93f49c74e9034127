"""Evaluate a model: ``python examples/run_eval.py [key=value ...]``; see --help."""

from pathlib import Path

from nemo_like.cli import main
from nemo_like.config.sampling_run_schema import EvalRunConfig


def run(config: EvalRunConfig) -> None:
    """Ray and the workers start before torch is imported here: all import at the same time."""
    from nemo_like.algorithms.processes import started

    with started(config, "eval") as processes:
        with processes.run.start_phase("imports"):
            from nemo_like.algorithms.evaluation import run_eval
        run_eval(config, processes)


if __name__ == "__main__":
    main("eval", run, Path(__file__).parent.parent / "configs")
