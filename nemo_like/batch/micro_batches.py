"""Which row goes to which rank, and in which of its forward passes: a pure plan from lengths.

The plan changes speed and memory only. A loss is a sum over tokens or pairs, divided by one global
denominator, so any plan gives the same gradient.
"""

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from nemo_like.errors import UserError

USUAL_ATTENTION_TOKENS = 12 * 2048
"""``attention_tokens`` of a model whose config.json leaves sizes out, for a width h of 2,048: 4 h^2
weights around attention and 8 h^2 in the feed-forward part. It decides speed only."""
OMITTED_PER_TOKEN = 16
"""Omitted tokens of prompts that count as one token of a bin, for each row has copies of their keys
and values: about what these take of a layer's memory with six or more query heads per key head.
Models with fewer take up to 2.7 times as much."""


@dataclass(frozen=True, kw_only=True)
class MicroBatchPlan:
    """``bins[rank][i]`` holds the row indices of the i-th forward pass of a data-parallel rank.

    Every rank has as many bins, in order of falling cost: ranks meet in collectives once a layer,
    in passes of similar size. A rank with too few rows has empty bins at its end.
    """

    bins: tuple[tuple[tuple[int, ...], ...], ...]

    def rows(self, rank: int) -> list[int]:
        return [row for one in self.bins[rank] for row in one]


def plan_micro_batches(
    lengths: Sequence[int],
    *,
    num_ranks: int,
    max_tokens: int,
    max_rows: int | None = None,
    padded: bool = False,
    rows_per_unit: int = 1,
    attention_tokens: int = USUAL_ATTENTION_TOKENS,
    min_bins: int = 1,
    bins_multiple: int = 1,
    prompts: Sequence[tuple[int, int]] | None = None,
) -> MicroBatchPlan:
    """Deal rows to ranks by equal cost, then pack each rank's rows into few bins.

    A row costs length + length^2 / ``attention_tokens`` (``model_shape.attention_tokens``).
    ``max_tokens`` bounds a bin: the sum of its lengths, or rows x longest where ``padded``;
    ``max_rows`` bounds its rows. Each ``rows_per_unit`` consecutive rows stay together and in
    order. Ranks have at least ``min_bins`` bins, a multiple of ``bins_multiple`` (pipelines need
    both): bins are split for it, and empty once no bin has two units.

    ``prompts``: each row's prompt (a number) and its tokens. A row after one with the same prompt
    omits it, but for a part (``OMITTED_PER_TOKEN``). Neighbours with one prompt share a bin where
    that fits and leaves ranks equal work. Not with ``padded`` or ``max_rows``.

    Raises UserError if rows that must stay together exceed a bound alone.

    >>> plan_micro_batches([5, 1, 4, 2], num_ranks=2, max_tokens=6).bins
    (((0, 1),), ((2, 3),))
    >>> plan_micro_batches([5, 1, 4, 2], num_ranks=1, max_tokens=12, min_bins=3).bins
    (((2, 3), (0,), (1,)),)
    """
    assert len(lengths) % rows_per_unit == 0, f"{len(lengths)} rows, {rows_per_unit} to a unit"
    assert prompts is None or not (padded or max_rows)
    rows = _Rows(lengths, prompts, attention_tokens, padded)
    units = [tuple(range(i, i + rows_per_unit)) for i in range(0, len(lengths), rows_per_unit)]
    _check_bounds(units, list(map(rows.size, units)), max_tokens, max_rows, rows_per_unit)

    def pack(units: Sequence[tuple[int, ...]]) -> tuple[int, MicroBatchPlan]:
        sizes, costs = list(map(rows.size, units)), list(map(rows.cost, units))
        max_units = len(units) if max_rows is None else max_rows // rows_per_unit
        hands = _deal(range(len(units)), costs, num_ranks)
        fit = _pack_padded if padded else _first_fit
        packed = [
            fit(sorted(hand, key=lambda unit: (-sizes[unit], unit)), sizes, max_tokens, max_units)
            for hand in hands
        ]
        most = max(min_bins, *map(len, packed))
        num_bins = math.ceil(most / bins_multiple) * bins_multiple
        split = [_split(bins, costs, num_bins) for bins in packed]
        plan = MicroBatchPlan(
            bins=tuple(
                tuple(tuple(row for unit in one for row in units[unit]) for one in bins)
                for bins in split
            )
        )
        return max(sum(costs[unit] for unit in hand) for hand in hands), plan

    return min(map(pack, rows.ways(units, max_tokens, num_ranks)), key=lambda way: way[0])[1]


