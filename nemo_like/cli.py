"""The boundary between a command line and a run: composes, checks, and ends with one sentence."""

import errno
import functools
import logging
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from nemo_like.config.load import (
    accept_free_keys,
    check_overrides,
    compose_raw,
    load,
    register,
    schema_of,
)
from nemo_like.errors import RunError, StoppedError, UserError, WaitTimeoutError

logger = logging.getLogger(__name__)

EXIT_USER_ERROR = 2
EXIT_RUN_ERROR = 1
EXIT_INTERRUPTED = 130
EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: try again later

# Hydra's own modes, which compose by themselves and run nothing of ours.
_HYDRA_FLAGS = ("--help", "-h", "--hydra-help", "--version", "--shell-completion", "-sc", "--info")


def main(config_name: str, run: Callable[[Any], None], config_dir: Path) -> None:
    """Run ``run`` with the configuration that the command line gives, through ``hydra.main``.

    Everything that Hydra users expect works (``--config-name``, ``--cfg job``, ``--multirun``,
    ``--help``, tab completion). Each job's configuration is composed and checked once before the
    first one starts, so that a typing error costs no run and prints one sentence.
    """
    register()
    sys.argv[1:] = arguments = accept_free_keys(sys.argv[1:])
    if not any(argument.partition("=")[0] in _HYDRA_FLAGS for argument in arguments):
        end_on_error(lambda: _preflight(config_name, config_dir, arguments))

    @functools.wraps(run)
    def task(raw: DictConfig) -> None:
        end_on_error(lambda: run(load(raw)))

    hydra.main(version_base="1.3", config_path=str(config_dir.resolve()), config_name=config_name)(
        task
    )()


def end_on_error(action: Callable[[], None]) -> None:
    """Carry out ``action``; failures with an explanation end the process without a traceback."""
    previous = signal.signal(signal.SIGTERM, _raise_interrupt)
    try:
        action()
    except (UserError, RunError, WaitTimeoutError) as error:
        logger.debug("The run ended here:", exc_info=True)
        sys.stderr.write(f"Error: {error}\n")
        sys.exit(EXIT_USER_ERROR if isinstance(error, UserError) else EXIT_RUN_ERROR)
    except StoppedError as stopped:
        sys.stderr.write(f"{stopped}\n")
        sys.exit(EXIT_STOPPED)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        sys.stderr.write(f"Error: {error}; make room, then continue with run.resume=true.\n")
        sys.exit(EXIT_RUN_ERROR)
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted; workers are ended, finished checkpoints are kept.\n")
        sys.exit(EXIT_INTERRUPTED)
    finally:
        signal.signal(signal.SIGTERM, previous)


def _raise_interrupt(signum: int, frame: FrameType | None) -> None:
    """Schedulers end a job with SIGTERM: leave through the same clean-up as Ctrl-C."""
    raise KeyboardInterrupt


def _preflight(config_name: str, config_dir: Path, arguments: list[str]) -> None:
    """Compose and check what each job would run with."""
    parsed = get_args_parser().parse_args(arguments)  # Hydra's own
    overrides = list(parsed.overrides)
    directory = Path(parsed.config_path) if parsed.config_path else config_dir
    extra_dir = Path(parsed.config_dir) if parsed.config_dir else None
    name = parsed.config_name or config_name
    for job in jobs(directory, name, overrides, extra_dir, multirun=parsed.multirun):
        raw = compose_raw(directory, name, job, extra_dir)
        if parsed.cfg is None:
            load(raw)


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
    check_overrides(overrides, schema_of(folders, config_name))
    if not multirun:
        return [overrides]
    parsed = OverridesParser.create().parse_overrides(overrides)
    batches = BasicSweeper.split_arguments(parsed, max_batch_size=None)
    return [list(job) for batch in batches for job in batch]
