"""From the command line and YAML files to checked dataclasses, with errors that name the key."""

import dataclasses
import difflib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, version
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from nemo_like.config.checks import check
from nemo_like.config.run_schema import TrainingRunConfig
from nemo_like.config.schemas import SCHEMAS
from nemo_like.config.yaml_traps import check_yaml
from nemo_like.errors import UserError

_GROUPS = ("model",)
_FREE_DICTS = ("generation.engine_kwargs", "data.tasks")


def register() -> None:
    """Make the schemas known to Hydra as the base of every YAML file."""
    store = ConfigStore.instance()
    for name, schema in SCHEMAS.items():
        store.store(name=name, node=schema)


def load(raw: DictConfig, *, files_are_here: bool = True) -> Any:
    """Plain dataclasses from what Hydra composed, checked; raises UserError.

    The type is that of the schema at the head of the YAML file's defaults. ``files_are_here`` is
    as in ``checks.check``.
    """
    schema = OmegaConf.get_type(raw) or TrainingRunConfig
    try:
        config = OmegaConf.to_object(raw)
    except OmegaConfBaseException as error:
        raise explain(error, schema) from error
    assert isinstance(config, TrainingRunConfig)
    check(config, files_are_here=files_are_here)
    return config


def compose_config(config_dir: Path, config_name: str, overrides: Sequence[str] = ()) -> Any:
    """What ``examples/run_*.py`` would run with, for tests and other programs."""
    return load(compose_raw(config_dir, config_name, overrides))


def compose_raw(
    config_dir: Path, config_name: str, overrides: Sequence[str], extra_dir: Path | None = None
) -> DictConfig:
    """Compose without running; every error of Hydra and OmegaConf becomes one clear UserError.

    ``extra_dir`` is searched after ``config_dir``, like Hydra's ``--config-dir``.
    """
    register()
    folders = [config_dir] + ([extra_dir] if extra_dir else [])
    schema = schema_of(folders, config_name)
    check_overrides(overrides, schema)
    try:
        _check_yaml_file(folders, config_name)
        with _hydra(folders):
            raw = compose(config_name, accept_free_keys(overrides), return_hydra_config=True)
        for group, choice in raw.hydra.runtime.choices.items():
            _check_yaml_file(folders, f"{group}/{choice}")
    except (HydraException, OmegaConfBaseException) as error:
        raise explain(error, schema) from error
    with open_dict(raw):
        del raw["hydra"]
    return raw


def schema_of(folders: Sequence[Path], config_name: str) -> type[TrainingRunConfig]:
    """The schema that a YAML file's ``defaults`` name; that of GRPO if none can be read there."""
    path = _find_yaml(folders, config_name)
    for name in _defaults_of(path):
        if name in SCHEMAS:
            return SCHEMAS[name]
        if _find_yaml(folders, name) not in (None, path):
            return schema_of(folders, name)
    return SCHEMAS["grpo_schema"]


def _defaults_of(path: Path | None) -> Iterator[str]:
    """What a YAML file's ``defaults`` name, choices of groups left out."""
    found = yaml.safe_load(path.read_text(encoding="utf-8")) if path is not None else None
    names = found.get("defaults", ()) if isinstance(found, dict) else ()
    yield from (one.removeprefix("/") for one in names or () if isinstance(one, str))


@contextmanager
def _hydra(folders: Sequence[Path]) -> Iterator[None]:
    """Hydra, searching ``folders`` in turn, as ``initialize_config_dir`` does with one."""
    search_path = create_config_search_path(str(folders[0].resolve()))
    for folder in folders[1:]:
        before = SearchPathQuery(provider="schema")
        search_path.prepend("command-line", f"file://{folder.resolve()}", anchor=before)
    GlobalHydra.instance().clear()
    version.setbase("1.3")
    Hydra.create_main_hydra2(task_name="nemo_like", config_search_path=search_path)
    try:
        yield
    finally:
        GlobalHydra.instance().clear()


