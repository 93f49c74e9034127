"""What a run shows and logs: a table that updates in place, or one line a step; ``run.log``."""

import logging
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rich.console import Console as Terminal
from rich.console import Group
from rich.highlighter import NullHighlighter
from rich.live import Live
from rich.logging import RichHandler
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

logger = logging.getLogger(__name__)

_MOST_SHOWN = 600
"""Characters of each part of a sample."""
_NUM_ROWS = 8  # with the lines above and below, half of a small terminal
_REFRESH_PER_S = 2  # often enough for a clock of seconds, cheap on a busy core
_FULL_FORMAT = "%(asctime)s %(levelname)s %(processName)s %(name)s: %(message)s"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_NOISY_LIBRARIES = (
    *("ray", "vllm", "httpx", "httpcore", "urllib3", "filelock"),
    "matplotlib",  # of reasoning_gym, which tells of its fonts at a first start
)


@dataclass(frozen=True)
class Column:
    """One metric on the console: ``template`` is for ``str.format``."""

    metric: str
    label: str
    template: str


ROLLOUT_COLUMNS = (
    Column("rollout/reward", "reward", "{:.3f}"),
    Column("validation/reward", "val", "{:.3f}"),
    Column("train/loss", "loss", "{:+.4f}"),
    Column("train/kl", "kl", "{:.1e}"),
    Column("mismatch/mean_abs", "gap", "{:.0e}"),
    Column("train/grad_norm", "grad", "{:.2f}"),
    Column("train/tokens_per_s", "tok/s", "{:,.0f}"),
    Column("time/step_s", "time", "{:.1f} s"),
)

TRAINING_COLUMNS = (
    Column("train/loss", "loss", "{:.4f}"),
    Column("validation/loss", "val", "{:.4f}"),
    Column("train/accuracy", "accuracy", "{:.3f}"),
    Column("train/reward_margin", "margin", "{:+.3f}"),
    Column("train/grad_norm", "grad", "{:.2f}"),
    Column("train/tokens_per_s", "tok/s", "{:,.0f}"),
    Column("time/step_s", "time", "{:.1f} s"),
)


def live_terminal() -> Terminal | None:
    """Where to draw and log; None: plain lines, where no terminal can move its cursor."""
    terminal = Terminal(stderr=True)
    return terminal if sys.stderr.isatty() and not terminal.is_dumb_terminal else None


