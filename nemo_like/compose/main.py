"""The boundary between a command line and a run: composes, checks, and ends with one sentence."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import hydra
import psutil
from hydra._internal.utils import get_args_parser
from omegaconf import OmegaConf

from nemo_like.compose.files import find_file, is_name, located
from nemo_like.compose.load import (
    Composed,
    check_algorithm,
    compose_raw,
    explained,
    store_schema,
)
from nemo_like.compose.overrides import accept_free_keys, refuse_twice
from nemo_like.config.paths import readable
from nemo_like.config.run import Algorithm, RunConfig
from nemo_like.distributed.worker import keep_compiler_cache
from nemo_like.errors import StoppedError, UserError
from nemo_like.run.ending import end_early, end_on_error, handlers_restored, heed_ctrl_c, listen

# Hydra's own modes, which compose by themselves and run nothing of ours.
_HYDRA_FLAGS = ("--hydra-help", "--version", "--shell-completion", "-sc", "--info")


def run_command(algorithm: Algorithm, config_dir: Path, arguments: Sequence[str]) -> None:
    """Run ``algorithm`` with the configuration that ``arguments`` give.

    What Hydra users expect works: ``--config-name``, ``--cfg job``, ``--multirun``, ``--help``, tab
    completion. Every job is composed and checked before the first one starts.
    """
    keep_compiler_cache()
    with handlers_restored():
        listen()  # Run takes it over; until then SIGUSR1 and SIGTERM would end the process unheard.
        heed_ctrl_c()
        try:
            _run_jobs(algorithm, config_dir, arguments)
        except (StoppedError, KeyboardInterrupt) as told:  # between jobs, or before the first one
            end_early(told)


def _run_jobs(algorithm: Algorithm, config_dir: Path, arguments: Sequence[str]) -> None:
    flags = [argument.partition("=")[0] for argument in arguments]
    if any(flag in ("--help", "-h") for flag in flags):
        end_on_error(lambda: _help(algorithm, config_dir, arguments))
        return
    if any(flag in _HYDRA_FLAGS for flag in flags):
        _leave_to_hydra(algorithm, config_dir, arguments)
        return
    parsed = end_on_error(lambda: _parse(arguments, algorithm, config_dir))
    found = end_on_error(lambda: _composed(algorithm, config_dir, parsed))
    if parsed.cfg == "job" and not parsed.package:
        texts = [OmegaConf.to_yaml(one.raw, resolve=parsed.resolve) for one in found]
        sys.stdout.write("---\n".join(texts))
        return
    if parsed.cfg:
        _leave_to_hydra(algorithm, config_dir, arguments)
        return
    configs: list[RunConfig] = end_on_error(lambda: _checked(found))
    began: float | None = psutil.Process().create_time()
    for config in configs:
        end_on_error(lambda config=config, began=began: _run(algorithm, config, began), in_run=True)
        began = None


def _run(algorithm: Algorithm, config: RunConfig, began: float | None) -> None:
    from nemo_like.algorithms.session import launch  # imports Ray

    launch(algorithm, config, began)


def _leave_to_hydra(algorithm: Algorithm, config_dir: Path, arguments: Sequence[str]) -> None:
    """Help, completion, or the configuration itself: nothing runs."""
    folders = end_on_error(lambda: _folders(_parse(arguments, algorithm, config_dir), config_dir))
    store_schema(algorithm.config, folders)
    sys.argv[1:] = accept_free_keys(arguments, algorithm.config)
    folder = str(config_dir.resolve())
    decorate = hydra.main(version_base="1.3", config_path=folder, config_name=algorithm.name)
    decorate(lambda _: None)()


def _help(algorithm: Algorithm, config_dir: Path, arguments: Sequence[str]) -> None:
    from nemo_like.compose.help import show

    show(algorithm, [config_dir], arguments)


def _folders(parsed: argparse.Namespace, config_dir: Path) -> list[Path]:
    folders = [Path(parsed.config_path) if parsed.config_path else config_dir]
    return [*folders, *([Path(parsed.config_dir)] if parsed.config_dir else [])]


def _composed(algorithm: Algorithm, config_dir: Path, parsed: argparse.Namespace) -> list[Composed]:
    directory, *extra = _folders(parsed, config_dir)
    extra_dir = extra[0] if extra else None
    name = algorithm.name if parsed.config_name is None else parsed.config_name
    refuse_twice(parsed.overrides)
    if parsed.cfg in ("hydra", "all"):  # which show its own keys
        parsed.overrides = [one for one in parsed.overrides if not one.startswith("hydra.")]
    found, typed = [], [parsed.overrides]
    if parsed.multirun:
        from nemo_like.compose.sweep import jobs

        typed = jobs(directory, name, parsed.overrides, extra_dir)
    for job in typed:
        found.append(compose_raw(directory, name, job, extra_dir))
        check_algorithm(f"nemo-like {algorithm.name}", found[-1].schema, algorithm.config)
        if parsed.resolve:
            with explained(algorithm.config):
                OmegaConf.resolve(found[-1].raw)
    if parsed.multirun:
        from nemo_like.compose.sweep import new_folder, part_folders

        part_folders(found, typed, new_folder(algorithm.name))
    return found


def _checked(found: Sequence[Composed]) -> list[RunConfig]:
    configs = [composed.load() for composed in found]
    if len(configs) > 1:
        from nemo_like.compose.sweep import check_run_dirs

        check_run_dirs(configs)
    return configs


@readable()
def _parse(arguments: Sequence[str], algorithm: Algorithm, config_dir: Path) -> argparse.Namespace:
    """What Hydra's own parser makes of the command line; raises UserError instead of exiting.

    A path of a configuration becomes the folder and the name by which Hydra finds it.
    """
    parser = get_args_parser()
    parser.exit_on_error = parser.allow_abbrev = False
    parser.add_argument("--config", dest="files", action="append", default=[])
    try:
        parsed, unknown = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise UserError(f"{error}; --hydra-help lists the options.") from error
    for word in unknown:
        if word.startswith("-"):
            from nemo_like.compose.refusals import no_option

            raise no_option(word, algorithm.config)
    parsed.overrides += unknown  # words behind an option
    files = [one for one in parsed.overrides if one.endswith((".yaml", ".yml")) and is_name(one)]
    parsed.overrides = [one for one in parsed.overrides if one not in files]
    files += parsed.files
    name = parsed.config_name
    folders = _folders(parsed, config_dir)
    if name and (files or (find_file(folders, name) is None and Path(name).is_file())):
        files.append(name)
    if len(files) > 1:
        raise UserError(f"{' and '.join(files)} are more than one configuration; give one.")
    if files:
        folder, parsed.config_name = located(files[0], folders)
        if folder and parsed.config_dir:
            raise UserError(
                f"{files[0]} is not in --config-dir={parsed.config_dir}; leave one out."
            )
        parsed.config_dir = folder or parsed.config_dir
    return parsed
