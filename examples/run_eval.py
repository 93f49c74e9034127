"""Evaluate a model: ``python examples/run_eval.py [key=value ...]``; see --help."""

from pathlib import Path

from nemo_like.algorithms.eval.config import EvalConfig
from nemo_like.compose.main import main


def run(config: EvalConfig) -> None:
    """Ray and the workers start before torch is imported here: all import at the same time."""
    from nemo_like.algorithms.processes import started

    with started(config, "eval") as processes:
        with processes.run.start_phase("imports"):
            from nemo_like.algorithms.eval.loop import run_eval
        run_eval(config, processes)


if __name__ == "__main__":
    main("eval", run, Path(__file__).parent.parent / "configs")