class Progress:
    """Shows the steps of a run; a ``MetricSink``, and a context manager around the loop."""

    def __init__(
        self,
        max_steps: int = 0,
        terminal: Terminal | None = None,
        *,
        columns: Sequence[Column] = ROLLOUT_COLUMNS,
        headline: str = "validation/reward",
        first_step: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``max_steps`` may be set later. ``headline``: metric whose first and latest value stay.

        ``first_step``: step that a resumed run continues from; 0: a new run.
        """
        self.max_steps = max_steps
        """Steps of the whole run; 0: not known yet."""
        self._columns = tuple(columns)
        self._headline = headline
        self._clock = clock
        # Rebound, never changed in place: the display reads them from its own thread.
        self._rows: tuple[tuple[int, dict[str, float]], ...] = ()
        self._times: tuple[tuple[int, float], ...] = ((first_step, clock()),)
        self._phases: tuple[tuple[str, float], ...] = ()
        self._headlines: tuple[tuple[int, float], ...] = ()
        self._widths: dict[str, int] = {}
        self._live = None
        if terminal is not None:
            self._live = Live(self, console=terminal, refresh_per_second=_REFRESH_PER_S)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the last table on the screen; further log lines come below it."""
        if self._live is not None:
            self._live.stop()

    def log(self, step: int, values: dict[str, float]) -> None:
        self._rows = (*self._rows, (step, values))[-_NUM_ROWS:]
        # What came before the first step (start-up, validation) says nothing about the pace.
        now, earlier = self._clock(), tuple(entry for entry in self._times if entry[0] < step)
        if len(earlier) == 1 and "time/step_s" in values:
            earlier = ((step - 1, now - values["time/step_s"]),)
        self._times = (*earlier, (step, now))[-_NUM_ROWS - 1 :]
        if self._headline in values:
            self._headlines = (*self._headlines, (step, values[self._headline]))
        # The table shows it already; the log file keeps it either way.
        logger.info("%s", self._line(step, values), extra={"file_only": self._live is not None})

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show ``name`` and its elapsed seconds while the block runs; the innermost phase shows."""
        outer = self._phases
        self._phases = (*outer, (name, self._clock()))
        try:
            yield
        finally:
            self._phases = outer

    def _line(self, step: int, values: dict[str, float]) -> str:
        """``step 12/60  reward 0.430  loss -0.0120``, aligned with the lines before it."""
        parts = [f"step {step:>{len(str(self.max_steps))}}/{self.max_steps}"]
        for column in self._columns:
            text = _cell(column, values)
            if text or column.metric in self._widths:
                width = max(len(text), self._widths.get(column.metric, 0))
                self._widths[column.metric] = width
                blank = " " * (len(column.label) + 1 + width)
                parts.append(f"{column.label} {text:>{width}}" if text else blank)
        return "  ".join([*parts, self._eta()]).rstrip()

    def _eta(self) -> str:
        """Estimated time left, at the pace of recent steps."""
        (first, start), (last, end) = self._times[0], self._times[-1]
        if last <= first or last >= self.max_steps:
            return ""
        return f"ETA {_duration((end - start) / (last - first) * (self.max_steps - last))}"

    def __rich__(self) -> Group:
        """One screen: bar, last steps, headline metric and phase."""
        rows = self._rows
        shown = [column for column in self._columns if any(column.metric in row for _, row in rows)]
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        table.add_column("step", justify="right")
        for column in shown:
            table.add_column(column.label, justify="right", no_wrap=True)
        for step, values in rows:
            table.add_row(str(step), *(_cell(column, values) for column in shown))
        last = self._times[-1][0]
        grid = Table.grid(padding=(0, 2, 0, 0))
        bar = ProgressBar(total=self.max_steps, completed=last, width=30)
        grid.add_row(f"step {last}/{self.max_steps}", bar, self._eta())
        return Group(grid, table, self._foot())

    def _foot(self) -> Text:
        parts = []
        if self._phases:
            name, start = self._phases[-1]
            parts.append(f"{name} {self._clock() - start:.0f} s")
        if self._headlines:
            ends = dict((self._headlines[0], self._headlines[-1]))
            history = ", ".join(f"{value:.3f} at step {step}" for step, value in ends.items())
            parts.append(f"{self._headline} {history}")
        return Text("  |  ".join(parts), style="dim")


def _cell(column: Column, values: dict[str, float]) -> str:
    return column.template.format(values[column.metric]) if column.metric in values else ""


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def printable(text: str) -> str:
    """Text without control sequences that a terminal would execute."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def shorten(value: object) -> str:
    """A long text, cut in the middle."""
    text = str(value)
    half = _MOST_SHOWN // 2
    return text if len(text) <= _MOST_SHOWN else f"{text[:half]} [...] {text[-half:]}"


def log_samples(step: int, samples: Sequence[Mapping[str, object]]) -> None:
    """Log completions of a validation."""
    for sample in samples:
        told = [f"{name}: {printable(shorten(value))}" for name, value in sample.items()]
        logger.info("Validation at step %d\n    %s", step, "\n    ".join(told))


def seconds_by_phase(numbers: Mapping[str, float]) -> str:
    """Numbers named ``time/PHASE_s`` as ``ray 1.2, train 0.3``."""
    return ", ".join(
        f"{name.removeprefix('time/').removesuffix('_s')} {seconds:.1f}"
        for name, seconds in numbers.items()
    )


def setup_logging(run_dir: Path, terminal: Terminal | None = None) -> Callable[[], None]:
    """Send the root logger to the console and to ``<run_dir>/run.log``.

    Records with ``extra={"file_only": True}`` go to the file alone. ``terminal`` is the one that
    ``Progress`` draws on: lines appear above its table. None: plain lines on stderr. Handlers of
    others, such as pytest's, stay. Returns how to undo it.
    """
    root = logging.getLogger()
    loggers = [root, *map(logging.getLogger, _NOISY_LIBRARIES)]
    levels = [logger.level for logger in loggers]
    run_dir.mkdir(parents=True, exist_ok=True)
    file = _LogFile(run_dir / "run.log", encoding="utf-8")
    file.setFormatter(logging.Formatter(_FULL_FORMAT))
    handlers = [_console_handler(terminal), file]
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


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """A full disk costs lines here: tracebacks of logging would hide what ends the run."""


class ShortFormatter(logging.Formatter):
    """``12:03:04 message``; from warnings on, ``12:03:04 WARNING message``."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        level = f"{record.levelname} " if record.levelno >= logging.WARNING else ""
        return f"{record.asctime} {level}{record.message}"


def _console_handler(terminal: Terminal | None) -> logging.Handler:
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    if terminal is not None:
        handler = RichHandler(
            console=terminal,
            show_time=False,
            show_level=False,
            show_path=False,
            highlighter=NullHighlighter(),
            keywords=["WARNING", "ERROR", "CRITICAL"],
        )
    handler.setFormatter(ShortFormatter())
    handler.addFilter(lambda record: not getattr(record, "file_only", False))
    return handler
