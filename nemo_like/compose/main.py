"""The boundary between a command line and a run: composes, checks, and ends with one sentence."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import hydra
import psutil
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_like.compose.files import check_config_files, schema_of
from nemo_like.compose.load import Composed, check_algorithm, compose_raw, explain, store_schema
from nemo_like.compose.overrides import accept_free_keys, check_overrides
from nemo_like.config.algorithm import Algorithm
from nemo_like.config.run import RunConfig
from nemo_like.distributed.worker import keep_compiler_cache
from nemo_like.errors import StoppedError, UserError
from nemo_like.run.ending import end_early, end_on_error, handlers_restored, listen

# Hydra's own modes, which compose by themselves and run nothing of ours.
_HYDRA_FLAGS = ("--help", "-h", "--hydra-help", "--version", "--shell-completion", "-sc", "--info")


def run_command(algorithm: Algorithm, config_dir: Path, arguments: Sequence[str]) -> None:
    """Run ``algorithm`` with the configuration that ``arguments`` give.

    What Hydra users expect works: ``--config-name``, ``--cfg job``, ``--multirun`` (one job after
    another), ``--help``, tab completion. Every job is composed and checked before the first one
    starts: a typo costs no run and prints one sentence.
    """
    keep_compiler_cache()
    with handlers_restored():
        listen()  # Run takes it over; until then SIGUSR1 and SIGTERM would end the process unheard.
        try:
            _run_jobs(algorithm, config_dir, arguments)
        except (StoppedError, KeyboardInterrupt) as told:  # between jobs, or before the first one
            end_early(told)


def _run_jobs(algorithm: Algorithm, config_dir: Path, arguments: Sequence[str]) -> None:
    if any(argument.partition("=")[0] in _HYDRA_FLAGS for argument in arguments):
        _leave_to_hydra(algorithm, config_dir, arguments)
        return
    found = end_on_error(lambda: _composed(algorithm, config_dir, arguments))
    if any(argument.partition("=")[0] in ("--cfg", "-c") for argument in arguments):
        _leave_to_hydra(algorithm, config_dir, arguments)
        return
    configs: list[RunConfig] = end_on_error(lambda: _checked(found))
    began: float | None = psutil.Process().create_time()
    for config in configs:
        end_on_error(lambda config=config, began=began: _run(algorithm, config, began))
        began = None


def _run(algorithm: Algorithm, config: RunConfig, began: float | None) -> None:
    from nemo_like.algorithms.session import launch  # imports Ray

    launch(algorithm, config, began)


def _leave_to_hydra(algorithm: Algorithm, config_dir: Path, arguments: Sequence[str]) -> None:
    """Help, completion, or the configuration itself: nothing runs."""
    extra_dir = end_on_error(lambda: _parse(arguments)).config_dir
    folders = [config_dir, *([Path(extra_dir)] if extra_dir else [])]
    store_schema(algorithm.config, folders)
    sys.argv[1:] = accept_free_keys(arguments, algorithm.config)
    folder = str(config_dir.resolve())
    decorate = hydra.main(version_base="1.3", config_path=folder, config_name=algorithm.name)
    decorate(lambda _: None)()


def _composed(algorithm: Algorithm, config_dir: Path, arguments: Sequence[str]) -> list[Composed]:
    """What Hydra makes of each job."""
    parsed = _parse(arguments)
    directory = Path(parsed.config_path) if parsed.config_path else config_dir
    extra_dir = Path(parsed.config_dir) if parsed.config_dir else None
    name = algorithm.name if parsed.config_name is None else parsed.config_name
    found = []
    for job in jobs(directory, name, parsed.overrides, extra_dir, multirun=parsed.multirun):
        found.append(compose_raw(directory, name, job, extra_dir))
        check_algorithm(sys.argv[0], found[-1].schema, algorithm.config)
        if parsed.resolve:
            try:
                OmegaConf.resolve(found[-1].raw)
            except OmegaConfBaseException as error:
                raise explain(error, algorithm.config) from error
    return found


def _checked(found: Sequence[Composed]) -> list[RunConfig]:
    configs = [composed.load() for composed in found]
    check_run_dirs(configs)
    return configs


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
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


def check_run_dirs(configs: Sequence[RunConfig]) -> None:
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
