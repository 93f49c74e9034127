"""What workers are doing, for long waits: progress, and what is usual."""

from collections.abc import Callable
from pathlib import Path

IMPORTING = (
    "its process starts and imports torch and transformers, which takes 5 to 15 s on an idle "
    "machine, and minutes where the processors are busy or Python's packages are on a shared disk"
)
IMPORTING_ENGINE = f"{IMPORTING}; vLLM takes as long once more"
STARTING_ENGINE = (
    "it starts its engine, and what scores; vLLM takes 10 to 60 s, with "
    "engine_kwargs.enforce_eager=false and empty caches a few minutes"
)


def num_bytes(folder: Path) -> int:
    """Of all files in ``folder``; 0 if there is none."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # renamed meanwhile
            continue
    return total


def gb(count: float) -> str:
    """As people say it.

    >>> gb(3_100_000_000), gb(1_234_000)
    ('3.1 GB', '0.0012 GB')
    """
    return f"{count / 1e9:.2g} GB" if count < 1e10 else f"{count / 1e9:.0f} GB"


def written(folder: Path, expected: int) -> Callable[[], str]:
    """Progress of writing ``folder``, evaluated when the message is shown."""
    return lambda: f"{gb(num_bytes(folder))} of about {gb(expected)} are written to {folder}"


def writing_folder(target: Path) -> Path:
    """Where an export is written, aside, before it gets its name."""
    return target.with_name(f".{target.name}-writing")
