"""Dynamic loss scaling for float16 gradients."""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from nemo_like.errors import RunError
from nemo_like.observe.metrics import Metrics

_LEAST = 1.0


class LossScale:
    """The factor on the loss that keeps small gradients above float16's least number.

    Section 3.2 of Micikevicius et al., arXiv:1710.03740: halved at each overflow, whose step is
    skipped, and doubled after ``growth_steps`` steps in a row without one.

    >>> scale = LossScale(8.0, growth_steps=2)
    >>> for overflowed in (True, False, False, False):
    ...     scale.update(overflowed)
    >>> scale.factor, scale.skipped_steps
    (8.0, 1)
    """

    def __init__(self, initial: float, growth_steps: int = 200) -> None:
        self.factor = initial
        self._growth_steps = growth_steps
        self.skipped_steps = 0
        self._good_steps = 0

    def update(self, overflowed: bool) -> None:
        """Take note of a step; it must agree between ranks, as the global gradient norm does.

        Raises RunError for an overflow at the least factor.
        """
        if not overflowed:
            self._good_steps += 1
            if self._good_steps == self._growth_steps:
                self.factor *= 2
                self._good_steps = 0
            return
        if self.factor <= _LEAST:
            raise RunError(
                "Gradients overflow float16 without any loss scale, so every further step would be "
                "skipped; set policy.dtype=bfloat16 or lower policy.optimizer.lr."
            )
        self.factor = max(self.factor / 2, _LEAST)
        self.skipped_steps += 1
        self._good_steps = 0

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {
            "factor": self.factor,
            "good_steps": self._good_steps,
            "skipped_steps": self.skipped_steps,
        }

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue where ``state_dict`` was taken."""
        self.factor = state["factor"]
        self._good_steps = int(state["good_steps"])
        self.skipped_steps = int(state["skipped_steps"])


def any_bad_loss(parts: Sequence[Metrics], device: torch.device) -> bool:
    """Whether any rank's loss is not finite, which no loss scale could cause; collective."""
    losses = [float(part["train/loss"].value) for part in parts if "train/loss" in part]
    bad = torch.tensor(float(not all(map(math.isfinite, losses))), device=device)
    dist.all_reduce(bad, op=dist.ReduceOp.MAX)
    return bool(bad)