@dataclass(frozen=True)
class _Rows:
    """Size and cost of units of rows."""

    lengths: Sequence[int]
    prompts: Sequence[tuple[int, int]] | None
    attention_tokens: int
    padded: bool

    def size(self, unit: Sequence[int]) -> int:
        """Tokens of a pass over ``unit``."""
        lengths = [self.lengths[row] for row in unit]
        if self.padded:
            return max(lengths) * len(unit)
        return sum(lengths) - sum(n - -(-n // OMITTED_PER_TOKEN) for n in self._spared(unit))

    def cost(self, unit: Sequence[int]) -> int:
        """Length + length^2 / attention_tokens, times attention_tokens to stay exact."""
        at = self.attention_tokens
        return sum((n := self.lengths[row]) * (at + n) for row in unit) - sum(
            n * (at + n) for n in self._spared(unit)
        )

    def _spared(self, unit: Sequence[int]) -> list[int]:
        prompts = self.prompts
        if prompts is None:
            return []
        pairs = pairwise(unit)
        return [prompts[b][1] for a, b in pairs if prompts[a] == prompts[b]]

    def ways(
        self, units: list[tuple[int, ...]], max_tokens: int, num_ranks: int
    ) -> list[list[tuple[int, ...]]]:
        """Whole groups as units, smaller and smaller parts that ranks can share, single units."""
        if self.prompts is None:
            return [units]
        largest = max(Counter(number for number, _ in self.prompts).values(), default=1)
        parts = [-(-largest // 2**i) for i in range(largest.bit_length() if num_ranks > 1 else 1)]
        return [*(self._joined(units, max_tokens, most) for most in parts), units]

    def _joined(
        self, units: Iterable[tuple[int, ...]], max_tokens: int, max_rows: int
    ) -> list[tuple[int, ...]]:
        """Merge neighbouring units with one prompt, up to ``max_tokens`` and ``max_rows``."""
        assert self.prompts is not None
        found: list[tuple[int, ...]] = []
        for unit in units:
            if (
                found
                and self.prompts[found[-1][-1]] == self.prompts[unit[0]]
                and len(found[-1]) + len(unit) <= max_rows
                and self.size(found[-1] + unit) <= max_tokens
            ):
                found[-1] += unit
            else:
                found.append(unit)
        return found


def _check_bounds(
    units: Sequence[Sequence[int]],
    sizes: Sequence[int],
    max_tokens: int,
    max_rows: int | None,
    rows_per_unit: int,
) -> None:
    largest = max(sizes, default=0)
    if largest > max_tokens:
        what = "the longest sequence"
        if rows_per_unit > 1:
            what = f"the {rows_per_unit} longest sequences that must stay together"
        raise UserError(
            f"policy.micro_batch_tokens={max_tokens} is smaller than {what}, "
            f"{largest} tokens; use at least {largest}."
        )
    if units and max_rows is not None and max_rows < rows_per_unit:
        raise UserError(
            f"policy.micro_batch_size={max_rows} is smaller than the {rows_per_unit} sequences "
            f"that must stay together; use at least {rows_per_unit}."
        )


def _deal(units: Iterable[int], costs: Sequence[int], num_hands: int) -> list[list[int]]:
    """Most expensive unit first, to the least loaded rank (LPT): within 4/3 of the optimum."""
    hands: list[list[int]] = [[] for _ in range(num_hands)]
    # Equal costs: the hand with fewer units is next, or units without cost would pile up in one.
    loads = [(0, 0, hand) for hand in range(num_hands)]
    for unit in sorted(units, key=lambda unit: (-costs[unit], unit)):
        load, count, hand = loads[0]
        hands[hand].append(unit)
        heapq.heapreplace(loads, (load + costs[unit], count + 1, hand))
    return hands


def _first_fit(
    units: Sequence[int], sizes: Sequence[int], max_tokens: int, max_units: int
) -> list[list[int]]:
    """First-fit decreasing: each of ``units``, largest first, goes to the first bin with room.

    ``room`` is a binary tree over as many bins as there can be: node i has children 2i and 2i + 1
    and the larger room of the two, so that bin is found in log(bins) steps.
    """
    bins: list[list[int]] = []
    num_leaves = 1 << max(len(units) - 1, 0).bit_length()
    room = [max_tokens] * (2 * num_leaves)
    for unit in units:
        node = 1
        while node < num_leaves:
            node *= 2
            if room[node] < sizes[unit]:
                node += 1
        if node - num_leaves == len(bins):
            bins.append([])
        one = bins[node - num_leaves]
        one.append(unit)
        room[node] = room[node] - sizes[unit] if len(one) < max_units else -1
        while node > 1:
            larger = max(room[node], room[node ^ 1])
            node //= 2
            if room[node] == larger:
                break
            room[node] = larger
    return bins


def _pack_padded(
    units: Sequence[int], sizes: Sequence[int], max_tokens: int, max_units: int
) -> list[list[int]]:
    """First-fit decreasing where every unit takes the room of its bin's first, the largest.

    A bin then has room for any later unit or for none, so only the last one is ever open.
    """
    bins: list[list[int]] = []
    for unit in units:
        one = bins[-1] if bins else []
        if one and len(one) < max_units and sizes[one[0]] * (len(one) + 1) <= max_tokens:
            one.append(unit)
        else:
            bins.append([unit])
    return bins


def _split(bins: list[list[int]], costs: Sequence[int], num_bins: int) -> list[list[int]]:
    """Halve the costliest bin until there are ``num_bins``; then add empty ones."""

    def ranked(one: list[int]) -> tuple[bool, int, list[int]]:
        return len(one) == 1, -sum(costs[unit] for unit in one), one

    heap = [ranked(one) for one in bins]
    heapq.heapify(heap)
    while heap and len(heap) < num_bins:
        is_single, _, dearest = heap[0]
        if is_single:
            break
        heapq.heappop(heap)
        for half in _deal(dearest, costs, 2):
            heapq.heappush(heap, ranked(half))
    filled = [one for _, one in sorted((cost, one) for _, cost, one in heap)]
    return filled + [[] for _ in range(num_bins - len(filled))]
