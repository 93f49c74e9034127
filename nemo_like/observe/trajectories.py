"""What the policy actually wrote: a few trajectories of each step, to be read by people."""

from dataclasses import asdict, dataclass, field
from pathlib import Path

from nemo_like.observe.jsonl import JsonlFile


@dataclass(frozen=True, kw_only=True)
class TrajectoryRow:
    """One line of ``trajectories.jsonl``."""

    step: int
    prompt: str
    completion: str
    reward: float | None
    """None where grading failed."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What the reward function reported besides the reward."""
    finish_reason: str
    weight_version: int
    num_tokens: int
    """Sampled tokens, the stop token included."""


class TrajectoryWriter:
    """Appends rows; text is written as it is, not as escapes."""

    def __init__(self, path: Path) -> None:
        self._file = JsonlFile(path)

    def write(self, row: TrajectoryRow) -> None:
        """Append one row; raises RunError if it cannot be written."""
        self._file.append(asdict(row))

    def truncate_after(self, step: int) -> None:
        """Before a resume: drop the rows written after the checkpoint of ``step``."""
        self._file.truncate_after(step)

    def close(self) -> None:
        """Release the file."""
        self._file.close()
