"""Rows that say themselves how they train: more or less than others, or the other way round.

All rows train alike here, so what says otherwise is refused.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nemo_like.data.messages import Message
from nemo_like.errors import UserError

_FACTORS = ("weight", "loss_weight", "loss_scale", "loss_multiplier", "sample_weight")
_SWITCHES = ("train", "trainable", "training", "mask", "loss_mask")
_INVERTED = "masked"
_OF_MESSAGES = (*_FACTORS, *_SWITCHES, _INVERTED, "loss", "label", "train_detail")
_OF_ROWS = (*_FACTORS, *_SWITCHES, _INVERTED)
_YES = ("1", "1.0", "true", "yes")
_NO = ("0", "0.0", "false", "no")
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


def refuse_row_weight(record: Mapping[str, Any], where: str) -> None:
    """Refuse a row that is not to train, or to train more or less than others."""
    for name in _OF_ROWS:
        value = record.get(name)
        if value not in (None, "", [], {}) and _says_yes(name, value) is not True:
            raise UserError(
                f"{where}: '{name}' is {_shown(value)}, and every row trains alike; take the row "
                f"out if it is not to train, or '{name}' if it is (rename it if it means something "
                "else)."
            )


def refuse_message_weights(
    messages: Sequence[Message], trains: Sequence[bool], remedy: str, where: str
) -> None:
    """Refuse a message that says something else about its training than ``trains``.

    ``remedy``: how to keep a message from training.
    """
    for message, is_trained in zip(messages, trains, strict=True):
        for name in _OF_MESSAGES:
            if name not in message or (reason := _conflict(name, message, is_trained)) is None:
                continue
            text = message["content"]
            shown = repr(text if len(text) <= 30 else f"{text[:30]}...")
            value = _shown(message[name])
            raise UserError(
                f"{where}: '{name}' of the {message['role']}'s message {shown} is {value}, and "
                f"{reason}; {f'{remedy}, or ' if is_trained else ''}take '{name}' out."
            )


def _conflict(name: str, message: Message, is_trained: bool) -> str | None:
    """What happens instead of what an entry of a message says; None if it says the same."""
    says = _says_yes(name, message[name])
    if says is None:
        is_other = name == "label"  # of another kind, such as a class
        return None if is_other else "a message trains as a whole or not at all"
    if is_trained and not says:
        return "it would train"
    # Which answers train is said by the row's form and data.train_on; a factor of 1 says nothing.
    is_silent = message["role"] == "assistant" or name in (*_FACTORS, _INVERTED, "label")
    return "only answers train" if says and not is_trained and not is_silent else None


def _says_yes(name: str, value: object) -> bool | None:
    """Whether an entry says that its part trains; None if it is neither yes nor no."""
    text = str(value).strip().lower()
    if text in _YES or text in _NO:
        return (text in _YES) != (name == _INVERTED)
    return None


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


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
