"""Advantages from rewards: within the group of a prompt, over a step, or along a row.

All is float64, with two-pass standard deviations: E[x^2] - E[x]^2 in float32 leaves about 1e-7 for
equal rewards such as 0.95, and dividing by its root makes a lone failure an advantage of -2000.

Legend: ``B`` rows of the step, ``N`` tokens of all rows end to end, ``M`` trained ones among them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_like.batch import keys
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.config.advantages import AdvantageConfig
from nemo_like.losses.protocol import trained_tokens

# Rewards that differ by less than this share of their size are equal; their spread is rounding.
_RELATIVE_SPREAD = 1e-9


def group_advantages(
    rewards: Tensor, groups: Tensor, valid: Tensor, config: AdvantageConfig
) -> Tensor:
    """Centre, and optionally scale, each reward by the rewards of its group or of the step.

    ``rewards`` [B], ``groups`` [B] (equal numbers are siblings, in any order), ``valid`` [B] bool:
    rows that are not valid take no part in any statistic and get 0. Returns float32 [B].

    Baselines: ``leave_one_out`` subtracts the mean of the *other* valid rows (RLOO,
    arXiv:2402.14740 Eq. 7), and 0 is the advantage where there is none; ``mean`` that of all valid
    rows of the group (GRPO, arXiv:2402.03300 section 4.1.2); ``none`` nothing. Scales: ``std``
    divides by the standard deviation of the baseline's rows (of the whole group without a
    baseline); ``batch`` is ``whiten`` over all valid rows (REINFORCE++, arXiv:2501.03262).
    Deviations are unbiased (n - 1), without an epsilon; one that is zero, or of a single row, does
    not divide.

    >>> config = AdvantageConfig(baseline="mean", scale="std")
    >>> r = torch.tensor([1.0, 0, 0, 0])
    >>> group_advantages(r, torch.zeros(4), torch.ones(4, dtype=torch.bool), config).tolist()
    [1.5, -0.5, -0.5, -0.5]
    """
    if not valid.any():
        return torch.zeros(len(valid))
    # One line a group, [P, G]; then what rows are compared with: their group, [P, 1, G], or all
    # others in it, [P, G, G].
    line, slot, shape = grid(groups)
    x, ok = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.bool)
    x[line, slot] = torch.where(valid, rewards.double(), 0.0)
    ok[line, slot] = valid
    weight = ok[:, None, :].double()
    if config.baseline == "leave_one_out":
        weight = weight * (1 - torch.eye(shape[1], dtype=torch.float64))
    count = weight.sum(-1)
    mean = (weight * x[:, None, :]).sum(-1) / count.clamp(min=1)
    size = (weight * x.abs()[:, None, :]).amax(-1)
    advantage = x if config.baseline == "none" else x - mean
    # Of equal rewards rounding may be left, which a scale over other groups would blow up.
    counts = ok & (count > 0) & (advantage.abs() > _RELATIVE_SPREAD * size)
    advantage = torch.where(counts, advantage, 0)
    if config.scale == "std":
        squares = (weight * (x[:, None, :] - mean[:, :, None]).square()).sum(-1)
        deviation = (squares / (count - 1).clamp(min=1)).sqrt()
        spread = deviation > _RELATIVE_SPREAD * size
        advantage = torch.where(spread, advantage / deviation.clamp(min=1e-300), advantage)
    elif config.scale == "batch":
        advantage = whiten(advantage, ok)
    return advantage[line, slot].float()


def by_task(make: Callable[..., Tensor], tasks: Tensor, *columns: Tensor) -> Tensor:
    """Apply ``make`` to the rows of each task separately: float32 [B].

    >>> x, tasks = torch.tensor([1.0, 3.0, 10.0, 30.0]), torch.tensor([4, 4, 2, 2])
    >>> by_task(lambda part: part - part.mean(), tasks, x).tolist()
    [-1.0, 1.0, -10.0, 10.0]
    """
    made = torch.zeros(len(tasks))
    for task in tasks.unique():
        here = tasks == task
        made[here] = make(*(column[here] for column in columns))
    return made


def reward_to_go(steps: Tensor) -> Tensor:
    """Sum of each step [..., K] and all later ones.

    >>> reward_to_go(torch.tensor([[1.0, 0.0, 2.0]])).tolist()
    [[3.0, 2.0, 2.0]]
    """
    return steps.flip(-1).cumsum(-1).flip(-1)


def advantages_of_turns(batch: TensorBatch) -> tuple[dict[str, Tensor], None]:
    """Token column ``advantages``: each trained token gets that of its completion."""
    at, row = trained_tokens(batch)
    advantages = torch.zeros(batch.num_tokens)
    of_completion = batch.rows[keys.STEP_ADVANTAGES]
    advantages[at] = of_completion[row, batch.tokens[keys.TURNS][at]].float()
    return {keys.ADVANTAGES: advantages}, None


def of_trained(rows: Mapping[str, Tensor]) -> Tensor:
    """Advantages of rows that train, or of their steps with a reward; empty if tokens have them."""
    trains = rows[keys.SAMPLE_MASK]
    if keys.STEP_ADVANTAGES in rows:
        return rows[keys.STEP_ADVANTAGES][trains[:, None] & ~rows[keys.STEP_REWARDS].isnan()]
    return rows[keys.ADVANTAGES][trains] if keys.ADVANTAGES in rows else torch.zeros(0)


def has_signal(rewards: Tensor, groups: Tensor, valid: Tensor) -> Tensor:
    """Whether the valid rewards of a row's group differ: bool [B], one answer for all its rows.

    Dynamic sampling keeps these groups (DAPO, arXiv:2503.14476 Eq. 11). Pass rewards before
    any length penalty, which would make even a group of wrong answers differ.

    >>> groups, valid = torch.tensor([0, 1, 0, 1]), torch.ones(4, dtype=torch.bool)
    >>> has_signal(torch.tensor([1.0, 0, 0, 0]), groups, valid).tolist()
    [True, False, True, False]
    """
    unique, line = groups.unique(return_inverse=True)
    at, scored = line[valid], rewards[valid].double()
    none = torch.full((len(unique),), torch.inf, dtype=torch.float64, device=rewards.device)
    lowest = none.scatter_reduce(0, at, scored, "amin")
    highest = (-none).scatter_reduce(0, at, scored, "amax")
    size = torch.maximum(lowest.abs(), highest.abs())
    return (highest - lowest > _RELATIVE_SPREAD * size)[line]


def zero_variance_share(rewards: Tensor, groups: Tensor, valid: Tensor) -> float:
    """Share of groups whose valid rewards are all equal: they carry no signal. No groups: NaN."""
    signal = valid & has_signal(rewards, groups, valid)
    num_groups = len(groups[valid].unique())
    return 1 - len(groups[signal].unique()) / num_groups if num_groups else float("nan")


def overlong_penalty(lengths: Tensor, max_new_tokens: int, buffer_tokens: int) -> Tensor:
    """What to *add* to the rewards of completions of ``lengths`` [B] tokens: float64 [B], <= 0.

    0 up to max_new_tokens - buffer_tokens, from there a line down to -1 at max_new_tokens
    (DAPO, arXiv:2503.14476 Eq. 13). No buffer: no penalty.

    >>> overlong_penalty(torch.tensor([5, 6, 8, 10, 11]), 10, 4).tolist()
    [0.0, 0.0, -0.5, -1.0, -1.0]
    """
    if buffer_tokens == 0:
        return torch.zeros(len(lengths), dtype=torch.float64, device=lengths.device)
    left = max_new_tokens - buffer_tokens - lengths.double()
    return (left / buffer_tokens).clamp(-1, 0)


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """``x`` less the mean of what ``mask`` selects, over its unbiased standard deviation.

    Unselected numbers stay as they are, and so does all of ``x`` if fewer than two are selected. A
    deviation of zero does not divide.

    >>> whiten(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False])).tolist()
    [-0.7071067690849304, 0.7071067690849304, 9.0]
    """
    chosen = x[mask]
    return x.masked_scatter(mask, Moments.of(chosen).whiten(chosen))


@dataclass(frozen=True, kw_only=True)
class Moments:
    """What ``whiten`` must know of numbers that may lie on several ranks.

    >>> parts = [Moments.of(torch.tensor(part)) for part in ([1.0, 2.0], [], [6.0])]
    >>> Moments.joined(parts) == Moments.of(torch.tensor([1.0, 2.0, 6.0]))
    True
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of squared deviations from the mean."""
    largest: float = 0.0

    @staticmethod
    def of(x: Tensor) -> "Moments":
        if x.numel() == 0:
            return Moments()
        exact = x.double()
        mean = exact.mean()
        return Moments(
            count=x.numel(),
            mean=mean.item(),
            squares=(exact - mean).square().sum().item(),
            largest=exact.abs().max().item(),
        )

    @staticmethod
    def joined(parts: Sequence["Moments"]) -> "Moments":
        count = sum(part.count for part in parts)
        if count == 0:
            return Moments()
        mean = math.fsum(part.count * part.mean for part in parts) / count
        # Deviations from a part's mean, and those of the part's mean from that of all.
        squares = math.fsum(part.squares + part.count * (part.mean - mean) ** 2 for part in parts)
        largest = max(part.largest for part in parts)
        return Moments(count=count, mean=mean, squares=squares, largest=largest)

    @property
    def deviation(self) -> float:
        """Unbiased standard deviation; 0 of fewer than two."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0

    def whiten(self, x: Tensor) -> Tensor:
        if self.count < 2:
            return x
        centred = x.double() - self.mean
        if self.deviation > _RELATIVE_SPREAD * self.largest:
            centred = centred / self.deviation
        return centred.to(x.dtype)


def grid(groups: Tensor) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """For each row the line of its group and its place in it, [B] each; and the grid's shape."""
    _, line, sizes = groups.unique(return_inverse=True, return_counts=True)
    order = line.argsort(stable=True)
    slot = torch.empty_like(line)
    places = torch.arange(len(line), device=line.device)
    slot[order] = places - (sizes.cumsum(0) - sizes)[line[order]]
    return line, slot, (len(sizes), int(sizes.max()))
