"""Distil a teacher on given conversations: ``python examples/run_off_policy_distillation.py
teacher.model=FOLDER [key=value ...]``; see --help.
"""

from pathlib import Path

from nemo_like.cli import main
from nemo_like.config.text_run_schema import OffPolicyDistillationRunConfig


def run(config: OffPolicyDistillationRunConfig) -> None:
    """Imported only once the configuration is accepted: torch and Ray take seconds."""
    from nemo_like.algorithms.distillation import run_off_policy_distillation

    run_off_policy_distillation(config)


if __name__ == "__main__":
    main("off_policy_distillation", run, Path(__file__).parent.parent / "configs")
