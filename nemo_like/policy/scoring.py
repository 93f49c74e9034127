"""What a model says of rows, without a step: logprobs, values, a loss's metrics, top-k tokens.

Legend: ``N`` tokens of a micro-batch, ``K`` most likely tokens in place of each.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nemo_like.batch import keys
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.errors import RunError
from nemo_like.losses.protocol import Denominators, Loss, apply_loss
from nemo_like.observe.metrics import Metrics, merge
from nemo_like.policy.model import LogprobModel, MicroBatches

if TYPE_CHECKING:
    from nemo_like.policy.trainer import Trainer


def logprobs(
    trainer: "Trainer",
    micro_batches: MicroBatches,
    temperature: float,
    *,
    with_policy: bool = True,
) -> dict[str, list[Tensor]]:
    """Logprobs [N] of each micro-batch by ``policy``, its ``entropy``, and any ``reference``.

    Only output ranks (``mesh.is_output_rank``) have them; the lists are empty elsewhere.
    """
    columns: dict[str, list[Tensor]] = {}
    with trainer.diagnostics.phase("logprobs"):
        if with_policy:
            outputs = _outputs(trainer, micro_batches, temperature, with_entropy=True)
            columns["policy"] = [output[0] for output, _ in outputs]
            columns["entropy"] = [output[1] for output, _ in outputs]
        if trainer.setup.with_reference:
            stages = trainer.reference or trainer.stages
            with _without_adapters(trainer):
                outputs = _outputs(trainer, micro_batches, temperature, stages=stages)
            columns["reference"] = [output[0] for output, _ in outputs]
    return columns


def evaluate(
    trainer: "Trainer",
    micro_batches: MicroBatches,
    loss: Loss,
    denominators: Denominators,
    temperature: float,
) -> Metrics:
    trainer.synchronize()  # What is measured is what a checkpoint would hold.
    with trainer.diagnostics.phase("evaluate"):
        outputs = _outputs(trainer, micro_batches, temperature, loss=loss)
    return merge([apply_loss(loss, output, batch, denominators)[1] for output, batch in outputs])


def scores(trainer: "Trainer", micro_batches: MicroBatches, temperature: float) -> list[Tensor]:
    """Logprobs or values, [N], of each micro-batch's tokens; none on ranks without output."""
    with trainer.diagnostics.phase("score"):
        return [output[0] for output, _ in _outputs(trainer, micro_batches, temperature)]


def top_logprobs(
    trainer: "Trainer",
    micro_batches: MicroBatches,
    temperature: float,
    k: int,
    vocabulary: int | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """Ids int64 [N, K] and logprobs [N, K] of each micro-batch; none on ranks without output.

    As ``RemoteModel.top_logprobs``. RunError for an id that this model has no embedding of.
    """
    known = trainer.stages[0].causal_lm.config.get_text_config().vocab_size
    for batch in micro_batches:
        highest = 0 if batch is None else int(batch.tokens[keys.INPUT_IDS].max())
        if highest >= known:
            raise RunError(
                f"A row has the token id {highest}, which no token of the tokenizer has, and the "
                f"teacher's embedding ends at {known}: the student sampled padding of its "
                "vocabulary; give the teacher's embedding as many rows."
            )

    with trainer.diagnostics.phase("top_logprobs"):
        outputs = _outputs(trainer, micro_batches, temperature, top_k=k, vocabulary=vocabulary)
    halves = [output.t().chunk(2, dim=1) for output, _ in outputs]
    return [(ids.to(torch.int64), logprobs) for logprobs, ids in halves]


def _without_adapters(trainer: "Trainer") -> AbstractContextManager[None]:
    if not trainer.config.lora.rank:
        return nullcontext()
    from nemo_like.policy.lora import adapters_off

    return adapters_off(trainer.stages)


def _outputs(
    trainer: "Trainer",
    micro_batches: MicroBatches,
    temperature: float,
    *,
    stages: list[LogprobModel] | None = None,
    **wanted: Any,
) -> list[tuple[Tensor, TensorBatch]]:
    """Outputs [R, N] for each real micro-batch; ``wanted``: see ``Trainer.requests``."""
    requests, shape = trainer.requests(micro_batches, temperature=temperature, **wanted)
    with torch.no_grad(), trainer.precision():
        outputs = trainer.score(stages or trainer.stages, requests, shape)
    return [
        (output[:, : batch.num_tokens], batch)
        for output, batch in zip(outputs, micro_batches, strict=bool(outputs))
        if batch is not None
    ]
