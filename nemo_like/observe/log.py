"""Standard logging: short lines for people on the console, full lines in ``run.log``."""

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console as Terminal

_FULL_FORMAT = "%(asctime)s %(levelname)s %(processName)s %(name)s: %(message)s"
_NOISY_LIBRARIES = (
    *("ray", "vllm", "httpx", "httpcore", "urllib3", "filelock", "wandb"),
    "matplotlib",  # of reasoning_gym, which tells of its fonts at a first start
)


def setup_logging(run_dir: Path, terminal: "Terminal | None" = None) -> Callable[[], None]:
    """Send the root logger to the console and to ``<run_dir>/run.log``.

    ``terminal`` is the one that ``Progress`` draws on, so that lines appear above its table; None:
    plain lines on stderr. Handlers of others, such as pytest's, stay. Returns how to undo it.
    """
    root = logging.getLogger()
    loggers = [root, *map(logging.getLogger, _NOISY_LIBRARIES)]
    levels = [logger.level for logger in loggers]
    handlers = [_console_handler(terminal), _file_handler(run_dir / "run.log")]
    root.setLevel(logging.INFO)
    for logger in loggers[1:]:
        logger.setLevel(logging.WARNING)
    for handler in handlers:
        root.addHandler(handler)

    def undo() -> None:
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)

    return undo


def file_only(record: logging.LogRecord) -> bool:
    """Whether ``extra={"file_only": True}`` was given: the console shows the content already."""
    return getattr(record, "file_only", False)


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """A full disk costs lines here: tracebacks of logging would hide what ends the run."""


class ShortFormatter(logging.Formatter):
    """``12:03:04 message``; from warnings on, ``12:03:04 WARNING message``."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(message)s", datefmt="%H:%M:%S")
        self._marked = logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """The line, followed by the traceback if there is one."""
        if record.levelno >= logging.WARNING:
            return self._marked.format(record)
        return super().format(record)


def _console_handler(terminal: "Terminal | None") -> logging.Handler:
    if terminal is None:
        handler: logging.Handler = logging.StreamHandler(sys.stderr)
    else:
        from rich.highlighter import NullHighlighter
        from rich.logging import RichHandler

        handler = RichHandler(
            console=terminal,
            show_time=False,
            show_level=False,
            show_path=False,
            highlighter=NullHighlighter(),
            keywords=["WARNING", "ERROR", "CRITICAL"],
        )
    handler.setFormatter(ShortFormatter())
    handler.addFilter(lambda record: not file_only(record))
    return handler


def _file_handler(path: Path) -> logging.Handler:
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = _LogFile(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter(_FULL_FORMAT))
    return handler