def check_overrides(overrides: Sequence[str], schema: type[TrainingRunConfig]) -> None:
    """Refuse a key that does not exist before Hydra does, and say which one is nearest."""
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        raise explain(error, schema) from error
    known = set(all_keys(schema))
    for override in parsed:
        key = override.key_or_group
        if key.startswith(("hydra", *_FREE_DICTS)) or key in _GROUPS or key in known:
            continue
        raise UserError(f"{key} is not a key of the configuration; {_did_you_mean(key, schema)}")


def all_keys(schema: type) -> Iterator[str]:
    """Every dotted key of a schema, sections included.

    >>> "policy.optimizer.lr" in set(all_keys(SCHEMAS["grpo_schema"]))
    True
    """
    for field in dataclasses.fields(schema):
        yield field.name
        if dataclasses.is_dataclass(field.type):
            assert isinstance(field.type, type)
            for key in all_keys(field.type):
                yield f"{field.name}.{key}"


def explain(error: Exception, schema: type[TrainingRunConfig]) -> UserError:
    """One sentence from an exception of Hydra or OmegaConf."""
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    lines = [line.strip() for line in str(cause).strip().splitlines()]
    if len(lines) > 1 and "raised while composing config" in lines[0]:
        lines = lines[1:]
    key = getattr(cause, "full_key", None) or _full_key(lines)
    text = lines[0].rstrip(".")
    if key and "not in" in text:
        return UserError(f"{key} is not a key of the configuration; {_did_you_mean(key, schema)}")
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
    if missing := re.match(r"Cannot find primary config '(.*?)'", text):
        return UserError(f"--config-name={missing[1]}: there is no {missing[1]}.yaml.")
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
    return UserError(f"{key}: {text}." if key and key not in text else f"{text}.")


def _did_you_mean(key: str, schema: type[TrainingRunConfig]) -> str:
    """The nearest key; one with the same last part wins over one that only looks alike."""
    keys = list(all_keys(schema))
    leaf = key.rpartition(".")[2]
    same_leaf = [other for other in keys if other.rpartition(".")[2] == leaf]
    pool = same_leaf if "." in key and same_leaf else keys
    nearest = difflib.get_close_matches(key, pool, n=1, cutoff=0.0)
    if not same_leaf and "." not in key:  # a bare word: compare it with the last parts
        leaves = {other.rpartition(".")[2]: other for other in reversed(keys)}
        close = difflib.get_close_matches(key, leaves, n=1)
        nearest = [leaves[one] for one in close] or nearest
    elif "." not in key and same_leaf:
        nearest = same_leaf[:1]
    return f"did you mean {nearest[0]}? (--help lists all keys)"


def accept_free_keys(overrides: Sequence[str]) -> list[str]:
    """Let dictionaries that take any key be set like all others, without Hydra's ``+``.

    >>> accept_free_keys(["data.tasks.gcd={}", "run.seed=1"])
    ['++data.tasks.gcd={}', 'run.seed=1']
    """
    return [f"++{one}" if one.startswith(_FREE_DICTS) else one for one in overrides]


def _full_key(lines: Sequence[str]) -> str | None:
    for line in lines:
        if line.startswith("full_key: "):
            return line.removeprefix("full_key: ")
    return None


def _check_yaml_file(folders: Sequence[Path], name: str) -> None:
    """Check the file that ``name`` stands for, unless it is one of Hydra's own, and its bases."""
    path = _find_yaml(folders, name)
    if path is not None:
        check_yaml(path)
    for base in _defaults_of(path):
        if _find_yaml(folders, base) not in (None, path):
            _check_yaml_file(folders, base)


def _find_yaml(folders: Sequence[Path], name: str) -> Path | None:
    paths = (folder / f"{name.removesuffix('.yaml')}.yaml" for folder in folders)
    return next((path for path in paths if path.is_file()), None)
