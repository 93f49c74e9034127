"""Simple policy optimization (arXiv:2401.16025): a penalty on the ratio in place of its clip.

Each token adds -(r A - |A| / (2 epsilon) (r - 1)^2), with r = new / old probability, A = advantage,
and epsilon = ``loss.clip_high``. Its gradient turns round where r leaves [1 - epsilon, 1 + epsilon]
on the advantage's side, where that of the clip is 0.
"""

from torch import Tensor

from nemo_like.config.losses import LossConfig


def objective(
    ratio: Tensor, logprobs: Tensor, advantages: Tensor, config: LossConfig
) -> tuple[Tensor, Tensor]:
    """Each trained token's term of the loss [M], to be minimised, and where r has left its range.

    ``ratio`` and ``logprobs`` [M] have a gradient, ``advantages`` [M] none.
    """
    epsilon = config.clip_high or 0.2
    penalty = advantages.abs() / (2 * epsilon) * (ratio - 1).square()
    return penalty - ratio * advantages, (ratio - 1).abs() > epsilon
