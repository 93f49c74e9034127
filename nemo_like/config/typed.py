"""A configuration's values by dotted key, and as one would type them."""

import re
from collections.abc import Mapping
from typing import Any

_PLAIN = re.compile(
    r"(?!(?:true|false|null|nan|inf)$|\.\d)[a-z_./][\w./:@%+-]*", re.IGNORECASE | re.ASCII
)


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values of a configuration by dotted key."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        inside = isinstance(value, Mapping) and value
        found |= flat(value, f"{prefix}{key}.") if inside else {f"{prefix}{key}": value}
    return found


def as_typed(keys: Mapping[str, Any]) -> list[str]:
    """Python values as one would type them.

    >>> as_typed({"a.b": 'say "so"', "c": {"d": [1, None, True]}, "e": "math"})
    ['a.b="say \\\\"so\\\\""', 'c={d:[1,null,true]}', 'e=math']
    """
    return [f"{key}={_written(value)}" for key, value in keys.items()]


def _written(value: Any) -> str:
    if getattr(value, "shape", None) == ():  # a number of numpy or torch
        value = value.item()
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_written(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_written, value)) + "]"
    if isinstance(value, int | float):
        return repr(value)
    if _PLAIN.fullmatch(text := str(value)):
        return text
    from hydra.core.override_parser.types import Quote, QuotedString

    return QuotedString(text, Quote.double).with_quotes()
