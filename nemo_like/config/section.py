"""What a section of a configuration is: every rule about a key stands on its field.

A field's annotation holds its type, its range (``Field(ge=1)``), and where it has an effect
(``OnlyIf``); the text below it is its documentation. ``Section.rules`` has what several keys must
agree on. Sections are strict and frozen: ``1.5`` is not an integer, and an unknown key is an error.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, dataclass_transform, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

from nemo_like.doors import Door
from nemo_like.errors import UserError

_MOST = 2**31
_ENDS = ("ge", "gt", "le", "lt")

Share = Annotated[float, Field(ge=0, lt=1)]
"""A number in [0, 1)."""
Positive = Annotated[float, Field(gt=0)]
"""A number above 0."""
Count = Annotated[int, Field(ge=1)]
"""A whole number of at least 1."""
NonNegative = Annotated[float, Field(ge=0)]
"""A number of at least 0."""


@dataclass(frozen=True)
class Instead:
    """What to set for what a value out of range seems to ask for: the end of a sentence."""

    text: str


@dataclass(frozen=True)
class OnlyIf:
    """Where a key, or a section, has an effect. Setting it elsewhere is refused."""

    holds: Callable[[Any, Any], bool]
    """Of the section that has the key and of the whole configuration."""
    otherwise: str
    """What stands in the way and what to set: the end of a sentence, ``{here}`` for the section's
    dotted name."""


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(Field,))
class Section(BaseModel):
    """Base of every section; see the module."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        arbitrary_types_allowed=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _numbers_as_text(cls, given: Any) -> Any:
        """A number where text belongs is its text: ``run.dir=2026``."""
        if not isinstance(given, dict):
            return given
        return {
            name: str(value)
            if type(value) in (int, float) and name in cls.model_fields and is_text(cls, name)
            else value
            for name, value in given.items()
        }

    def replace(self, **changes: Any) -> Self:
        """A copy with other values, which are not checked again; TypeError for an unknown name."""
        if unknown := changes.keys() - type(self).model_fields.keys():
            raise TypeError(f"{type(self).__name__} has no {', '.join(sorted(unknown))}")
        return self.model_copy(update=changes)

    def rules(self, here: str, run: Any) -> Iterator[str]:
        """Sentences on values that cannot work together; ``here`` is the section's dotted name."""
        yield from ()


def is_text(kind: type[Section], name: str) -> bool:
    """Whether a field holds free text."""
    annotation = kind.model_fields[name].annotation
    return str in (annotation, *get_args(annotation))


def choices(annotation: Any) -> tuple[str, ...]:
    """The words that a field takes; none if it is not of that kind.

    >>> choices(Literal["a", "b"] | None)
    ('a', 'b')
    """
    for one in (annotation, *get_args(annotation)):
        if get_origin(one) is Literal:
            return tuple(str(word) for word in get_args(one))
    return ()


def interval(field: FieldInfo) -> str:
    """The range of a field with two ends, such as ``[0, 1)``; empty if it has fewer."""
    ends: dict[str, Any] = {}
    for one in field.metadata:
        ends |= {name: getattr(one, name) for name in _ENDS if hasattr(one, name)}
    lower = next((name for name in ("ge", "gt") if name in ends), "")
    upper = next((name for name in ("le", "lt") if name in ends), "")
    if not lower or not upper:
        return ""
    opening, closing = "[("[lower == "gt"], "])"[upper == "lt"]
    return f"{opening}{ends[lower]:g}, {ends[upper]:g}{closing}"


def range_of(field: FieldInfo) -> str:
    """The range of a field in words, of one end or two; empty if it has none.

    >>> range_of(FieldInfo.from_annotation(Count)), range_of(FieldInfo.from_annotation(Share))
    ('at least 1', 'in [0, 1)')
    """
    if both := interval(field):
        return f"in {both}"
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    ends = [(one, name) for one in field.metadata for name in _ENDS if hasattr(one, name)]
    return next((f"{words[name]} {getattr(one, name):g}" for one, name in ends), "")


