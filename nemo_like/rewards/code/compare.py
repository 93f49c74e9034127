"""When what a program printed, or a function returned, is what a test expects.

Printed: lines are compared one by one, and their words, split at white space. White space at the
ends of lines and empty lines at the end do not count; other line breaks do. Two words are equal if
they are the same text, or if both are finite numbers, at least one of them is not written as an
integer, and they differ by at most 1e-6 (of the expected one where that is above 1).

Returned: equal as in Python, where floats may differ by as much; a text is no number. Tuples are
lists, and keys of dicts are texts, as in JSON.
"""

import math
import re
from typing import Any

TOLERANCE = 1e-6

_INTEGER = re.compile(r"[+-]?\d+")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE | re.ASCII)
_LONGEST_NUMBER = 400


def same_output(printed: str, expected: str) -> bool:
    """Whether a program printed what a test expects.

    >>> same_output("0.333333\\n", "0.333333333333"), same_output("1\\n2", "1 2")
    (True, False)
    """
    given, wanted = _lines(printed), _lines(expected)
    return len(given) == len(wanted) and all(map(_same_line, given, wanted))


def same_value(returned: Any, expected: Any) -> bool:
    """Whether a function returned what a test expects; both are values of JSON."""
    if isinstance(expected, list):
        return (
            isinstance(returned, list)
            and len(returned) == len(expected)
            and all(map(same_value, returned, expected))
        )
    if isinstance(expected, dict):
        return (
            isinstance(returned, dict)
            and returned.keys() == expected.keys()
            and all(same_value(returned[key], value) for key, value in expected.items())
        )
    if isinstance(returned, float) or isinstance(expected, float):
        numbers = isinstance(returned, (int, float)) and isinstance(expected, (int, float))
        return numbers and (returned == expected or _close(returned, expected))
    return returned == expected


def _lines(text: str) -> list[list[str]]:
    lines = [line.split() for line in text.splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _same_line(given: list[str], wanted: list[str]) -> bool:
    return len(given) == len(wanted) and all(map(_same_word, given, wanted))


def _same_word(given: str, wanted: str) -> bool:
    if given == wanted:
        return True
    if max(len(given), len(wanted)) > _LONGEST_NUMBER:
        return False
    if _INTEGER.fullmatch(given) and _INTEGER.fullmatch(wanted):
        return False
    if not (_NUMBER.fullmatch(given) and _NUMBER.fullmatch(wanted)):
        return False
    return _close(float(given), float(wanted))


def _close(given: float, wanted: float) -> bool:
    try:
        given, wanted = float(given), float(wanted)
    except OverflowError:  # an integer
        return False
    if not (math.isfinite(given) and math.isfinite(wanted)):
        return False
    return abs(given - wanted) <= TOLERANCE * max(1.0, abs(wanted))
