"""The keys of a schema: which one a misspelt one stands for, and text that would be changed."""

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from nemo_like.compose import registry
from nemo_like.config.section import Section, choices, keys_of, section_of
from nemo_like.errors import UserError

_TYPO = 0.75
"""Least likeness of a word and the one that was meant."""
_LETTERS = 2
"""Most letters that a typo adds or leaves out."""
_LONG = 6
"""Least letters of a word without a section in which a typo is still seen for one."""
_MOST = 3
"""Most keys in one hint."""
_WEAK = {"num", "max", "new", "per", "step", "steps", "size", "every"}
"""Words of names that change nothing in which one is meant."""


def free_dicts(schema: type[Section]) -> Iterator[str]:
    """Keys of dictionaries that take any key, such as ``generation.engine_kwargs``."""
    for key, field in keys_of(schema):
        kinds = (field.annotation, *get_args(field.annotation))
        if any(get_origin(kind) is dict for kind in kinds):
            yield key


def is_in_free_dict(key: str, schema: type[Section]) -> bool:
    """Whether ``key`` is an entry of a dictionary that takes any key."""
    return any(key.startswith(f"{one}.") for one in free_dicts(schema))


def unknown_key(key: str, schema: type[Section]) -> UserError:
    """Refuse a key that ``schema`` lacks, with the one that was meant if that can be told."""
    section = key.partition(".")[0]
    help_ = "--help lists the sections, and --help SECTION its keys."
    if section in schema.model_fields:
        help_ = f"--help {section} lists those of its section."
    return UserError(f"{key} is not a key of the configuration; {hint_for(key, schema) or help_}")


def hint_for(key: str, schema: type[Section]) -> str | None:
    """What was meant by ``key``, as the end of a sentence; None if nothing comes near it.

    A wrong hint is worse than none: words may have typos and lack their sections, no more.
    """
    from nemo_like.compose import names

    fields = dict(keys_of(schema))
    keys = [one for one in fields if "." in key or section_of(fields[one]) is None]
    if key in fields:  # as one word of a YAML file
        return f"write its parts below each other, as in {key.replace('.', ': {')}: ...}}"
    if (lower := key.strip().lower()) in fields:
        return f"did you mean {lower}? Keys are in lower case."
    others = {name: registry.find(name).config for name in registry.names()}
    if owners := [name for name, other in others.items() if key in dict(keys_of(other))]:
        return f"it is a key of {', '.join(owners)}."
    if answer := names.answer(key, schema):
        return answer
    if found := _nearest(lower, keys):
        return f"did you mean {' or '.join(found)}?"
    if "." in key:
        return None
    close = {one.name: _likeness(lower, one.name, bare=True) for one in names.read()}
    best = max(close, key=close.__getitem__)
    return names.answer(best, schema) if close[best] else None


def _nearest(key: str, keys: Sequence[str]) -> list[str]:
    """At most three keys whose words are those of ``key`` but for typos."""
    *sections, leaf = [part for part in re.split(r"[^a-z0-9_-]+", key) if part] or [key]
    found: dict[str, float] = {}
    for other in keys:
        *inside, name = other.split(".")
        rest = iter(inside)
        if all(any(_is_typo(typed, one) for one in rest) for typed in sections):
            found[other] = _likeness(leaf, name, bare=not sections)
    best = max(found.values(), default=0.0)
    top = [one for one in found if found[one] == best > 0]
    is_ours = any(one.startswith(f"{sections[0]}.") for one in keys) if sections else False
    if not top and is_ours:  # in another section, if the name is long enough to be meant
        top = [one for one in keys if one.endswith(f".{leaf}") and "_" in leaf]
    return top if len(top) <= _MOST else []


def _likeness(typed: str, name: str, *, bare: bool) -> float:
    """How near a name is: 1 if it is the same, 0 if it has another word, or ``bare`` a word more.

    >>> _likeness("max_tokens", "max_new_tokens", bare=False) > 0
    True
    >>> _likeness("expert_parallel_size", "context_parallel_size", bare=False)
    0.0
    """
    if typed == name:
        return 1.0
    if bare and len(typed) < _LONG:
        return 0.0
    words, others = re.split("[_-]", typed), name.split("_")
    fewer, more = sorted((words, others), key=len)
    left, score = list(more), 1.0
    for word in fewer:
        one = next((one for one in left if _is_typo(word, one)), None)
        if one is None:
            return 0.0
        left.remove(one)
        score *= difflib.SequenceMatcher(None, word, one).ratio()
    return 0.0 if set(left) - _WEAK or (bare and left) else score * 0.9 ** len(left)


def _is_typo(one: str, other: str) -> bool:
    """Whether the words are the same but for a few letters, which are not the first."""
    if one[:1] != other[:1] or abs(len(one) - len(other)) > _LETTERS:
        return False
    return difflib.SequenceMatcher(None, one, other).ratio() >= _TYPO


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
