"""Fine-tune a language model: ``python examples/run_sft.py [key=value ...]``; see --help."""

from pathlib import Path

from nemo_like.algorithms.sft.config import SFTConfig
from nemo_like.compose.main import main


def run(config: SFTConfig) -> None:
    """Imported only once the configuration is accepted: torch and Ray take seconds."""
    from nemo_like.algorithms.sft.loop import run_sft

    run_sft(config)


if __name__ == "__main__":
    main("sft", run, Path(__file__).parent.parent / "configs")
