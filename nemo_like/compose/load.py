"""From the command line and YAML files to a checked configuration; errors name the key."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from hydra import compose, version
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from nemo_like.compose import registry
from nemo_like.compose.files import (
    check_choice,
    check_config_files,
    find_file,
    plain_file,
    schema_of,
)
from nemo_like.compose.overrides import accept_free_keys, check_overrides
from nemo_like.config.paths import check_files, readable
from nemo_like.config.run import RunConfig
from nemo_like.config.section import Section, check_sections, keys_of
from nemo_like.errors import UserError
from nemo_like.planning.placement import check_placement


def store_schema(schema: type[RunConfig], folders: Sequence[Path]) -> None:
    """Make the defaults of ``schema`` known to Hydra as the base of YAML files.

    An algorithm without a YAML file of its name in ``folders`` gets one that changes nothing.
    """
    name, node = registry.name_of(schema), schema().model_dump(mode="json")
    base = f"{name}{registry.SUFFIX}"
    ConfigStore.instance().store(name=base, node=node)
    ConfigStore.instance().repo.pop(f"{name}.yaml", None)  # Hydra takes it for the file's schema
    if find_file(folders, name) is None:
        ConfigStore.instance().store(name=name, node={"defaults": [base, "_self_"]})


@contextmanager
def explained(schema: type[RunConfig]) -> Iterator[None]:
    """Within, every error of Hydra and OmegaConf becomes one UserError."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        from nemo_like.compose.refusals import explain

        raise explain(error, schema) from error


@readable()
def check(config: RunConfig, *, files_are_here: bool = True, runs: bool = True) -> None:
    """Raise UserError for the first rule that ``config`` breaks; see ``Composed.load``."""
    check_sections(config, config.unused)
    check_placement(config)
    if files_are_here:
        check_files(config, runs=runs)


@dataclass(frozen=True)
class Composed:
    """What Hydra made of YAML files and overrides, not checked yet."""

    raw: DictConfig
    schema: type[RunConfig]

    def load(self, *, files_are_here: bool = True, runs: bool = True) -> Any:
        """The checked configuration; raises UserError.

        ``files_are_here`` is false for a run on other machines; ``runs`` where it is only planned,
        for which models need no tokenizer.
        """
        config = self.typed()
        check(config, files_are_here=files_are_here, runs=runs)
        return config

    def typed(self) -> Any:
        """``load`` without the rules that keys have together; raises UserError."""
        with explained(self.schema):
            values = OmegaConf.to_container(self.raw, resolve=True)
        written = OmegaConf.to_container(self.raw, resolve=False)
        return checked(self.schema, with_numbers(values, written, self.schema))


def check_algorithm(command: str, schema: type[RunConfig], own: type[RunConfig]) -> None:
    """``nemo-like sft`` cannot run a configuration of DPO; ``own``: what ``command`` runs."""
    if schema is not own:
        raise UserError(
            f"{command} cannot run this configuration, which is one of nemo-like "
            f"{registry.name_of(schema)}; use that, or another --config-name."
        )


def compose_config(config_dir: Path, config_name: str, overrides: Sequence[str] = ()) -> Any:
    """What ``examples/run_*.py`` would run with, for tests and other programs."""
    return compose_raw(config_dir, config_name, overrides).load()


@readable()
def compose_raw(
    config_dir: Path, config_name: str, overrides: Sequence[str], extra_dir: Path | None = None
) -> Composed:
    """Compose without running; every error of Hydra and OmegaConf becomes one clear UserError.

    ``extra_dir`` is searched after ``config_dir``, like Hydra's ``--config-dir``.
    """
    folders = [config_dir] + ([extra_dir] if extra_dir else [])
    check_config_files(folders, config_name)
    schema = schema_of(folders, config_name)
    store_schema(schema, folders)
    check_overrides(overrides, schema)
    if path := plain_file(folders, config_name):
        if preset := next((one for one in overrides if one.startswith("model=")), None):
            raise UserError(
                f"{preset} chooses a preset, which the file given does not use; leave it out, and "
                "set policy.model and the other keys that you want to change."
            )
        values: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        values["defaults"] = [f"{registry.name_of(schema)}{registry.SUFFIX}", "_self_"]
        config_name = "a_file_without_defaults"
        ConfigStore.instance().store(name=config_name, node=values)
    with explained(schema):
        with _hydra(folders):
            accepted = accept_free_keys(overrides, schema)
            raw = compose(config_name, accepted, return_hydra_config=True)
        for group, choice in raw.hydra.runtime.choices.items():
            check_choice(folders, f"{group}/{choice}", schema)
    with open_dict(raw):
        del raw["hydra"]
    return Composed(raw, schema)


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


def checked(schema: type[Section], values: Mapping[str, Any]) -> Any:
    """``values`` as the sections of ``schema``; UserError for the first that does not fit."""
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        from nemo_like.compose.refusals import first_refusal

        raise first_refusal(error, schema) from error


def with_numbers(found: Any, written: Any, schema: type[Section]) -> dict[str, Any]:
    """``found`` with numbers and booleans for the text that interpolations gave in their place.

    ``written`` is the same before they were resolved: ``${oc.env:STEPS}`` is always text.
    """
    kinds = dict(keys_of(schema))

    def converted(value: Any, before: Any, key: str) -> Any:
        if isinstance(value, dict) and isinstance(before, dict):
            return {
                name: converted(one, before[name], f"{key}.{name}".lstrip("."))
                for name, one in value.items()
            }
        if isinstance(value, list) and isinstance(before, list):
            pairs = zip(value, before, strict=True)
            return [converted(one, other, key) for one, other in pairs]
        if isinstance(value, str) and isinstance(before, str) and "${" in before and key in kinds:
            return _as(kinds[key].annotation, value)
        return value

    return converted(found, written, "")


def _as(kind: Any, text: str) -> Any:
    """``text`` as the first of bool, int and float that the type of a field has and that it is."""
    words = {"true": True, "false": False}
    named = [kind, *(inner for one in get_args(kind) for inner in (one, *get_args(one)))]
    if bool in named and text.lower() in words:
        return words[text.lower()]
    for number in (int, float):
        with contextlib.suppress(ValueError):
            if int in named or float in named:
                return number(text)
    return text
