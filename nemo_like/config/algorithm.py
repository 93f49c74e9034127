"""What an algorithm registers: its name, its configuration, and where its loop is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nemo_like.config.run import RunConfig
from nemo_like.doors import import_path

Loop = Callable[[Any, Any], None]
"""``run(config, session)``: from a run's processes to a trained model in ``run.dir``."""


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """One algorithm; see ``docs/extending.md`` for adding one from another package."""

    name: str
    """Command (``nemo-like NAME``), and name of its configuration."""
    config: type[RunConfig]
    """Class of its configuration."""
    run: str | Loop
    """A ``Loop``, or ``module:function``, imported only when a run starts: a command line needs no
    torch."""

    def loop(self) -> Loop:
        """``run``, imported."""
        return import_path(self.run) if isinstance(self.run, str) else self.run
