"""Distil a teacher into what a student samples: ``python examples/run_distillation.py
teacher.model=FOLDER [key=value ...]``; see --help.
"""

from pathlib import Path

from nemo_like.cli import main
from nemo_like.config.sampling_run_schema import DistillationRunConfig


def run(config: DistillationRunConfig) -> None:
    """Ray and the workers start before torch is imported here: all import at the same time."""
    from nemo_like.algorithms.processes import started

    with started(config, "distillation") as processes:
        with processes.run.start_phase("imports"):
            from nemo_like.algorithms.distillation import run_distillation
        run_distillation(config, processes)


if __name__ == "__main__":
    main("distillation", run, Path(__file__).parent.parent / "configs")
