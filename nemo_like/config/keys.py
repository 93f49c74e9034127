"""The keys of a schema: names, types, the nearest one to a misspelt one, and values taken amiss."""

import dataclasses
import difflib
from collections.abc import Iterator
from enum import StrEnum
from typing import Any, get_args, get_origin

# Dictionaries that take any key.
FREE_DICTS = (
    "generation.engine_kwargs",
    "data.tasks",
    "data.template_switches",
    "environment.reward_model.template_switches",
)


def kinds_of(schema: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted key of a schema with its type, sections included."""
    for field in dataclasses.fields(schema):
        yield f"{prefix}{field.name}", field.type
        if dataclasses.is_dataclass(field.type):
            assert isinstance(field.type, type)
            yield from kinds_of(field.type, f"{prefix}{field.name}.")


def all_keys(schema: type) -> Iterator[str]:
    """Every dotted key of a schema, sections included."""
    yield from (key for key, _ in kinds_of(schema))


def is_in_free_dict(key: str) -> bool:
    """Whether ``key`` is an entry of a dictionary that takes any key.

    >>> is_in_free_dict("data.tasks.gcd"), is_in_free_dict("data.tasks")
    (True, False)
    """
    return key.startswith(tuple(f"{one}." for one in FREE_DICTS))


def did_you_mean(key: str, schema: type) -> str:
    """The nearest key; one with the same last part wins over one that only looks alike."""
    keys = list(all_keys(schema))
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


def is_number_for_boolean(kind: Any, value: object) -> bool:
    """Whether a key that is true or false was given a number, of which OmegaConf makes a boolean.

    >>> is_number_for_boolean(bool, 5), is_number_for_boolean(bool, True)
    (True, False)
    """
    is_number = not isinstance(value, bool) and str(value).strip().lstrip("+-").isdigit()
    return is_number and bool in (kind, *get_args(kind))


def changes_as_text(kind: Any, value: object, written: str) -> bool:
    """Whether text was read as a number or boolean that is no longer what was ``written``.

    >>> changes_as_text(str, 1.1, "1.10"), changes_as_text(str, 2026, "2026")
    (True, False)
    """
    if get_origin(kind) is dict or not isinstance(value, bool | int | float):
        return False
    for one in get_args(kind) or (kind,):
        if isinstance(one, type) and issubclass(one, StrEnum):
            return written in set(one)
        if one is str:
            return str(value) != written
    return False
