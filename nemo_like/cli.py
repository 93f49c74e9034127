"""The boundary between a command line and a run: composes, checks, and ends with one sentence."""

from nemo_like import early

# isort: split

import argparse
import atexit
import errno
import functools
import logging
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

import hydra
from hydra._internal.callbacks import Callbacks
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser, run_and_report
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import run_job
from hydra.errors import HydraException
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from nemo_like.algorithms.stop_request import SIGNALS, StopRequest, listen
from nemo_like.config.config_files import check_config_files, schema_names, schema_of
from nemo_like.config.load import (
    Composed,
    check_algorithm,
    compose_job,
    explain,
    load,
    register,
)
from nemo_like.config.overrides import accept_free_keys, check_overrides
from nemo_like.config.run_schema import TrainingRunConfig
from nemo_like.config.schemas import SCHEMAS
from nemo_like.distributed.compiler_cache import keep_compiler_cache
from nemo_like.errors import (
    RunError,
    StoppedError,
    UserError,
    WaitTimeoutError,
    exit_code,
)

early.is_over()

logger = logging.getLogger(__name__)

T = TypeVar("T")

# A file system that has no room, may not be written or is broken.
_DISK_REFUSES = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)

_HANDLED = (signal.SIGINT, signal.SIGHUP, *SIGNALS)

# Options by which Hydra may read files that are based on any schema.
_OTHER_FILES = ("--config", "-c", "-sc", "--shell-completion", "--experimental-rerun")
# Hydra's own modes, which compose by themselves and run nothing of ours.
_HYDRA_FLAGS = ("--help", "-h", "--hydra-help", "--version", "--shell-completion", "-sc", "--info")


def main(config_name: str, run: Callable[[Any], None], config_dir: Path) -> None:
    """Run ``run`` with the configuration that the command line gives, through ``hydra.main``.

    Everything that Hydra users expect works (``--config-name``, ``--cfg job``, ``--multirun``,
    ``--help``, tab completion). Each job's configuration is composed and checked before the first
    one starts, so that a typing error costs no run and prints one sentence. A single job then runs
    with what was checked; those of a sweep are composed again by Hydra's sweeper.
    """
    keep_compiler_cache()
    with _handlers():
        listen()  # Run takes it over; until then SIGUSR1 and SIGTERM would end the process unheard.
        try:
            _main(config_name, run, config_dir)
        except (StoppedError, KeyboardInterrupt) as told:  # between jobs, or before the first one
            _end_early(told)


def _main(config_name: str, run: Callable[[Any], None], config_dir: Path) -> None:
    sys.argv[1:] = arguments = accept_free_keys(sys.argv[1:])
    if not any(argument.partition("=")[0] in _HYDRA_FLAGS for argument in arguments):
        job = end_on_error(lambda: _preflight(config_name, config_dir, arguments))
        if job is not None:
            run_and_report(lambda: _run(job, run))
            return

    other = any(one.startswith(_OTHER_FILES) for one in arguments)
    register(SCHEMAS if other else schema_names([config_dir], config_name))

    @functools.wraps(run)
    def task(raw: DictConfig) -> None:
        end_on_error(lambda: run(load(raw)))

    hydra.main(version_base="1.3", config_path=str(config_dir.resolve()), config_name=config_name)(
        task
    )()


@dataclass(frozen=True, kw_only=True)
class _Job:
    """A single run that was composed and checked."""

    name: str
    """Of its configuration."""
    composed: Composed
    config: TrainingRunConfig


def _run(job: _Job, run: Callable[[Any], None]) -> None:
    """Run a job in Hydra's frame, as ``hydra.main`` would, without composing it again."""
    raw, settings = job.composed.raw, job.composed.settings
    settings.mode = RunMode.RUN
    with open_dict(raw):
        raw["hydra"] = settings
    callbacks = Callbacks(raw)
    callbacks.on_run_start(config=raw, config_name=job.name)
    done = run_job(
        task_function=lambda _: end_on_error(lambda: run(job.config)),
        config=raw,
        job_dir_key="hydra.run.dir",
        job_subdir_key=None,
        hydra_context=HydraContext(config_loader=job.composed.loader, callbacks=callbacks),
    )
    callbacks.on_run_end(config=raw, config_name=job.name, job_return=done)
    _ = done.return_value  # raises what the job raised


def end_on_error(action: Callable[[], T]) -> T:
    """Carry out ``action``; failures with an explanation end the process without a traceback."""
    with _handlers():
        for number in (signal.SIGTERM, signal.SIGHUP):
            handler = signal.getsignal(number)
            if handler is not signal.SIG_IGN and not isinstance(handler, StopRequest):  # nohup; run
                signal.signal(number, _raise_interrupt)
        try:
            return action()
        except SystemExit:
            raise
        except BaseException as error:
            if (told := _told_to_end(error)) is not None:
                _end_early(told)
            if (sentence := _sentence(error)) is None:
                raise
            logger.debug("The run ended here:", exc_info=True)
            sys.stderr.write(f"Error: {sentence}\n")
            sys.exit(exit_code(error))


