"""The YAML files that a configuration is made of: where they are, and what they are based on."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_like.compose import registry
from nemo_like.compose.yaml_traps import check_yaml, read_yaml
from nemo_like.config.run import RunConfig
from nemo_like.config.section import keys_of
from nemo_like.errors import UserError

_PACKAGED = Path(__file__).parent.parent / "recipes"
SHIPPED = _PACKAGED if _PACKAGED.is_dir() else Path(__file__).parents[2] / "configs"
"""Folder of the YAML files that come with the project: of the wheel, or of the checkout."""


def check_config_files(folders: Sequence[Path], name: str) -> None:
    """Check the file that ``name`` stands for and those it is based on; raises UserError.

    ``folders`` are searched in turn: that of the shipped files or of --config-path, then that of
    --config-dir.
    """
    for option, folder in zip(("--config-path", "--config-dir"), folders, strict=False):
        if not folder.is_dir():
            raise UserError(f"{option}={folder} is not a folder; give one with YAML files.")
    if (
        find_file(folders, name) is None
        and name.removesuffix(registry.SUFFIX) not in registry.names()
    ):
        raise _no_such_file(folders, name, f"--config-name={name}")
    chain = list(_bases(folders, name, ()))
    if not any(registry.of_schema(one) for one in (name, *chain)):
        for base in chain:
            if find_file(folders, base) is None:
                raise _no_such_file(
                    folders, base, f"{find_file(folders, name)}: its defaults name {base}"
                )
        raise UserError(
            f"--config-name={name} is not the configuration of a run; begin its defaults with the "
            f"one that it changes: {', '.join(registry.names())}."
        )
    kinds = dict(keys_of(schema_of(folders, name)))
    for one in (name, *chain):
        if path := find_file(folders, one):
            check_yaml(path, kinds)


def check_choice(folders: Sequence[Path], choice: str, schema: type[RunConfig]) -> None:
    """Check the file of a group's choice, ``group/name``, unless it is one of Hydra's own."""
    if path := find_file(folders, choice):
        check_yaml(path, dict(keys_of(schema)))


def schema_of(folders: Sequence[Path], config_name: str) -> type[RunConfig]:
    """The schema that a YAML file's ``defaults`` name; that of GRPO if none can be read there."""
    names = (config_name, *_bases(folders, config_name, ()))
    found = next((one for name in names if (one := registry.of_schema(name))), None)
    return (found or registry.find("grpo")).config


def _bases(folders: Sequence[Path], name: str, below: tuple[str, ...]) -> Iterator[str]:
    """Names that ``name`` is based on, near ones first; ``below``: those that led to it."""
    path = find_file(folders, name)
    if path is None:
        if name in registry.names():
            yield f"{name}{registry.SUFFIX}"
        return
    if name in below:
        raise UserError(f"{path}: its defaults lead back to itself; base it on another file.")
    found = read_yaml(path)
    if algorithm := _of_whole_file(found):
        yield f"{algorithm}{registry.SUFFIX}"
    entries = found.get("defaults", ()) if isinstance(found, dict) else ()
    group = name.rpartition("/")[0]
    for entry in entries if isinstance(entries, list) else ():
        base = entry if isinstance(entry, str) else ""
        if isinstance(entry, dict):  # {group: choice}
            base = next((f"{one}/{choice}" for one, choice in entry.items() if choice), "")
        if base.startswith(("override ", "optional ")) or base in ("", "_self_"):
            continue
        base = base.removeprefix("/") if base.startswith("/") or not group else f"{group}/{base}"
        yield base
        yield from _bases(folders, base, (*below, name))


def plain_file(folders: Sequence[Path], name: str) -> Path | None:
    """The file of ``name`` if it has no ``defaults``, but an algorithm's own section: it is taken
    to state differences from the schema, as does the ``config.yaml`` that a run leaves."""
    path = find_file(folders, name)
    return path if path and _of_whole_file(read_yaml(path)) else None


def _of_whole_file(found: Any) -> str | None:
    """The algorithm whose sections, its own among them, are all that a file has."""
    if not isinstance(found, Mapping):
        return None
    for name in registry.names():
        schema = registry.find(name).config
        if schema.section in found and found.keys() <= schema.model_fields.keys():
            return name
    return None


def located(file: str, folders: Sequence[Path]) -> tuple[Path | None, str]:
    """Folder and name for Hydra of a path that was typed; no folder if it is in one of ``folders``.

    Raises UserError.
    """
    path = Path(file).expanduser()
    if not path.is_file():
        raise UserError(f"{file}: no such file; give a YAML file, or --config-name=NAME.")
    if path.suffix != ".yaml":
        raise UserError(f"{file}: the name of a configuration ends in .yaml; rename it.")
    for folder in folders:
        if path.resolve().is_relative_to(folder.resolve()):
            return None, str(path.resolve().relative_to(folder.resolve()).with_suffix(""))
    return path.parent, path.stem


def find_file(folders: Sequence[Path], name: str) -> Path | None:
    """The YAML file that ``name`` stands for."""
    file = f"{name.removesuffix('.yaml').strip('/')}.yaml"
    return next((folder / file for folder in folders if (folder / file).is_file()), None)


def _no_such_file(folders: Sequence[Path], name: str, where: str) -> UserError:
    """A path in the place of a name gets its name; a misspelt name the nearest one."""
    start = f"{where}: there is no {name.removesuffix('.yaml')}.yaml"
    path = Path(f"{name.removesuffix('.yaml')}.yaml").resolve()
    if path.is_file():
        inside = [folder.resolve() for folder in folders if path.is_relative_to(folder.resolve())]
        if inside:
            remedy = f"--config-name={path.relative_to(inside[0]).with_suffix('')}"
        else:
            remedy = f"--config-dir={path.parent} --config-name={path.stem}"
        return UserError(f"{start} among the configurations; give that file by {remedy}.")
    names = sorted(
        str(path.relative_to(folder).with_suffix(""))
        for folder in folders
        for path in (*folder.glob("*.yaml"), *folder.glob("*/*.yaml"))
        if "defaults:" in path.read_text(encoding="utf-8", errors="replace")
    )
    if not names:
        return UserError(f"{start}, nor another one in {' or '.join(map(str, folders))}.")
    same = [one for one in names if Path(one).name == Path(name).name]
    nearest = difflib.get_close_matches(name, same or names, n=1, cutoff=0.0)[0]
    group = [one for one in names if Path(one).parent == Path(nearest).parent]
    return UserError(f"{start}; did you mean {nearest}? There are {', '.join(group)}.")
