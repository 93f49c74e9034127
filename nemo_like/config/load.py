"""From the command line and YAML files to checked dataclasses, with errors that name the key."""

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, version
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from nemo_like.config.checks import check
from nemo_like.config.config_files import (
    check_choice,
    check_config_files,
    schema_names,
    schema_of,
)
from nemo_like.config.keys import did_you_mean
from nemo_like.config.overrides import accept_free_keys, check_overrides
from nemo_like.config.run_schema import TrainingRunConfig
from nemo_like.config.schemas import SCHEMAS
from nemo_like.errors import UserError


def register(names: Iterable[str] = SCHEMAS) -> None:
    """Make schemas known to Hydra as the base of YAML files.

    Hydra copies all that it knows whenever it looks into a folder, so that few are faster.
    """
    store = ConfigStore.instance()
    for name in names:
        store.store(name=name, node=SCHEMAS[name])


def load(raw: DictConfig, *, files_are_here: bool = True, runs: bool = True) -> Any:
    """Plain dataclasses from what Hydra composed, checked; raises UserError.

    The type is that of the schema at the head of the YAML file's defaults. ``files_are_here`` and
    ``runs`` are as in ``checks.check``.
    """
    schema = OmegaConf.get_type(raw) or TrainingRunConfig
    try:
        config = OmegaConf.to_object(raw)
    except OmegaConfBaseException as error:
        raise explain(error, schema) from error
    assert isinstance(config, TrainingRunConfig)
    check(config, files_are_here=files_are_here, runs=runs)
    return config


def check_algorithm(script: str, config: TrainingRunConfig, schema: type) -> None:
    """``run_sft.py`` cannot run a configuration of DPO; ``schema``: what ``script`` runs."""
    if not isinstance(config, schema):
        other = next(name for name, kind in SCHEMAS.items() if kind is type(config))
        raise UserError(
            f"{script} cannot run this configuration, which is one of "
            f"run_{other.removesuffix('_schema')}.py; use that, or another --config-name."
        )


def compose_config(config_dir: Path, config_name: str, overrides: Sequence[str] = ()) -> Any:
    """What ``examples/run_*.py`` would run with, for tests and other programs."""
    return load(compose_raw(config_dir, config_name, overrides))


@dataclass(frozen=True, kw_only=True)
class Composed:
    """One job, as Hydra composed it."""

    raw: DictConfig
    """The configuration, without Hydra's own section."""
    settings: DictConfig
    """Hydra's own section."""
    loader: ConfigLoader
    """What found the files."""


def compose_raw(
    config_dir: Path, config_name: str, overrides: Sequence[str], extra_dir: Path | None = None
) -> DictConfig:
    """The configuration of ``compose_job``."""
    return compose_job(config_dir, config_name, overrides, extra_dir).raw


def compose_job(
    config_dir: Path, config_name: str, overrides: Sequence[str], extra_dir: Path | None = None
) -> Composed:
    """Compose without running; every error of Hydra and OmegaConf becomes one clear UserError.

    ``extra_dir`` is searched after ``config_dir``, like Hydra's ``--config-dir``.
    """
    folders = [config_dir] + ([extra_dir] if extra_dir else [])
    check_config_files(folders, config_name)
    register(schema_names(folders, config_name))
    schema = schema_of(folders, config_name)
    check_overrides(overrides, schema)
    try:
        with _hydra(folders) as loader:
            raw = compose(config_name, accept_free_keys(overrides), return_hydra_config=True)
        for group, choice in raw.hydra.runtime.choices.items():
            check_choice(folders, f"{group}/{choice}", schema)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise explain(error, schema) from error
    with open_dict(raw):
        settings = raw.pop("hydra")
    return Composed(raw=raw, settings=settings, loader=loader)


@contextmanager
def _hydra(folders: Sequence[Path]) -> Iterator[ConfigLoader]:
    """Hydra, searching ``folders`` in turn, as ``initialize_config_dir`` does with one."""
    search_path = create_config_search_path(str(folders[0].resolve()))
    for folder in folders[1:]:
        before = SearchPathQuery(provider="schema")
        search_path.prepend("command-line", f"file://{folder.resolve()}", anchor=before)
    GlobalHydra.instance().clear()
    version.setbase("1.3")
    name = Path(sys.argv[0]).stem or "nemo_like"
    made = Hydra.create_main_hydra2(task_name=name, config_search_path=search_path)
    try:
        yield made.config_loader
    finally:
        GlobalHydra.instance().clear()


def explain(error: Exception, schema: type[TrainingRunConfig]) -> UserError:
    """One sentence from an exception of Hydra or OmegaConf."""
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    lines = [line.strip() for line in str(cause).strip().splitlines()]
    if len(lines) > 1 and "raised while composing config" in lines[0]:
        lines = lines[1:]
    key = getattr(cause, "full_key", None) or _full_key(lines)
    text = lines[0].rstrip(".")
    if key and "not in" in text:
        return UserError(f"{key} is not a key of the configuration; {did_you_mean(key, schema)}")
    if wrong := re.match(r"Value '(.*)' of type '.*' could not be converted to (\w+)", text):
        return UserError(f"{key}={wrong[1]} must be a value of type {wrong[2].lower()}.")
    if wrong := re.match(r"Value '(.*)' is not a valid (\w+)", text):
        return UserError(f"{key}={wrong[1]} must be a value of type {wrong[2]}.")
    if enum := re.match(r"Invalid value '(.*)', expected one of \[(.*)\]", text):
        return UserError(f"{key}={enum[1]} must be one of {enum[2]}.")
    if group := re.match(r"In '.*': Could not find '(\w+)/(.*)'", text):
        first = next(i for i, line in enumerate(lines) if line.startswith("Available options")) + 1
        last = next(i for i, line in enumerate(lines) if line.startswith("Config search path"))
        choices = ", ".join(lines[first:last])
        return UserError(f"{group[1]}={group[2]} is not a choice; use one of {choices}.")
    if "Ambiguous value" in text:
        return UserError(f"{text}: a list of values needs --multirun (one run each), or brackets.")
    if empty := re.match(r"field '(.*)' is not Optional", text):
        return UserError(f"{empty[1]}=null: this key needs a value; leave it out for its default.")
    if key and "is not a ListConfig, list or tuple" in text:
        return UserError(f"{key} must be a list; put brackets around it: {key}=[...].")
    if "Cannot merge DictConfig with ListConfig" in text:
        return UserError(f"{key} must be a dictionary, {key}={{name: value}}, not a list.")
    if key and "is not a subclass" in text:
        return UserError(f"{key} is a section, not a value; set one of the keys in it.")
    if "HydraConfig was not set" in text:
        return UserError(f"{key}: ${{hydra:...}} is not known here; use keys, as in ${{run.seed}}.")
    if "to string: " in text:
        return UserError(f"{key} must be text, not a list or dictionary.")
    text = re.sub(r"^\w+ raised while resolving interpolation: ", "", text).strip('"')
    return UserError(f"{key}: {text}." if key and key not in text else f"{text}.")


def _full_key(lines: Sequence[str]) -> str | None:
    for line in lines:
        if line.startswith("full_key: "):
            return line.removeprefix("full_key: ")
    return None
