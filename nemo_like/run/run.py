"""What the runs of all algorithms share: folder, steps, logging, validation, checkpoints."""

import json
import logging
import shlex
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, Self

from nemo_like.config.run import RunConfig
from nemo_like.config.sampling import SamplingRunConfig
from nemo_like.config.typed import as_typed
from nemo_like.errors import UserError
from nemo_like.observe.console import (
    ROLLOUT_COLUMNS,
    TRAINING_COLUMNS,
    Progress,
    live_terminal,
    log_samples,
    seconds_by_phase,
    setup_logging,
)
from nemo_like.observe.metrics import Metrics, Spans, values
from nemo_like.observe.phase_trace import PhaseTrace
from nemo_like.observe.sinks import Details, Sinks
from nemo_like.run.callbacks import Callbacks
from nemo_like.run.checkpoint import Loader, Model, Saves
from nemo_like.run.ending import SIGNALS, LeftError, StopRequest, listen, note_error
from nemo_like.run.folder import claim, make_run_dir, note_end, save_config
from nemo_like.run.outputs import open_sinks, with_rates

logger = logging.getLogger(__name__)

_SUMMARY = "summary.json"
_SUMMARIZED = ("accuracy", "reward", "loss")  # of the metrics of validations


class Validator(Protocol):
    def validate(self, step: int) -> Metrics: ...


