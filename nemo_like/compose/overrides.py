"""What is typed as ``key=value``: refused here where Hydra's words would not help, or would differ.

Hydra accepts more than has a meaning for a schema, such as removing a section, which then has its
defaults again.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args, get_origin

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from pydantic.fields import FieldInfo

from nemo_like.config.run import RunConfig
from nemo_like.config.section import Section, choices, keys_of
from nemo_like.errors import UserError

_GROUPS = ("model",)


def refuse_twice(overrides: Sequence[str]) -> None:
    """Refuse a key that is typed more than once, where Hydra would take the last value."""
    keys = [one.partition("=")[0].strip("+~ ") for one in overrides]
    for key in keys:
        if keys.count(key) > 1:
            typed = [one for one, name in zip(overrides, keys, strict=True) if name == key]
            raise UserError(f"{key} is given {len(typed)} times ({' '.join(typed)}); give it once.")


def check_overrides(overrides: Sequence[str], schema: type[RunConfig]) -> None:
    """Refuse what cannot be read, and keys that do not exist, with the nearest one that does."""
    parser, kinds = OverridesParser.create(), dict(keys_of(schema))
    for typed in overrides:
        key, equals, value = typed.partition("=")
        if equals and key.strip() != key:
            raise UserError(
                f"'{typed}': write {key.strip()}={value.strip()}, without blanks around the '='."
            )
        override, problem = None, None
        try:
            override = parser.parse_override(typed)
        except HydraException as error:
            problem = error
        if override is None or not override.key_or_group:
            from nemo_like.compose.refusals import unreadable

            raise unreadable(typed, schema) from problem
        _check_key(typed, override, kinds, schema)


def accept_free_keys(overrides: Sequence[str], schema: type[RunConfig]) -> list[str]:
    """Let dictionaries that take any key be set like all others, without Hydra's ``+``.

    ``data.tasks.gcd={}`` becomes ``++data.tasks.gcd={}``.
    """
    free = tuple(free_dicts(schema))
    keys = [one.partition("=")[0] for one in overrides]
    return [
        f"++{one}" if key in free or is_in_free_dict(key, schema) else one
        for key, one in zip(keys, overrides, strict=True)
    ]


def _check_key(
    typed: str, override: Override, kinds: Mapping[str, Any], schema: type[RunConfig]
) -> None:
    key, written = override.key_or_group, typed.partition("=")[2].strip()
    if is_in_free_dict(key, schema):
        return
    if key not in kinds and key not in _GROUPS:
        from nemo_like.compose.names import unknown_key

        raise unknown_key(key, schema)
    if override.is_delete():
        raise UserError(f"~{key}: keys cannot be removed; leave it out, and it has its default.")
    if override.is_add():
        raise UserError(f"+{key}={written}: the key exists; write {key}={written}, without +.")
    if override.is_sweep_override():
        return  # each job of it is checked
    if key in _GROUPS and not isinstance(override.value(), str):
        raise UserError(f"{key}={written} must be one name, such as {key}=embedded.")
    if key in _GROUPS and schema.evaluates and override.value() != "embedded":
        raise UserError(
            f"{key}={written} also says how to train, and an evaluation trains nothing; set "
            "policy.model and policy.dtype, as recipes/eval_smollm2_1gpu does."
        )
    for leaf, value in _leaves(key, override.value()):
        whole = leaf == key
        shown = f"{leaf}={written if whole else value}"
        if changes_as_text(kinds.get(leaf), value, written if whole else repr(value).lower()):
            raise UserError(
                f"{shown} would be read as {value}; put text in quotes: '{leaf}=\"{written}\"'."
            )


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, one in value.items():
            yield from _leaves(f"{key}.{name}", one)
    else:
        yield key, value


def free_dicts(schema: type[Section]) -> Iterator[str]:
    """Keys of dictionaries that take any key, such as ``generation.engine_kwargs``."""
    for key, field in keys_of(schema):
        kinds = (field.annotation, *get_args(field.annotation))
        if any(get_origin(kind) is dict for kind in kinds):
            yield key


def is_in_free_dict(key: str, schema: type[Section]) -> bool:
    """Whether ``key`` is an entry of a dictionary that takes any key."""
    return any(key.startswith(f"{one}.") for one in free_dicts(schema))


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
