"""The YAML files that a configuration is made of: where they are, and what they are based on."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from nemo_like.compose import registry
from nemo_like.compose.overrides import changes_as_text
from nemo_like.config.paths import readable
from nemo_like.config.run import RunConfig
from nemo_like.config.section import keys_of
from nemo_like.errors import UserError

_PACKAGED = Path(__file__).parent.parent / "recipes"
SHIPPED = _PACKAGED if _PACKAGED.is_dir() else Path(__file__).parents[2] / "configs"
"""Folder of the YAML files that come with the project: of the wheel, or of the checkout."""


def check_config_files(folders: Sequence[Path], name: str) -> None:
    """Check the file that ``name`` stands for and those it is based on; raises UserError.

    ``folders`` are searched in turn: --config-path or the shipped files, then --config-dir.
    """
    for option, folder in zip(("--config-path", "--config-dir"), folders, strict=False):
        if not folder.is_dir():
            raise UserError(f"{option}={folder} is not a folder; give one with YAML files.")
    chain = list(_bases(folders, name, ()))
    is_known = any(registry.of_schema(one) for one in (name, *chain))
    for one in () if is_known else (name, *chain):
        if find_file(folders, one) is None:
            from nemo_like.compose.refusals import no_such_file

            named = f"{find_file(folders, name)}: its defaults name {one}"
            raise no_such_file(folders, one, f"--config-name={name}" if one == name else named)
    if not is_known:
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


def is_name(word: str) -> bool:
    """Whether a typed word is a configuration, not ``key=value``.

    Folders of a sweep's parts have an ``=`` too: ``runs/a/seed=0/config.yaml``.
    """
    return "=" not in word or (word.endswith(".yaml") and Path(word).is_file())


@readable()
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
    file = f"{name.removesuffix('.yaml').strip('/')}.yaml"
    return next((folder / file for folder in folders if (folder / file).is_file()), None)


_SEXAGESIMAL = re.compile(r"[-+]?\d[\d_]*(:[0-5]?\d)+(\.\d*)?")
_LEADING_ZERO = re.compile(r"[-+]?0\d[\d_]*")
_WORD_BOOLEANS = {"y", "n", "yes", "no", "on", "off"}


def read_yaml(path: Path) -> Any:
    """What ``path`` holds; raises UserError if it cannot be read."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not a text file in UTF-8.") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}.") from error


def check_yaml(path: Path, kinds: Mapping[str, Any]) -> None:
    """Raise UserError for the first plain value or key of ``path`` that would be changed.

    ``kinds``: types by dotted key. The file is one that ``read_yaml`` reads.
    """
    root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    if isinstance(root, yaml.MappingNode):
        _check_order(root, path)
    if root is not None:
        _walk(root, path, "", kinds)


def _check_order(root: yaml.MappingNode, path: Path) -> None:
    """A file's own values have no effect where ``_self_`` comes before what it is based on."""
    for name, value in root.value:
        if name.value == "defaults" and isinstance(value, yaml.SequenceNode):
            words = [str(entry.value) for entry in value.value if entry.tag.endswith(":str")]
            bases = [word for word in words if not word.startswith("override ")]
            if "_self_" in bases[:-1] and len(root.value) > 1:
                raise UserError(
                    f"{path}: {bases[-1]} comes after _self_ in its defaults, so it would "
                    "undo what the file says; put _self_ behind it."
                )


def _walk(node: yaml.Node, path: Path, key: str, kinds: Mapping[str, Any]) -> None:
    if isinstance(node, yaml.MappingNode):
        names = [name.value for name, _ in node.value]
        for name, value in node.value:
            inner = f"{key}.{name.value}".lstrip(".")
            if names.count(name.value) > 1:
                raise UserError(f"{path}, {_line(value)}: {inner} is given twice; give it once.")
            _check_scalar(name, path, inner, None)
            _walk(value, path, inner, kinds)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _walk(value, path, key, kinds)
    else:
        _check_scalar(node, path, key, kinds)


def _check_scalar(node: yaml.Node, path: Path, key: str, kinds: Mapping[str, Any] | None) -> None:
    """``kinds`` None: the node is a key itself."""
    if not isinstance(node, yaml.ScalarNode):
        return
    text = node.value
    kind = kinds.get(key) if kinds is not None else None
    if node.style is not None:
        return
    trap = (
        _SEXAGESIMAL.fullmatch(text)
        or _LEADING_ZERO.fullmatch(text)
        or (kinds is None and text.lower() in _WORD_BOOLEANS)
        or changes_as_text(kind, OmegaConf.create(f"x: {text}").x if kind else None, text)
    )
    if trap:
        raise UserError(
            f"{path}, {_line(node)}: {key}: YAML does not read {text} as it is written; put it in "
            f'quotes: "{text}".'
        )


def _line(node: yaml.Node) -> str:
    return f"line {node.start_mark.line + 1}"