class Run:
    """One execution in one folder. Use as a context manager around everything that it logs.

    ``metrics.jsonl`` has one record per step; a validation belongs to the record of the step whose
    weights it measured (0: before training).
    """

    def __init__(self, config: RunConfig, name: str, began: float | None = None) -> None:
        """``began``: when its command was typed, by ``time.time``. None: now."""
        self.config = config
        self._name = name
        self.callbacks = Callbacks(config.run.callbacks)
        self.dir = make_run_dir(config, name)
        with ExitStack() as stack:
            stack.enter_context(claim(self.dir))
            self._open(config, began or time.time(), stack)
            self._exit = stack.pop_all()

    def _open(self, config: RunConfig, began: float, stack: ExitStack) -> None:
        trace = PhaseTrace(self.dir / "logs", "driver")
        stack.callback(trace.close)
        self.spans = Spans(ended=trace.add)
        self._start = time.monotonic()
        terminal = live_terminal()
        stack.callback(setup_logging(self.dir, terminal))
        self._began = began
        self._start_up = {"time/imports_s": (imports_s := time.time() - began)}
        self.saves = Saves(config, self.dir, self._start - imports_s)
        latest = self.saves.checkpoints.resume() if config.run.resume else None
        self._resumed_from, self._resumed = latest or (Path(), None)
        self.first_step = self._resumed.step if self._resumed else 0
        """Steps that an earlier execution of this run has finished."""
        resumed = self._resumed
        self.logged_step = resumed.step - (resumed.unlogged is not None) if resumed else -1
        """The last step that one has logged, with its validation. Without a checkpoint: -1."""
        self._totals = dict(self._resumed.totals) if self._resumed else {"wall_s": 0.0}
        self._step_values: dict[str, float] = {}
        self._step_metrics: Metrics = {}
        self._histograms: Mapping[str, Sequence[float]] = {}
        self._samples: Sequence[Mapping[str, Any]] = ()
        self._max_steps, self._last_step = 0, self.first_step
        self._facts: dict[str, Any] = {}
        self._stop = StopRequest()
        samples = isinstance(config, SamplingRunConfig)
        self._progress = Progress(
            terminal=terminal,
            columns=ROLLOUT_COLUMNS if samples else TRAINING_COLUMNS,
            headline=f"validation/{'reward' if samples else 'loss'}",
            first_step=self.first_step,
        )
        self._sinks = self._open_sinks()
        save_config(self.dir, config, continued=self._resumed is not None)
        if config.run.resume:
            from nemo_like.run.continued import note_start

            note_start(self.dir, self.first_step)

    def __enter__(self) -> Self:
        (self.dir / _SUMMARY).unlink(missing_ok=True)  # of an earlier execution
        self._exit.enter_context(self._progress)
        self._exit.push(lambda kind, *_: self._sinks.close(failed=kind is not None))
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._exit.callback(signal.signal, number, signal.getsignal(number))
            self._stop = listen()
            self._exit.callback(self._stop.when_done)
        self._stop.start(self.config.run.stop_grace_s)
        verb = f"Continuing after step {self.first_step} in" if self.first_step else "Run folder"
        logger.info("%s %s", verb, self.dir)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            words = ["nemo-like", self._name, f"{self.dir}/config.yaml"]
            words += as_typed({"run.dir": str(self.dir)})
            again = shlex.join(words if self.config.evaluates else [*words, "run.resume=true"])
            why, code = note_error(error, again)
            with suppress(OSError):  # the disk may be full
                self._write_summary(error=why, exit_code=code, next=again)
        self._exit.__exit__(kind, error, trace)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        with self.spans.span(name), self._progress.phase(name):
            yield

    @property
    def log_dir(self) -> str:
        return str(self.dir / "logs")

    def start_phase(self, name: str) -> AbstractContextManager[None]:
        """``span`` for start-up phases, which also says in the log that it began."""
        self._stop.obey_before_first_step()
        logger.info("Starting: %s", name.replace("_", " "))
        return self.span(name)

    def restore_position(self, loader: Loader) -> None:
        """Restore the position in the data from the latest checkpoint, if there is one."""
        if self._resumed is not None:
            loader.load_state(self._resumed.loader)

    def restore(self, models: Mapping[str, Model]) -> None:
        """Restore models from the latest checkpoint, if there is one."""
        if self._resumed is None:
            return
        saved = self._resumed.weight_versions
        if models.keys() != saved.keys():
            raise UserError(
                f"{self._resumed_from} holds {' and '.join(saved)}, and this run trains "
                f"{' and '.join(models)}; continue with the models that it began with."
            )
        for name, model in models.items():
            model.load(str(self._resumed_from / name), saved[name])

    def steps(
        self,
        max_steps: int,
        models: Mapping[str, Model],
        loader: Loader,
        validator: Validator | None,
        validate_every: int,
    ) -> Iterator[int]:
        """Numbers of the remaining steps, from 1; validates, logs and saves between them.

        The consumer's loop body is the step: it calls ``log`` once. ``validator`` None: never
        validates; else before the first step, each ``validate_every``, and after the last.

        After a signal to stop, the step in progress is the last one: it is saved, and StoppedError
        raised. A validation that it was due for is made when the run continues.
        """
        self._stop.obey_before_first_step()
        self._max_steps = self._progress.max_steps = max_steps
        if self.first_step >= max_steps:
            logger.warning("Step %d of %d is done; none is left.", self.first_step, max_steps)
        if self.first_step == 0 and validator is not None:
            self._finish_step(0, validator.validate(0))
            self._stop.obey_before_first_step()
        self._finish_resumed_step(validator)
        self._tell_start_up(self.first_step, values(self.spans.pop()))
        self._stop.within_steps()
        for step in range(self.first_step + 1, max_steps + 1):
            if why := self.callbacks.stop:
                logger.info("Ending after step %d of %d; %s", step - 1, max_steps, why)
                self._max_steps = step - 1
                return
            with self.spans.span("step"):
                yield step
            unlogged = self._measure(step, validator, validate_every)
            self._last_step = step
            ends = self._stop.came or self.callbacks.stop or step == max_steps
            if ends or self.saves.is_due(step):
                numbers = {} if unlogged is not None else self._step_values
                with self.span("checkpoint"):
                    self.saves.save(step, models, loader, numbers, self._totals_now(), unlogged)
                self._stop.obey(
                    f"after step {step} of {max_steps}, which is saved in {self.dir}; continue "
                    "with run.resume=true"
                )

    def rounds(self, count: int) -> Iterator[int]:
        """Numbers of the steps of a run that trains nothing, from 1; logs between them."""
        self._max_steps = self._progress.max_steps = count
        done = 0

        def where() -> str:
            return f"after {done} of {count} parts; it starts over when run again"

        self._stop.without_checkpoints(where)
        for step in range(1, count + 1):
            with self.spans.span("step"):
                yield step
            self._finish_step(step, self._step_metrics)
            done = step
            if step < count:
                self._stop.obey(where())

    def log(
        self, metrics: Metrics, histograms: Mapping[str, Sequence[float]] | None = None
    ) -> None:
        """Keep the metrics of the step in progress, to be logged with a validation's when its body
        has ended. A second call replaces the first.
        """
        self._step_metrics, self._histograms = metrics, histograms or {}

    def show(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Print completions of a validation, and keep them for the sinks; see ``Details``."""
        self._samples = samples
        log_samples(step, samples)

    def finish(self, **facts: Any) -> None:
        """Write ``summary.json``: the run's results, in numbers that it measured itself."""
        self._stop.when_done()
        note_end(self.dir)
        self._last_step = max(self.first_step, self._max_steps)
        summary = self._write_summary(**facts)
        logger.info("Summary: %s", json.dumps(summary))
        if "final" in summary:
            logger.info("The model is in %s. Next: %s", summary["final"], summary["next"])
        self.callbacks.tell("on_end", summary)

    def _write_summary(self, **facts: Any) -> dict[str, Any]:
        self._facts |= facts
        summary = {
            "steps": self._last_step,
            "wall_s": round(self._totals_now()["wall_s"], 1),
            **{name: value for name, value in self._totals.items() if name.startswith("val_")},
            **self._facts,
            "model": self.config.policy.model,
            "seed": self.config.run.seed,
        }
        (self.dir / _SUMMARY).write_text(json.dumps(summary, indent=2) + "\n")
        return summary

    def _measure(
        self, step: int, validator: Validator | None, validate_every: int
    ) -> dict[str, float] | None:
        """Log a step, validated if it is due; its numbers, unlogged, if a stop postpones that."""
        metrics = self._step_metrics
        self.callbacks.tell("on_step", step, with_rates(values(metrics | self.spans.read())))
        last = step == self._max_steps or self.callbacks.stop
        due = last or (validate_every > 0 and step % validate_every == 0)
        if validator is not None and due:
            try:
                if self._stop.came:
                    raise LeftError
                with self._stop.leaving():
                    metrics = metrics | validator.validate(step)
            except LeftError:
                return values(metrics | self.spans.pop())
        self._finish_step(step, metrics)
        return None

    def _finish_resumed_step(self, validator: Validator | None) -> None:
        if self._resumed is not None and self._resumed.unlogged is not None:
            found = validator.validate(self.first_step) if validator is not None else {}
            measured = values(found | self.spans.pop())
            self._log_step(self.first_step, self._resumed.unlogged | measured)

    def _finish_step(self, step: int, metrics: Metrics) -> None:
        self._tell_start_up(step, values(spans := self.spans.pop()))
        self._log_step(step, values(metrics | spans))

    def _log_step(self, step: int, numbers: dict[str, float]) -> None:
        numbers = with_rates(numbers)
        for short in _SUMMARIZED:
            if (value := numbers.get(f"validation/{short}")) is not None:
                self._totals.setdefault(f"val_{short}_start", value)
                self._totals[f"val_{short}_end"] = value
        for alarm in self.alarms.add({"step": step, **numbers}):
            numbers[f"alarm/{alarm.name}"] = 1.0
            logger.warning("Alarm at step %d: %s.", step, alarm.text)
        self._step_values, self._last_step = numbers, step
        details = Details(histograms=self._histograms, samples=self._samples)
        self._histograms, self._samples = {}, ()
        self._sinks.log(step, numbers, details)
        if any(name.startswith("validation/") for name in numbers):
            self.callbacks.tell("on_validation", step, dict(numbers))

    def _tell_start_up(self, step: int, spans: dict[str, float]) -> None:
        """Where the time from the command to the end of its first step went."""
        if step > self.first_step + 1:
            return
        for name, seconds in spans.items():
            if name != "time/step_s":  # It contains others.
                self._start_up[name] = self._start_up.get(name, 0.0) + seconds
        if step == self.first_step + 1:
            phases, total = seconds_by_phase(self._start_up), time.time() - self._began
            logger.info("Start to the end of the first step: %.1f s (%s)", total, phases)

    def _totals_now(self) -> dict[str, float]:
        return self._totals | {"wall_s": self._totals["wall_s"] + time.monotonic() - self._start}

    def _open_sinks(self) -> Sinks:
        sinks, self.alarms = open_sinks(self.dir, self.config, self.logged_step)
        return Sinks([*sinks, self._progress], self.logged_step if self.logged_step >= 0 else None)
