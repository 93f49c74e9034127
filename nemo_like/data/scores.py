"""Scores beside the two answers of a pair, which may say that the other one is better."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from nemo_like.errors import UserError

_HIGHER = {"score", "scores", "rating", "ratings", "reward", "rewards", "grade", "grades"}
_HIGHER |= {"points", "votes", "upvotes", "quality", "elo"}
_LOWER = {"rank", "ranks", "ranking"}
_SIDES = (
    ("chosen", "rejected"),
    ("accepted", "rejected"),
    ("preferred", "dispreferred"),
    ("winner", "loser"),
    ("better", "worse"),
    ("good", "bad"),
    ("positive", "negative"),
)


def refuse_contrary_scores(record: Mapping[str, Any], first: int | None, where: str) -> None:
    """Refuse a pair by whose own scores the rejected answer is the better one.

    ``first``: which entry of lists, such as ``completions``, belongs to the chosen one, if any.
    """
    by_words = {_words(name): name for name in record}
    for names, values, words in (*_columns(record, by_words), *_lists(record, by_words, first)):
        chosen, rejected = map(_number, values)
        if chosen is None or rejected is None:
            continue
        if chosen < rejected if words & _HIGHER else chosen > rejected:
            raise UserError(
                f"{where}: {names[0]} is {chosen:g} and {names[1]} is {rejected:g}, so that the "
                "rejected answer is the better one; exchange the two, or take these entries out."
            )


_Found = tuple[tuple[str, str], tuple[object, object], set[str]]
"""Names and values of a chosen and a rejected answer's score, and the words of its name."""


def _columns(
    record: Mapping[str, Any], by_words: Mapping[tuple[str, ...], str]
) -> Iterator[_Found]:
    """Of two columns that differ in the side's name: 'chosen-rating' and 'rejected-rating'."""
    for words, name in by_words.items():
        for side, opposite in _SIDES:
            other = by_words.get(tuple(opposite if one == side else one for one in words))
            if side in words and other is not None and set(words) & (_HIGHER | _LOWER):
                yield (f"'{name}'", f"'{other}'"), (record[name], record[other]), set(words)


def _lists(
    record: Mapping[str, Any], by_words: Mapping[tuple[str, ...], str], first: int | None
) -> Iterator[_Found]:
    """Of one column with a number for each of two completions."""
    for words, name in by_words.items():
        values = record[name]
        is_pair = isinstance(values, list) and len(values) == 2
        if first is not None and is_pair and set(words) & (_HIGHER | _LOWER):
            places = (first, 1 - first)
            names = (f"'{name}[{places[0]}]'", f"'{name}[{places[1]}]'")
            yield names, (values[places[0]], values[places[1]]), set(words)


def _words(name: str) -> tuple[str, ...]:
    """What a column's name is made of.

    >>> _words("chosen-rating") == _words("chosenRating") == ("chosen", "rating")
    True
    """
    return tuple(re.findall(r"[a-z]+|\d+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower()))


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None
