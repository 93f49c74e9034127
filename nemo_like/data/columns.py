"""``data.columns``: which column of a file is which of ours."""

from collections.abc import Mapping
from typing import Any

from nemo_like.config.sources import Part, Paths
from nemo_like.errors import UserError

_INSTEAD = {
    "prompt": {"messages", "text"},
    "completion": {"messages", "text"},
    "messages": {"prompt", "completion", "text"},
    "text": {"prompt", "completion", "messages"},
    "chosen": {"completions", "ranks"},
    "completions": {"chosen", "rejected"},
}
"""What a row may have beside a column of ours, and is not read if that column is named."""


def renamed(record: dict[str, Any], part: Part, where: str) -> dict[str, Any]:
    """A row with the names of ``part.columns``; what they name goes, the other columns stay.

    Raises UserError for a column that the row does not have.
    """
    if not part.columns:
        return record
    new: dict[str, Any] = {}
    for name, paths in part.columns.items():
        new[name] = _value(record, paths, f"{where}: {_key(part)}.{name}")
    taken = {one for paths in part.columns.values() for one in _listed(paths)}
    for name in part.columns:
        taken |= _INSTEAD.get(name, set())
    return {name: value for name, value in record.items() if name not in taken} | new


def _key(part: Part) -> str:
    return f"{part.key}.columns" if part.name else "data.columns"


def _listed(paths: Paths) -> list[str]:
    return [paths] if isinstance(paths, str) else paths


def _value(record: Mapping[str, Any], paths: Paths, where: str) -> Any:
    values = [_at(record, path, where) for path in _listed(paths)]
    if isinstance(paths, str):
        return values[0]
    texts = [one for one in values if one is not None]
    if not all(isinstance(one, str | int | float) for one in texts):
        raise UserError(f"{where}={paths}: only texts can be joined.")
    return "\n\n".join(text for one in texts if (text := str(one)).strip())


def _at(record: Mapping[str, Any], path: str, where: str) -> Any:
    """The value at a path; a name that has dots itself comes first."""
    if path in record:
        return record[path]
    found: Any = record
    for name in path.split("."):
        is_place = isinstance(found, list) and name.lstrip("-").isdigit()
        if isinstance(found, Mapping) and name in found:
            found = found[name]
        elif is_place and -len(found) <= int(name) < len(found):
            found = found[int(name)]
        else:
            raise UserError(
                f"{where}={path}: the row has no such column; its columns are "
                f"{', '.join(paths_of(record))}."
            )
    return found


def paths_of(record: Mapping[str, Any]) -> list[str]:
    """Names of the columns, and of what is inside objects."""
    found = []
    for name, value in record.items():
        inner = value if isinstance(value, Mapping) else {}
        found += [f"{name}.{one}" for one in inner] or [name]
    return found
