"""Where rows come from: files, folders, patterns, data sets of Hugging Face, and mixtures of them.

Names are resolved here and nothing is read, so that a wrong one is refused before a run starts.
"""

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import PlainValidator
from pydantic_core import PydanticCustomError

from nemo_like.config.model_files import read_object
from nemo_like.doors import refuse_special
from nemo_like.errors import UserError

REASONING_GYM = "reasoning_gym"

_ENDINGS = (".jsonl", ".json", ".ndjson", ".csv", ".tsv", ".parquet")
_SPLITS = re.compile(r"(train|valid|val|test|dev|eval)[a-z]*(?![a-z])")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")
_GIVE = (
    "give a file, a folder, a pattern such as 'rows/*.parquet', a data set of the hub with its "
    f"split (org/name@train, org/name:config@train), or {REASONING_GYM}"
)
Paths = str | list[str]
Columns = Mapping[str, Paths]


@dataclass(frozen=True)
class Part:
    """Rows that are read alike: all of a key, or one entry of a mixture."""

    key: str
    """Where the configuration has it."""
    sources: tuple[str, ...]
    columns: Columns = field(default_factory=dict)
    """See ``data.columns``."""
    weight: float = 1.0
    name: str = ""
    """Of an entry of a mixture."""
    environment: str | None = None
    """Value of the column ``environment`` for rows that lack it."""

    @property
    def generates(self) -> bool:
        """Whether ``data.tasks`` makes the rows."""
        return REASONING_GYM in self.sources


@dataclass(frozen=True)
class DataSet:
    """What the package ``datasets`` reads."""

    name: str
    """A folder of ``save_to_disk``, or a name of the hub with its configuration."""
    split: str | None
    on_disk: bool


def parts(key: str, given: Any, columns: Columns) -> list[Part]:
    """The entries of ``data.train`` or ``data.validation``; ``columns`` are those of most."""
    if isinstance(given, Mapping):
        return [
            Part(
                f"{key}.{name}",
                tuple(_listed(one["path"])),
                one.get("columns", columns),
                float(one.get("weight", 1)),
                name,
                one.get("environment"),
            )
            for name, one in given.items()
        ]
    return [Part(key, tuple(_listed(given)), columns)]


def find(key: str, source: str) -> list[Path] | DataSet:
    """The files that ``source`` names, in order, or a data set; UserError if there is nothing."""
    path, split = Path(source).expanduser(), None
    if not path.exists() and "@" in source:
        name, _, split = source.rpartition("@")
        path = Path(name).expanduser()
        if not path.exists() and _HUB_NAME.fullmatch(name):
            return _with_package(key, source, DataSet(name, split, on_disk=False))
    refuse_special(f"{key}={source}", path)
    if path.is_dir():
        return _of_folder(key, source, path, split)
    if split is None and path.is_file():
        return [path]
    if any(one in source for one in "*?["):
        try:
            found = sorted(one for one in _matches(path) if one.is_file())
        except ValueError as error:
            raise UserError(
                f"{key}={source} is not a pattern, since ** must stand alone between slashes; "
                "write it as in 'rows/**/*.jsonl'."
            ) from error
        if found:
            return found
    raise UserError(f"{key}={source}: no such file; {_GIVE}.")


def _matches(pattern: Path) -> list[Path]:
    root = Path(pattern.anchor) if pattern.is_absolute() else Path()
    return list(root.glob(str(pattern.relative_to(pattern.anchor))))


def _of_folder(key: str, source: str, folder: Path, split: str | None) -> list[Path] | DataSet:
    splits = folder / "dataset_dict.json"
    if splits.is_file():
        names = read_object(splits).get("splits")
        if not (isinstance(names, list) and names and all(isinstance(one, str) for one in names)):
            raise UserError(
                f"{key}={source}: {splits} does not list splits; write the folder again with "
                "save_to_disk, or give the folder of one split."
            )
        if split not in names:
            raise UserError(
                f"{key}={source} holds the splits {', '.join(names)}; name one, as in "
                f"{folder}@{names[0]}."
            )
        return _with_package(key, source, DataSet(str(folder / str(split)), None, on_disk=True))
    if split is None and (folder / "state.json").is_file():
        return _with_package(key, source, DataSet(str(folder), None, on_disk=True))
    files = [
        one
        for one in sorted(folder.rglob("*"))
        if one.name.removesuffix(".gz").endswith(_ENDINGS)
        and one.is_file()
        and not any(part.startswith(".") for part in one.relative_to(folder).parts)
    ]
    of_split = {one: found[1] for one in files if (found := _SPLITS.match(one.stem.lower()))}
    if split is not None:
        files = [one for one in files if re.match(rf"{re.escape(split)}(?![a-z])", one.stem)]
    elif len(set(of_split.values())) > 1:
        names = " and ".join(one.name for one in (min(of_split), max(of_split)))
        raise UserError(
            f"{key}={source} holds files of several splits, such as {names}; name one, as in "
            f"{folder}@train."
        )
    if not files:
        raise UserError(
            f"{key}={source}: the folder has no {', '.join(_ENDINGS)}"
            f"{'' if split is None else f' whose name begins with {split}'}; {_GIVE}."
        )
    return files


def _with_package(key: str, source: str, found: DataSet) -> DataSet:
    if importlib.util.find_spec("datasets") is None:
        raise UserError(
            f"{key}={source} is read by the package datasets, which is not installed; pip install "
            "'nemo-like[data]', or give files."
        )
    return found


def _listed(paths: Paths) -> list[str]:
    return [paths] if isinstance(paths, str) else paths


def _paths(value: Any) -> bool:
    listed = value if isinstance(value, list) else [value]
    return bool(listed) and all(isinstance(one, str) and one.strip() for one in listed)


def _column(value: Any) -> Any:
    if not _paths(value):
        raise PydanticCustomError("column", "must be the name of a column, or a list of them")
    return value


def _source(value: Any) -> Any:
    if _paths(value):
        return value
    if not (isinstance(value, dict) and value):
        message = "must be a path, a list of them, or {name: {path: ..., weight: ...}}"
        raise PydanticCustomError("source", message)
    for name, one in value.items():
        fault = _entry_fault(one)
        if fault:
            raise PydanticCustomError("source", "{name} {fault}", {"name": name, "fault": fault})
    if not any(one.get("weight", 1) for one in value.values()):
        raise PydanticCustomError("source", "all weights are 0; give one above it")
    return value


def _entry_fault(entry: Any) -> str:
    if not (isinstance(entry, dict) and _paths(entry.get("path"))):
        return "must be {path: ..., weight: ...}"
    if unknown := entry.keys() - {"path", "weight", "columns", "environment"}:
        return f"has {sorted(unknown)[0]}, and takes path, weight, columns and environment"
    if not isinstance(entry.get("environment", ""), str):
        return "has an environment that is not a name of environment.tasks"
    weight = entry.get("weight", 1)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < 2**31:
        return f"has the weight {weight}, which must be a number of at least 0"
    columns = entry.get("columns", {})
    if not (isinstance(columns, dict) and all(map(_paths, columns.values()))):
        return "has columns that are not {name: column}"
    return ""


Column = Annotated[Paths, PlainValidator(_column)]
"""Where a row has the value of a column: a name, a dotted path, or several texts to join."""
Source = Annotated[str | list[str] | dict[str, dict[str, Any]], PlainValidator(_source)]
"""Value of ``data.train`` and ``data.validation``."""
