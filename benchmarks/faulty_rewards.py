"""Rewards with faults that alarms name; ``benchmarks/recommendations.py`` runs them."""

import random
import time
from typing import Any

_SLEEP_S = 0.1
_calls = 0


def seldom_differs(prompt: str, completion: str, **_: Any) -> float:
    """Nearly always the same within a group, so its completions train nothing."""
    return (len(prompt) % 2) + (random.Random(prompt + completion).random() < 0.008)


def slow_rows(prompt: str, completion: str, slow: bool, **_: Any) -> float:
    """Slow for later rows, as a server that is under load by then."""
    if slow:
        time.sleep(_SLEEP_S)
    return len(completion) % 7 / 7


def longer_but_never_enough(prompt: str, completion: str, **_: Any) -> float:
    """Prefers long completions, but asks for more all the time."""
    return _less_each_time(len(completion) / 256)


def shorter_but_never_enough(prompt: str, completion: str, **_: Any) -> float:
    """Prefers short completions, but asks for less all the time."""
    return _less_each_time(-len(completion) / 256)


def _less_each_time(value: float) -> float:
    global _calls
    _calls += 1
    return value - 0.002 * _calls
