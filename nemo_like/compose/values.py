"""From pydantic's errors to one sentence: key, value, rule, remedy."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, get_args

from pydantic import ValidationError

from nemo_like.compose.keys import unknown_key
from nemo_like.config.section import Instead, Section, choices, interval, keys_of
from nemo_like.errors import UserError

_RANGES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "greater_than": lambda c: f"must be above {c['gt']:g}",
    "greater_than_equal": lambda c: f"must be at least {c['ge']:g}",
    "less_than": lambda c: f"must be below {c['lt']:g}",
    "less_than_equal": lambda c: f"must be at most {c['le']:g}",
    "finite_number": lambda _: "must be a finite number",
}
_NUMBERS = ("int_type", "float_type")
_KINDS = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "dict_type": "must be a dictionary, {key}={{name: value}}",
}


def checked(schema: type[Section], values: Mapping[str, Any]) -> Any:
    """``values`` as the sections of ``schema``; UserError for the first that does not fit."""
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        raise _first(error, schema) from error


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


def _first(error: ValidationError, schema: type[Section]) -> UserError:
    """The first key that does not exist, before values that may follow from it."""
    found = error.errors(include_url=False)
    unknown = [one for one in found if one["type"] == "extra_forbidden"]
    one = (unknown or found)[0]
    names = [str(part) for part in one["loc"]]
    key = ".".join(name for name in names if not name.isdigit())
    return UserError(_sentence(one, key, schema))


def _sentence(error: Any, key: str, schema: type[Section]) -> str:
    kind, value = error["type"], error["input"]
    field = dict(keys_of(schema)).get(key)
    if kind == "extra_forbidden":
        return str(unknown_key(key, schema))
    if value is None:
        return f"{key}=null: this key needs a value; leave it out for its default."
    if kind == "model_type":
        return f"{key} is a section, not a value; set one of the keys in it."
    if kind == "list_type":
        return f"{key} must be a list; put brackets around it: {key}=[...]."
    if kind == "string_type":
        if isinstance(value, dict | list):
            return f"{key} must be text, not a list or dictionary."
        return f"{key}={value} would be read as {value}; put text in quotes: '{key}=\"{value}\"'."
    if field is not None and (words := choices(field.annotation)):
        return f"{key}={_shown(value)} must be one of {', '.join(words)}."
    if rule := _RANGES.get(kind):
        both = interval(field) if field is not None and kind != "finite_number" else ""
        said = f"must be in {both}" if both else rule(error.get("ctx", {}))
        remedies = [one.text for one in field.metadata if isinstance(one, Instead)] if field else []
        return f"{key}={_shown(value)} {'; '.join([said, *remedies])}."
    if rule := _KINDS.get(kind):
        if isinstance(value, str) and kind in _NUMBERS and _is_number(value):
            rule += ", and this is text: leave out the quotes"
        return f"{key}={_shown(value)} {rule.format(key=key)}."
    return f"{key}={_shown(value)}: {error['msg']}."


def _shown(value: Any) -> Any:
    return str(value).lower() if isinstance(value, bool) else value


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
