"""Distil a teacher into what a student samples: ``python examples/run_distillation.py
teacher.model=FOLDER [key=value ...]``; see --help.
"""

from pathlib import Path

from nemo_like.cli import main
from nemo_like.config.sampling_run_schema import DistillationRunConfig


def run(config: DistillationRunConfig) -> None:
    """Imported only once the configuration is accepted: torch and Ray take seconds."""
    from nemo_like.algorithms.distillation import run_distillation

    run_distillation(config)


if __name__ == "__main__":
    main("distillation", run, Path(__file__).parent.parent / "configs")
