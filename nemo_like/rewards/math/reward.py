r"""The reward for mathematics with a known answer: 1 if the response states that answer, else 0.

What counts as stating it is in ``extract``, what counts as equal in ``compare``. Where
mathematics leaves a choice, it is made as follows.

- Only the last box counts, unless a final statement follows it ("Final answer: 42", "The correct
  option is C"); of several statements, the last one. A last box, answer tag or ``<think>`` block
  that is not closed states nothing; without a box there must be a phrase such as "the answer is",
  ``#### 42`` or nothing but the answer itself.
- 28%, 28 and 0.28 are right where 28% is asked for, since the question may say "in percent"; where
  0.28 is asked for, 28% is right and 0.28% is not.
- Units and degree marks may be left out or added, but not be different known units (cm, m; cm^2,
  cm^3; km/h, m/s).
- Order does not matter in sets and bare lists, and the braces of a set may be missing. It does in
  pairs. A set may name a member twice. A bare ``1, 2`` passes for the pair (1, 2). (1,234) is a
  pair and 1,234 a number.
- An inequality in one unknown is its interval; open and closed ends differ. ``x \ne 2`` is two.
- ``x = 5``, ``f(2) = 5``, ``m + n = 5`` and, for a pair, ``(x, y) = (5, 1)`` pass for the value,
  but not ``2x = 5`` or ``x = 5k``. Of ``\frac13 \approx 0.33`` the exact value counts.
- A decimal with three significant digits or more passes for a number whose decimals never end, if
  it is rounded right. There is no other tolerance.
- Expressions are equal if they agree wherever both are real; roots of n are taken for n > 0.
- A base (52_8) or a modulus may be left out, but not be another one. ``10:30`` is compared part by
  part.
- The letter of a choice may stand before or after the answer, and either of them for ``(A) 5``, but
  no other letter. Its case does not matter for a choice; b and B are two variables where the row's
  answer is b. "B or C" makes no choice, and neither does a sentence that only rejects some.
- An answer that the last sentence takes back ("That is wrong.") is none.
- An integral or a limit is the question, and no answer, unless the row's own answer has one.
- ``]0, 1[`` is an open interval. Digits may be grouped as in 1,234, 1 234, 1'234, 1_234, 1.234.567
  and 12,34,567; a single point is that of a decimal.
- Answers in words are compared as text, without regard to case and articles.
"""

import math
from typing import Any

from nemo_like.rewards.math.compare import MAX_CHARACTERS, comparable, equal
from nemo_like.rewards.math.expression import number_of
from nemo_like.rewards.math.extract import extract, gold_answer
from nemo_like.rewards.math.text import join_thousands, squash, tidy
from nemo_like.rewards.math.units import strip_units

__all__ = ["extract", "has_readable_answer", "reward", "verify"]


def reward(prompt: str, completion: str, answer: object, **fields: Any) -> dict[str, Any]:
    """Score one completion against the row's ``answer``, a text or a number.

    ``answered`` says whether the completion stated any answer. A row whose own answer cannot be
    read gets a reward of None, unless the completion has the very same text: nothing can be right
    or wrong there.
    """
    gold = _gold(answer)
    given = extract(completion, gold)
    is_right = given is not None and equal(gold, given)
    if not is_right and not comparable(gold):
        error = f"the row's answer cannot be read as a text or number: {str(answer)[:100]!r}"
        return {"reward": None, "error": error}
    right = float(is_right)
    answered = float(given is not None)
    stated = None if given is None else spelling(given)
    return {"reward": right, "accuracy": right, "answered": answered, "answer": stated}


def spelling(text: str) -> str:
    r"""One spelling of an answer, and of a number one form: what votes are counted by.

    >>> spelling(r"$\frac12$"), spelling("0.50"), spelling("x + 1")
    ('1/2', '1/2', 'x+1')
    """
    if len(text) > MAX_CHARACTERS:
        return squash(text)
    tidied = join_thousands(tidy(text))
    value, _, is_percentage = strip_units(tidied)
    number = None if is_percentage else number_of(value)
    try:
        return squash(tidied) if number is None else str(number)
    except ValueError:  # more digits than Python writes
        return squash(tidied)


def has_readable_answer(answer: object) -> bool:
    """Whether a row's ``answer`` can be compared with what a completion states."""
    return comparable(_gold(answer))


def _gold(answer: object) -> str:
    is_readable = isinstance(answer, (str, int)) or (
        isinstance(answer, float) and math.isfinite(answer)
    )
    return gold_answer(str(answer)) if is_readable else ""


def verify(response: str, gold: str) -> bool:
    """Whether the response states the gold answer; sets no timers, so any thread may call it."""
    return reward("", response, gold)["reward"] == 1.0
