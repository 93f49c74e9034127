"""Train on preferences with DPO: ``python examples/run_dpo.py [key=value ...]``; see --help."""

from pathlib import Path

from nemo_like.algorithms.dpo.config import DPOConfig
from nemo_like.compose.main import main


def run(config: DPOConfig) -> None:
    """Imported only once the configuration is accepted: torch and Ray take seconds."""
    from nemo_like.algorithms.dpo.loop import run_dpo

    run_dpo(config)


if __name__ == "__main__":
    main("dpo", run, Path(__file__).parent.parent / "configs")
