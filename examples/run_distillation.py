"""Distil a teacher into what a student samples: ``python examples/run_distillation.py
teacher.model=FOLDER [key=value ...]``; see --help.
"""

from pathlib import Path

from nemo_like.algorithms.distillation.config import DistillationConfig
from nemo_like.compose.main import main


def run(config: DistillationConfig) -> None:
    """Ray and the workers start before torch is imported here: all import at the same time."""
    from nemo_like.algorithms.processes import started

    with started(config, "distillation") as processes:
        with processes.run.start_phase("imports"):
            from nemo_like.algorithms.distillation.loop import run_distillation
        run_distillation(config, processes)


if __name__ == "__main__":
    main("distillation", run, Path(__file__).parent.parent / "configs")
