"""What is wanted of a model's forward passes.

Legend: ``M`` wanted tokens of a micro-batch, ``K`` vocabulary ids for each.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.losses.protocol import Loss, Needs
from nemo_like.policy.inputs import ModelInputs

MicroBatches = Sequence[TensorBatch | None]
"""None stands for a micro-batch that only other data-parallel ranks have."""


@dataclass(frozen=True, kw_only=True)
class ForwardRequest:
    """One forward pass; opaque to the wrappers (FSDP, pipeline stages) that it travels through."""

    inputs: ModelInputs
    temperature: float
    with_entropy: bool = False
    entropy_trains: bool = False
    """Whether the entropy has a gradient, for a loss that needs it."""
    ids: Tensor | None = None
    """int64 [M, K]: vocabulary ids whose logprobs are wanted beside the token's own."""
    top_k: int = 0
    """Above 0: that many of the most likely tokens are wanted, and nothing else."""
    vocabulary: int | None = None
    """Distributions of ``ids`` and ``top_k`` leave out ids from here on, exactly as if their logits
    were -infinity. None: none."""

    def next_for(self, _: nn.Module) -> "ForwardRequest":
        """See ``RequestQueue``: a single pass needs no queue."""
        return self


class RequestQueue:
    """What each stage's forward passes work on, in order: schedules keep that order per stage.

    It travels as an opaque keyword argument. (The schedules themselves can only split tensors into
    equal parts, and our micro-batches are not.)
    """

    def __init__(self, requests: Sequence[ForwardRequest]) -> None:
        self._requests = requests
        self._next: dict[int, int] = {}

    def next_for(self, module: nn.Module) -> ForwardRequest:
        """The request of this module's next forward pass."""
        i = self._next.get(id(module), 0)
        self._next[id(module)] = i + 1
        return self._requests[i]


def forward_requests(
    inputs: Sequence[ModelInputs],
    micro_batches: MicroBatches,
    loss: Loss | None = None,
    **wanted: Any,
) -> list[ForwardRequest]:
    """One pass for each micro-batch, for what ``loss`` needs and the fields that are ``wanted``."""
    needs = Needs() if loss is None else loss.needs
    requests = [
        ForwardRequest(inputs=one, entropy_trains=needs.entropy, **wanted) for one in inputs
    ]
    if not (column := needs.ids_column):
        return requests
    return [
        replace(one, ids=_ids(one.inputs, batch, column), vocabulary=needs.vocabulary)
        for one, batch in zip(requests, micro_batches, strict=True)
    ]


def _ids(inputs: ModelInputs, batch: TensorBatch | None, column: str) -> Tensor:
    """Of an empty micro-batch any will do."""
    if batch is None:
        return inputs.target_ids[:, None]
    return batch.tokens[column][inputs.targets]