def _sentence(error: BaseException) -> str | None:
    """What ends a run without a traceback, in words."""
    if isinstance(error, (UserError, RunError, WaitTimeoutError)):
        return str(error)
    if isinstance(error, OSError) and error.errno in _DISK_REFUSES:
        return (
            f"{error.filename or 'a file'} cannot be written: {error.strerror}; make room "
            "or repair the file system, then continue with run.resume=true."
        )
    return None


def _told_to_end(error: BaseException) -> BaseException | None:
    """The interrupt that ``error`` is, or hides.

    Calls in C wrap what a signal's handler raises in them, and what is cut short may fail itself.
    """
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, (StoppedError, KeyboardInterrupt)):
        seen = seen.__cause__ or seen.__context__
    return seen


def _end_early(told: BaseException) -> NoReturn:
    _ignore_signals()
    interrupted = "Interrupted; workers are ended, finished checkpoints are kept."
    sys.stderr.write(f"{told if isinstance(told, StoppedError) else interrupted}\n")
    sys.exit(exit_code(told))


@contextmanager
def _handlers() -> Iterator[None]:
    """Handlers of signals are what they were afterwards, as the process may go on, or it exits.

    Its exit ignores signals: the next one would end the end of Ray half-way, or change the code.
    """
    before = {number: signal.getsignal(number) for number in _HANDLED}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # else it is none of Python's
                signal.signal(number, handler)
        atexit.unregister(_ignore_signals)
        atexit.register(_ignore_signals)  # the last one is called first


def _ignore_signals() -> None:
    for number in _HANDLED:
        signal.signal(number, signal.SIG_IGN)


def _raise_interrupt(signum: int, frame: FrameType | None) -> None:
    """A closed terminal sends SIGHUP, and where there is no run SIGTERM is like Ctrl-C, too."""
    raise KeyboardInterrupt


def _preflight(config_name: str, config_dir: Path, arguments: list[str]) -> _Job | None:
    """Compose and check what each job would run with; the one job, if Hydra has no more to do."""
    parsed = _parse(arguments)
    directory = Path(parsed.config_path) if parsed.config_path else config_dir
    extra_dir = Path(parsed.config_dir) if parsed.config_dir else None
    name = config_name if parsed.config_name is None else parsed.config_name
    own, checked = schema_of([config_dir], config_name), []
    for job in jobs(directory, name, parsed.overrides, extra_dir, multirun=parsed.multirun):
        composed = compose_job(directory, name, job, extra_dir)
        if parsed.cfg is None:
            checked.append(_Job(name=name, composed=composed, config=load(composed.raw)))
            check_algorithm(sys.argv[0], checked[-1].config, own)
        elif parsed.resolve:
            try:
                OmegaConf.resolve(composed.raw)
            except OmegaConfBaseException as error:
                raise explain(error, own) from error
    check_run_dirs([job.config for job in checked])
    asks_more = parsed.multirun or parsed.resolve or parsed.package or parsed.experimental_rerun
    if len(checked) != 1 or asks_more or checked[0].composed.settings.mode is not None:
        return None
    return checked[0]


def _parse(arguments: list[str]) -> argparse.Namespace:
    """What Hydra's own parser makes of the command line; raises UserError instead of exiting."""
    parser = get_args_parser()
    parser.exit_on_error = False
    try:
        parsed, unknown = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise UserError(f"{error}; --hydra-help lists the options.") from error
    if unknown:
        raise UserError(
            f"{unknown[0]} is not an option; keys are given without dashes, key=value, and "
            "--hydra-help lists the options."
        )
    return parsed


def check_run_dirs(configs: Sequence[TrainingRunConfig]) -> None:
    """The jobs of a sweep must not share a folder; raises UserError."""
    folders = [config.run.dir for config in configs if config.run.dir is not None]
    for folder in folders:
        if folders.count(folder) > 1:
            raise UserError(
                f"run.dir={folder} would be written by several jobs; leave it out, or put what "
                "differs into it: run.dir='runs/seed_${run.seed}'."
            )


def jobs(
    config_dir: Path,
    config_name: str,
    overrides: list[str],
    extra_dir: Path | None,
    *,
    multirun: bool,
) -> list[list[str]]:
    """The overrides of each job; those of ``--multirun`` as Hydra's basic sweeper will make them.

    Raises UserError for keys that do not exist.
    """
    folders = [config_dir] + ([extra_dir] if extra_dir else [])
    check_config_files(folders, config_name)
    schema = schema_of(folders, config_name)
    check_overrides(overrides, schema)
    if not multirun:
        return [overrides]
    parsed = OverridesParser.create().parse_overrides(overrides)
    try:
        batches = BasicSweeper.split_arguments(parsed, max_batch_size=None)
    except HydraException as error:  # what Hydra can only expand while it runs
        raise UserError(
            f"--multirun cannot expand glob(...) ({error}); list the values, a,b,c."
        ) from error
    return [list(job) for batch in batches for job in batch]
