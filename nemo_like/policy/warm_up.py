"""Compiles the passes of a policy while engines start."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.compiler import set_stance

from nemo_like.batch import keys
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.config.policy import PolicyConfig
from nemo_like.losses.mismatch import MismatchSums
from nemo_like.losses.protocol import Denominators, Needs
from nemo_like.observe.metrics import Metrics
from nemo_like.policy.gradients import forget_gradients
from nemo_like.policy.inputs import made_up_rows

if TYPE_CHECKING:
    from nemo_like.policy.trainer import Trainer

# Torch treats a size as fixed until it sees a second value. The first rows are therefore only
# traced, and code is compiled once, for changing sizes.
_TRACED = (60, 64)
_LONGEST = 96
# A single row is compiled separately; so are long equal rows, when they first come.
_ONE_ROW = (80,)


def warm_up(trainer: "Trainer", temperature: float) -> None:
    """Compile while engines start, by passes whose loss is 0; collective."""
    if trainer.mesh.sizes.pp > 1:
        return  # All passes through a pipeline have one shape, which is the step's own.
    measures = trainer.setup.output == "logprobs"
    with set_stance("default", force_backend="eager"):
        _pass(trainer, _TRACED, temperature, on_policy=measures)
    several = _several_rows(trainer.config)
    for lengths, on_policy in ((several, measures), (_ONE_ROW, measures), (several, False)):
        _pass(trainer, lengths, temperature, on_policy=on_policy)
    forget_gradients(trainer.parameters)


def _pass(
    trainer: "Trainer", lengths: tuple[int, ...], temperature: float, *, on_policy: bool
) -> None:
    rows = made_up_rows(lengths, trainer.device)
    rows.tokens[keys.GENERATION_LOGPROBS] = torch.zeros(rows.num_tokens, device=trainer.device)
    rows.rows[keys.SAMPLE_MASK] = torch.ones(len(rows), dtype=torch.bool, device=trainer.device)
    sums = MismatchSums(trainer.device) if on_policy else None
    trainer.backward([rows], _NoLoss(), Denominators(tokens=1.0, sequences=1.0), temperature, sums)


def _several_rows(config: PolicyConfig) -> tuple[int, ...]:
    """Three or more rows, with more logprobs than a chunk has if a micro-batch has room."""
    more = config.logprob_chunk_tokens // (_LONGEST - 1) + 1
    more = max(2, min(more, config.micro_batch_tokens // _LONGEST - 1))
    return (_LONGEST - 1, *[_LONGEST] * more)


class _NoLoss:
    needs = Needs()

    def __call__(
        self, logprobs: Tensor, batch: TensorBatch, denominators: Denominators
    ) -> tuple[Tensor, Metrics]:
        return logprobs.sum() * 0, {}
