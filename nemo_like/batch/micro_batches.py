"""Which row goes to which rank, and in which of its forward passes: a pure plan from lengths.

The plan changes speed and memory only. The loss is a sum over tokens divided by one global
denominator, so any plan gives the same gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from nemo_like.errors import UserError


@dataclass(frozen=True, kw_only=True)
class MicroBatchPlan:
    """``bins[rank][i]`` holds the row indices of the i-th forward pass of a data-parallel rank.

    Every rank has the same number of bins, because ranks meet in collectives once a layer in every
    pass; a rank with less work has empty bins at its end.
    """

    bins: tuple[tuple[tuple[int, ...], ...], ...]

    def rows(self, rank: int) -> list[int]:
        """Row indices of one rank in the order of its bins."""
        return [row for one in self.bins[rank] for row in one]


def plan_micro_batches(
    lengths: Sequence[int],
    *,
    num_ranks: int,
    max_tokens: int,
    max_rows: int | None = None,
    padded: bool = False,
) -> MicroBatchPlan:
    """Deal rows to ranks by equal token counts, then pack each rank's rows into few bins.

    ``max_tokens`` bounds one bin: the sum of its lengths, or rows x longest where ``padded``.
    Raises UserError if one row alone is longer.

    >>> plan_micro_batches([5, 1, 4, 2], num_ranks=2, max_tokens=6).bins
    (((0, 1),), ((2, 3),))
    """
    longest = max(lengths, default=0)
    if longest > max_tokens:
        raise UserError(
            f"policy.micro_batch_tokens={max_tokens} is smaller than the longest sequence, "
            f"{longest} tokens; use at least {longest}."
        )
    bins = [
        _first_fit(rows, lengths, max_tokens, max_rows, padded)
        for rows in _deal(lengths, num_ranks)
    ]
    most = max(len(one) for one in bins)
    return MicroBatchPlan(bins=tuple(tuple(one + [()] * (most - len(one))) for one in bins))


def _deal(lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Longest row first to the rank with the fewest tokens (LPT): within 4/3 of the optimum."""
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    load = [0] * num_ranks
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        lightest = min(range(num_ranks), key=lambda rank: (load[rank], rank))
        ranks[lightest].append(row)
        load[lightest] += lengths[row]
    return ranks


def _first_fit(
    rows: list[int], lengths: Sequence[int], max_tokens: int, max_rows: int | None, padded: bool
) -> list[tuple[int, ...]]:
    """First-fit decreasing: ``rows`` come longest first, so a bin's first row is its longest."""
    bins: list[list[int]] = []
    used: list[int] = []
    for row in rows:
        for i, one in enumerate(bins):
            size = lengths[one[0]] * (len(one) + 1) if padded else used[i] + lengths[row]
            if size <= max_tokens and (max_rows is None or len(one) < max_rows):
                one.append(row)
                used[i] += lengths[row]
                break
        else:
            bins.append([row])
            used.append(lengths[row])
    return [tuple(one) for one in bins]
