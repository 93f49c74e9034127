"""The keys of a schema: the nearest one to a misspelt one, and text that would be changed."""

import difflib
from collections.abc import Iterator
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from nemo_like.config.section import Section, choices, keys_of


def free_dicts(schema: type[Section]) -> Iterator[str]:
    """Keys of dictionaries that take any key, such as ``generation.engine_kwargs``."""
    for key, field in keys_of(schema):
        kinds = (field.annotation, *get_args(field.annotation))
        if any(get_origin(kind) is dict for kind in kinds):
            yield key


def is_in_free_dict(key: str, schema: type[Section]) -> bool:
    """Whether ``key`` is an entry of a dictionary that takes any key."""
    return any(key.startswith(f"{one}.") for one in free_dicts(schema))


def did_you_mean(key: str, schema: type[Section]) -> str:
    """The nearest key; one with the same last part wins over one that only looks alike."""
    keys = [one for one, _ in keys_of(schema)]
    if key in keys:  # as one word of a YAML file
        return f"write its parts below each other, as in {key.replace('.', ': {')}: ...}}"
    leaf = key.rpartition(".")[2]
    same_leaf = [other for other in keys if other.rpartition(".")[2] == leaf]
    pool = same_leaf if "." in key and same_leaf else keys
    nearest = difflib.get_close_matches(key.lower(), pool, n=1, cutoff=0.0)
    if not same_leaf and "." not in key:  # a bare word: compare it with the last parts
        leaves = {other.rpartition(".")[2]: other for other in reversed(keys)}
        close = difflib.get_close_matches(key, leaves, n=1)
        nearest = [leaves[one] for one in close] or nearest
    elif "." not in key and same_leaf:
        nearest = same_leaf[:1]
    return f"did you mean {nearest[0]}? (--help lists all keys)"


def changes_as_text(field: FieldInfo | None, value: object, written: str) -> bool:
    """Whether text was read as a number or boolean that is no longer what was ``written``.

    >>> changes_as_text(FieldInfo(annotation=str), 1.1, "1.10")
    True
    >>> changes_as_text(FieldInfo(annotation=str), 2026, "2026")
    False
    """
    if field is None or not isinstance(value, bool | int | float):
        return False
    if words := choices(field.annotation):
        return written in words
    return _is_text(field.annotation) and str(value) != written


def _is_text(annotation: Any) -> bool:
    return str in (annotation, *get_args(annotation)) and get_origin(annotation) is not dict