def section_of(field: FieldInfo) -> type[Section] | None:
    """The class of a field that is a section."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def keys_of(kind: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every dotted key below ``kind`` with its field, sections included."""
    for name, field in kind.model_fields.items():
        yield f"{prefix}{name}", field
        if (inner := section_of(field)) is not None:
            yield from keys_of(inner, f"{prefix}{name}.")


def value_of(section: object, key: str) -> Any:
    """The value at a dotted key."""
    for part in key.split("."):
        section = getattr(section, part)
    return section


def check_sections(run: Section, unused: Sequence[tuple[str, str]] = ()) -> None:
    """Raise UserError for the first key that breaks a rule of its own or would have no effect.

    ``unused``: keys or sections that do nothing in this kind of run, and why.
    """
    for key, value in leaves(run):
        _check_value(key, value)
    for key, door, spec in named_outside(run):
        if refusal := door.refusal(key, spec):
            raise UserError(refusal)
    default = type(run)()
    for key, why in unused:
        _refuse_changed(key, value_of(run, key), value_of(default, key), why)
    _check_effects("", run, default, run)
    for here, section in [("", run), *_sections(run)]:
        for sentence in section.rules(here, run):
            raise UserError(sentence)


def named_outside(run: Section) -> Iterator[tuple[str, Door, str]]:
    """Each key that may name what users add, and each name that it has."""
    for key, field in keys_of(type(run)):
        value = value_of(run, key)
        for door in (one for one in field.metadata if isinstance(one, Door)):
            for spec in value if isinstance(value, list) else [value]:
                if spec is not None:
                    yield key, door, spec
        for name, inner in _named(value):
            yield from (
                (f"{key}.{name}.{part}", door, spec) for part, door, spec in named_outside(inner)
            )


def _check_value(key: str, value: Any) -> None:
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, int) and abs(item) >= _MOST:
            raise UserError(f"{key}={value} must be below {_MOST}.")
        # White space can be an entry, such as a stop string.
        if isinstance(item, str) and not (item if isinstance(value, list) else item.strip()):
            raise UserError(f"{key}={value!r}: empty text has no meaning here; leave it out.")


def _check_effects(here: str, section: Section, default: Section, run: Section) -> None:
    for name, field in type(section).model_fields.items():
        key, value, standard = f"{here}{name}", getattr(section, name), getattr(default, name)
        for only_if in field.metadata:
            if isinstance(only_if, OnlyIf) and not only_if.holds(section, run):
                why = only_if.otherwise.format(here=here.rstrip("."))
                _refuse_changed(key, value, standard, why)
        if isinstance(value, Section):
            _check_effects(f"{key}.", value, standard, run)
        for entry, inner in _named(value):
            _check_effects(f"{key}.{entry}.", inner, type(inner)(), run)


def _refuse_changed(key: str, value: Any, default: Any, why: str) -> None:
    """Refuse a value, or the first one of a section, that differs from its default."""
    if isinstance(value, Section):
        for name in type(value).model_fields:
            _refuse_changed(f"{key}.{name}", getattr(value, name), getattr(default, name), why)
    elif value != default:
        shown = str(value).lower() if isinstance(value, bool) else value
        raise UserError(f"{key}={shown} would have no effect: {why}.")


def _sections(section: Section, prefix: str = "") -> Iterator[tuple[str, Section]]:
    for name in type(section).model_fields:
        value = getattr(section, name)
        found = [("", value)] if isinstance(value, Section) else _named(value)
        for entry, inner in found:
            here = f"{prefix}{name}.{entry}".rstrip(".")
            yield here, inner
            yield from _sections(inner, f"{here}.")


def leaves(section: Section, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted key with a value of its own, in named sections too, and that value."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from leaves(value, f"{prefix}{name}.")
        elif inner := _named(value):
            for entry, one in inner:
                yield from leaves(one, f"{prefix}{name}.{entry}.")
        else:
            yield f"{prefix}{name}", value


def _named(value: Any) -> list[tuple[str, Section]]:
    """Named sections in the value of a dictionary key; none for other values."""
    if not isinstance(value, dict):
        return []
    return [(name, one) for name, one in value.items() if isinstance(one, Section)]
