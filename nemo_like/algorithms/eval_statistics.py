"""What samples tell of a model: estimators without bias, exact where they are rational."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import comb

_NORMAL_95 = 1.959963984540054
"""Standard deviations to either side of a mean that hold 95 % of a normal distribution."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over prompts, and its 95 % confidence interval; None where one prompt shows none."""

    mean: float
    low: float | None
    high: float | None
    num_prompts: int


def mean_of_prompts(groups: Sequence[Sequence[float]]) -> Estimate:
    """Mean over prompts of the mean over each prompt's completions.

    The interval is mean +- 1.96 standard errors over *prompts*: completions of one prompt are not
    independent, so that more of them do not make it narrower by themselves (arXiv:2411.00640
    section 2.2). ``groups`` is not empty, and none of them is.

    >>> mean_of_prompts([[0.0, 1.0], [1.0, 1.0]]).mean
    0.75
    """
    means = [math.fsum(group) / len(group) for group in groups]
    count = len(means)
    mean = math.fsum(means) / count
    if count == 1:
        return Estimate(mean=mean, low=None, high=None, num_prompts=1)
    variance = math.fsum((one - mean) ** 2 for one in means) / (count - 1)
    half = _NORMAL_95 * math.sqrt(variance / count)
    return Estimate(mean=mean, low=mean - half, high=mean + half, num_prompts=count)


def pass_at(n: int, c: int, k: int) -> Fraction:
    """Chance that at least one of k completions passes, of n drawn ones that c of passed.

    Without bias for k <= n (arXiv:2107.03374 Eq. 1).

    >>> pass_at(4, 1, 2)
    Fraction(1, 2)
    """
    assert 0 <= c <= n
    assert 1 <= k <= n
    return 1 - Fraction(comb(n - c, k), comb(n, k))


def majority_at(votes: Sequence[tuple[str, bool]], k: int) -> Fraction:
    """Chance that the most frequent answer of k of these completions passes.

    ``votes``: answer and whether it passed, of each completion; an empty answer has no vote, and k
    completions without a vote do not pass. Exact over all subsets of k; of answers that are equally
    frequent each wins with the same chance. Where equal answers were graded differently, theirs
    passes with the share that did.

    >>> majority_at([("4", True), ("4", True), ("5", False)], 3)
    Fraction(1, 1)
    >>> majority_at([("4", True), ("5", False)], 2)
    Fraction(1, 2)
    """
    assert 1 <= k <= len(votes)
    counts = Counter(answer for answer, _ in votes)
    passed = Counter(answer for answer, right in votes if right)
    silent = counts.pop("", 0)
    won = Fraction(0)
    for answer, count in counts.items():
        if passed[answer]:
            others = [other for name, other in counts.items() if name != answer]
            share = Fraction(passed[answer], count)
            won += share * _wins(count, others, silent, k)
    return won / comb(len(votes), k)


def _wins(count: int, others: Sequence[int], silent: int, k: int) -> Fraction:
    """Subsets of k that an answer with ``count`` votes wins, those with ties by their share."""
    won = Fraction(0)
    for own in range(1, min(count, k) + 1):
        left = k - own
        # Ways to draw s of the others' votes, none of them above ``own``, with j of them equal.
        ways = {(0, 0): 1}
        for other in others:
            ways = _with_answer(ways, other, own, left)
        ways = _with_answer(ways, silent, None, left)
        for (drawn, ties), number in ways.items():
            if drawn == left:
                won += Fraction(comb(count, own) * number, ties + 1)
    return won


def _with_answer(
    ways: dict[tuple[int, int], int], count: int, most: int | None, left: int
) -> dict[tuple[int, int], int]:
    """One more answer with ``count`` votes; ``most`` None: its votes are not counted."""
    found: Counter[tuple[int, int]] = Counter()
    for (drawn, ties), number in ways.items():
        for votes in range(min(count, left - drawn, left if most is None else most) + 1):
            found[drawn + votes, ties + (votes == most)] += number * comb(count, votes)
    return found
