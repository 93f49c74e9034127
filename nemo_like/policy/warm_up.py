"""Compiles the passes of a policy while engines start."""

from typing import TYPE_CHECKING

from torch import Tensor

from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.losses.protocol import Denominators, Needs
from nemo_like.observe.metrics import Metrics
from nemo_like.policy.gradients import forget_gradients
from nemo_like.policy.inputs import made_up_rows

if TYPE_CHECKING:
    from nemo_like.policy.trainer import Trainer

# Equal and unequal lengths, for which attention has a kernel each; torch.compile takes a size for
# one that changes when it sees a second value.
_ROWS = ((60, 64), (90, 96, 94), (16, 80), (24, 120, 20))


def warm_up(trainer: "Trainer") -> None:
    """Compile while engines start, by a pass without gradient; collective."""
    if trainer.mesh.sizes.pp > 1:
        return  # All passes through a pipeline have one shape, which is the step's own.
    rows = [made_up_rows(lengths, trainer.device) for lengths in _ROWS]
    trainer.backward(rows, _NoLoss(), Denominators(tokens=1.0, sequences=1.0), 1.0, None)
    forget_gradients(trainer.parameters)


class _NoLoss:
    needs = Needs()

    def __call__(
        self, logprobs: Tensor, batch: TensorBatch, denominators: Denominators
    ) -> tuple[Tensor, Metrics]:
        return logprobs.sum() * 0, {}
