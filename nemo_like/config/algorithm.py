"""What an algorithm registers: its name, its schema, and where its loop is."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from nemo_like.config.run import RunConfig


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """One algorithm; see ``docs/extending.md`` for adding one from another package."""

    name: str
    """Command (``nemo-like NAME``), and name of its configuration."""
    config: type[RunConfig]
    """Everything that it can be told."""
    run: "str | Callable[[Any], None]"
    """``module:function``, imported only when a run starts: a command line needs no torch."""

    def start(self, config: RunConfig) -> None:
        """Run to the end."""
        run = self.run
        if isinstance(run, str):
            module, _, function = run.partition(":")
            run = getattr(import_module(module), function)
        run(config)
