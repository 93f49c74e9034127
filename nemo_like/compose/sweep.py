"""``--multirun``: the overrides of each job, and a folder of its own that is named after them."""

import hashlib
import itertools
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf

from nemo_like.compose.files import check_config_files, schema_of
from nemo_like.compose.load import Composed
from nemo_like.compose.overrides import check_overrides
from nemo_like.config.run import RunConfig
from nemo_like.config.typed import as_typed
from nemo_like.errors import UserError

_MOST_LETTERS = 150


def jobs(
    config_dir: Path, config_name: str, overrides: list[str], extra_dir: Path | None
) -> list[list[str]]:
    """The overrides of each job, as Hydra's basic sweeper will make them.

    Raises UserError for keys that do not exist.
    """
    folders = [config_dir] + ([extra_dir] if extra_dir else [])
    check_config_files(folders, config_name)
    schema = schema_of(folders, config_name)
    check_overrides(overrides, schema)
    parsed = OverridesParser.create().parse_overrides(overrides)
    try:
        batches = BasicSweeper.split_arguments(parsed, max_batch_size=None)
    except HydraException as error:  # what Hydra can only expand while it runs
        raise UserError(
            f"--multirun cannot expand glob(...) ({error}); list the values, a,b,c."
        ) from error
    return [list(job) for batch in batches for job in batch]


def part_folders(
    found: Sequence[Composed], typed: Sequence[list[str]], folder: str | None
) -> list[list[str]]:
    """Give each job a folder of its own in ``run.dir`` where that is the same for all.

    Without ``run.dir`` it is in ``folder``; None leaves it out. Returns ``typed`` with the folders.
    """
    if any(one.raw.run is None for one in found):  # a YAML file's, which is refused when it loads
        return list(typed)
    given = [
        OmegaConf.select(one.raw, "run.dir", throw_on_resolution_failure=False) for one in found
    ]
    base = given[0] or (None if found[0].raw.run.resume else folder)
    if len(found) == 1 or base is None or given.count(given[0]) < len(given):
        return list(typed)
    parted = []
    for one, job, name in zip(found, typed, _names(typed), strict=True):
        one.raw.run.dir = f"{base}/{name}"
        others = [word for word in job if word.partition("=")[0] != "run.dir"]
        parted.append([*others, *as_typed({"run.dir": one.raw.run.dir})])
    return parted


def new_folder(algorithm: str) -> str:
    """A folder for a sweep without ``run.dir``, which does not exist yet."""
    stem = f"runs/{algorithm}-{datetime.now():%Y%m%d-%H%M%S}"
    names = itertools.chain([stem], (f"{stem}-{i}" for i in itertools.count(2)))
    return next(name for name in names if not Path(name).exists())


def _names(typed: Sequence[list[str]]) -> list[str]:
    """``seed=0,lr=1e-4``: the overrides in which the jobs differ."""
    rows = [{key: value for key, _, value in (one.partition("=") for one in job)} for job in typed]
    keys = [key for key in rows[0] if len({row[key] for row in rows}) > 1]
    leaves = [key.rpartition(".")[2] for key in keys]
    short = [
        leaf if leaves.count(leaf) == 1 else key for leaf, key in zip(leaves, keys, strict=True)
    ]
    names = [
        ",".join(f"{one}={row[key]}" for one, key in zip(short, keys, strict=True)) for row in rows
    ]
    if len(set(names)) < len(names):
        names = [f"{name},job={i}".lstrip(",") for i, name in enumerate(names)]
    return [_as_file(name) for name in names]


def _as_file(name: str) -> str:
    """``name`` without letters that file systems or shells take for something else."""
    plain = re.sub(r"[^\w.+=,-]", "_", name)
    if len(plain) > _MOST_LETTERS:
        plain = f"{plain[:_MOST_LETTERS]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return plain


def check_run_dirs(configs: Sequence[RunConfig]) -> None:
    """The jobs of a sweep must not share a folder; raises UserError."""
    folders = [config.run.dir for config in configs if config.run.dir is not None]
    for folder in folders:
        if folders.count(folder) > 1:
            raise UserError(
                f"run.dir={folder} would be written by several jobs; leave it out, or put what "
                "differs into it: run.dir='runs/seed_${run.seed}'."
            )
