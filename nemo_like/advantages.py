"""Advantages from rewards, within the group of one prompt. Everything here is float64.

Float64 and a two-pass standard deviation, because E[x^2] - E[x]^2 in float32 leaves about 1e-7 for
equal rewards such as 0.95, and dividing by its root turns a lone failure into an advantage of
-2000.
"""

import torch
from torch import Tensor

from nemo_like.config.choices import AdvantageScale, Baseline
from nemo_like.config.loss_schema import AdvantageConfig

# Rewards that differ by less than this share of their size are equal; their spread is rounding.
_RELATIVE_SPREAD = 1e-9


def group_advantages(
    rewards: Tensor, groups: Tensor, valid: Tensor, config: AdvantageConfig
) -> Tensor:
    """Centre, and optionally scale, each reward by the rewards of its group.

    ``rewards`` [B], ``groups`` [B] (equal numbers are siblings, in any order), ``valid`` [B] bool:
    rows that are not valid take no part in any statistic and get 0. Returns float32 [B].

    ``leave_one_out`` subtracts the mean of the *other* valid rows and divides by *their* standard
    deviation (RLOO, arXiv:2402.14740 Eq. 7); ``mean`` uses all valid rows of the group (GRPO,
    arXiv:2402.03300 Eq. 3). Deviations are unbiased (n - 1). Where the deviation is zero the
    centred reward is left as it is; where no baseline exists (no valid sibling) the advantage is 0.

    >>> config = AdvantageConfig(baseline=Baseline.mean, scale=AdvantageScale.std)
    >>> r = torch.tensor([1.0, 0, 0, 0])
    >>> group_advantages(r, torch.zeros(4), torch.ones(4, dtype=torch.bool), config).tolist()
    [1.5, -0.5, -0.5, -0.5]
    """
    # One line a group, [P, G]; then each row against its siblings, [P, G, G].
    line, slot, shape = _grid(groups)
    x, ok = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.bool)
    x[line, slot] = torch.where(valid, rewards.double(), 0.0)
    ok[line, slot] = valid
    weight = (ok[:, None, :] & ok[:, :, None]).double()
    if config.baseline is Baseline.leave_one_out:
        weight = weight * (1 - torch.eye(shape[1], dtype=torch.float64))
    count = weight.sum(-1)
    mean = (weight * x[:, None, :]).sum(-1) / count.clamp(min=1)
    centred = torch.where(count > 0, x - mean, 0.0)
    if config.scale is AdvantageScale.std:
        squares = (weight * (x[:, None, :] - mean[:, :, None]).square()).sum(-1)
        deviation = (squares / (count - 1).clamp(min=1)).sqrt()
        size = (weight * x.abs()[:, None, :]).amax(-1)
        spread = (count > 1) & (deviation > _RELATIVE_SPREAD * size)
        centred = torch.where(spread, centred / deviation.clamp(min=1e-300), centred)
    return centred[line, slot].float()


def zero_variance_share(rewards: Tensor, groups: Tensor, valid: Tensor) -> float:
    """Share of groups whose valid rewards are all equal: they carry no signal. No groups: NaN."""
    flat = [
        bool((members == members[0]).all())
        for group in groups.unique()
        if len(members := rewards[(groups == group) & valid]) > 0
    ]
    return sum(flat) / len(flat) if flat else float("nan")


def _grid(groups: Tensor) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """For each row the line of its group and its place in it, [B] each; and the grid's shape."""
    _, line, sizes = groups.unique(return_inverse=True, return_counts=True)
    order = line.argsort(stable=True)
    slot = torch.empty_like(line)
    slot[order] = torch.arange(len(line)) - (sizes.cumsum(0) - sizes)[line[order]]
    return line, slot, (len(sizes), int(sizes.max()))
