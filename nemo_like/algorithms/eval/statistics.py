"""Unbiased estimators of a model's quality, exact where they are rational."""

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
    """A mean over prompts, and its 95 % confidence interval; None where prompts do not show one."""

    mean: float
    low: float | None
    high: float | None
    num_prompts: int


def mean_of_prompts(groups: Sequence[Sequence[float]]) -> Estimate:
    """Mean over prompts of the mean over each prompt's completions.

    The interval is mean +- 1.96 standard errors over *prompts*: completions of one prompt are not
    independent, and more of them alone do not make it narrower (arXiv:2411.00640
    section 2.2). Of one prompt, and of prompts that are all equal, there is none: no spread is not
    certainty. ``groups`` is not empty, and none of them is.

    >>> mean_of_prompts([[0.0, 1.0], [1.0, 1.0]]).mean
    0.75
    """
    mean, squares, means = _over_prompts(groups)
    if len(set(means)) == 1:
        return Estimate(mean=mean, low=None, high=None, num_prompts=len(means))
    half = _NORMAL_95 * math.sqrt(squares / (len(means) - 1) / len(means))
    return Estimate(mean=mean, low=mean - half, high=mean + half, num_prompts=len(means))


def share_of_prompts(groups: Sequence[Sequence[float]]) -> Estimate:
    """``mean_of_prompts`` of numbers in [0, 1], whose interval lies there too.

    It is Wilson's (1927): of n prompts with one completion each, that of n trials, which has a
    width even where all or none pass. Means that spread less than such trials would, by a factor
    f of their variance, count as n / f trials, as in a sample of clusters (Korn and Graubard 1998).

    >>> found = share_of_prompts([[1.0], [1.0], [1.0], [0.0]])
    >>> round(found.low, 4), round(found.high, 4)
    (0.3006, 0.9544)
    """
    mean, squares, means = _over_prompts(groups)
    count = len(means)
    if count == 1 or (len(set(means)) == 1 and 0 < mean < 1):
        return Estimate(mean=mean, low=None, high=None, num_prompts=count)
    binomial = mean * (1 - mean)
    trials = count * binomial / (squares / count) if binomial > 0 else count
    share = _NORMAL_95**2 / trials
    centre = (mean + share / 2) / (1 + share)
    half = math.sqrt(share * binomial + share**2 / 4) / (1 + share)
    # Bounds that are 0 or 1 on paper may miss by rounding.
    low, high = max(0.0, centre - half), max(mean, min(1.0, centre + half))
    return Estimate(mean=mean, low=low, high=high, num_prompts=count)


def _over_prompts(groups: Sequence[Sequence[float]]) -> tuple[float, float, list[float]]:
    """Mean of the prompts' means, sum of squared deviations from it, and the means."""
    means = [math.fsum(group) / len(group) for group in groups]
    mean = math.fsum(means) / len(means)
    return mean, math.fsum((one - mean) ** 2 for one in means), means


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
    frequent each wins with the same chance. Where equal answers were scored differently, theirs
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
