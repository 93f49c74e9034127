"""The two kinds of rule about one key: its range, and where it would have no effect."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_like.config.run_schema import TrainingRunConfig
from nemo_like.errors import UserError

_MOST = 2**31


@dataclass(frozen=True, kw_only=True)
class Ranges:
    """Bounds of keys, by dotted name. None as a value is in every range."""

    at_least: Mapping[str, float] = field(default_factory=dict)
    above_zero: Sequence[str] = ()
    at_most: Mapping[str, float] = field(default_factory=dict)
    below_one: Sequence[str] = ()
    """Shares in [0, 1)."""
    instead: Mapping[str, str] = field(default_factory=dict)
    """What to set for what too small a value seems to ask for: the end of a sentence, by key."""


@dataclass(frozen=True, kw_only=True)
class Effect:
    """Keys that do nothing in some runs."""

    keys: Sequence[str]
    """Keys, or sections for all keys in them."""
    applies: Callable[[Any], bool]
    """Whether the keys have an effect."""
    why_not: str
    """What stands in the way, and what to set: the end of a sentence."""


def value_of(config: object, key: str) -> Any:
    """The value at a dotted key."""
    for part in key.split("."):
        config = getattr(config, part)
    return config


def check_values(config: TrainingRunConfig) -> None:
    """Raise UserError for the first empty text, and for numbers beyond any use."""
    for key, value in _items(config):
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, int) and abs(item) >= _MOST:
                raise UserError(f"{key}={value} must be below {_MOST}.")
            if isinstance(item, str) and not item.strip():
                raise UserError(f"{key}={value!r}: empty text has no meaning here; leave it out.")


def check_finite(config: TrainingRunConfig) -> None:
    """Raise UserError for the first number that is infinite or none, whatever its range is."""
    for key, value in _items(config):
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{key}={value} must be a finite number.")


def _items(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key and its value."""
    for one in dataclasses.fields(section):
        key, value = f"{prefix}{one.name}", getattr(section, one.name)
        if dataclasses.is_dataclass(value):
            yield from _items(value, f"{key}.")
        else:
            yield key, value


def check_ranges(config: TrainingRunConfig, ranges: Ranges) -> None:
    """Raise UserError for the first value out of its range."""
    lower = {key: (least, True) for key, least in ranges.at_least.items()}
    lower |= dict.fromkeys(ranges.above_zero, (0, False))
    assert ranges.at_most.keys() <= lower.keys()
    for key, (least, included) in lower.items():
        value, most = value_of(config, key), ranges.at_most.get(key)
        if value is None or _is_between(value, least, math.inf if most is None else most, included):
            continue
        rule = f"be at least {least:g}" if included else f"be a finite number above {least:g}"
        if most is not None:
            rule = f"be in {'[' if included else '('}{least:g}, {most:g}]"
        instead = f"; {ranges.instead[key]}" if key in ranges.instead else ""
        raise UserError(f"{key}={value} must {rule}{instead}.")
    for key in ranges.below_one:
        if not 0 <= value_of(config, key) < 1:
            raise UserError(f"{key}={value_of(config, key)} must be in [0, 1).")


def _is_between(value: float, least: float, most: float, included: bool) -> bool:
    return least <= value <= most if included else least < value <= most and value < math.inf


def check_effects(config: TrainingRunConfig, effects: Sequence[Effect]) -> None:
    """A key that differs from its default and changes nothing is a misunderstanding: say so."""
    default = type(config)()
    for effect in effects:
        for key in effect.keys:
            for leaf in _leaves(config, key):
                value = value_of(config, leaf)
                if value != value_of(default, leaf) and not effect.applies(config):
                    shown = str(value).lower() if isinstance(value, bool) else value
                    raise UserError(f"{leaf}={shown} would have no effect: {effect.why_not}.")


def _leaves(config: TrainingRunConfig, key: str) -> list[str]:
    value = value_of(config, key)
    if not dataclasses.is_dataclass(value):
        return [key]
    return [f"{key}.{one.name}" for one in dataclasses.fields(value)]
