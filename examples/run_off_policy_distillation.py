"""Distil a teacher on given conversations: ``python examples/run_off_policy_distillation.py
teacher.model=FOLDER [key=value ...]``; see --help.
"""

from pathlib import Path

from nemo_like.algorithms.distillation.config import OffPolicyDistillationConfig
from nemo_like.compose.main import main


def run(config: OffPolicyDistillationConfig) -> None:
    """Imported only once the configuration is accepted: torch and Ray take seconds."""
    from nemo_like.algorithms.distillation.loop import run_off_policy_distillation

    run_off_policy_distillation(config)


if __name__ == "__main__":
    main("off_policy_distillation", run, Path(__file__).parent.parent / "configs")
