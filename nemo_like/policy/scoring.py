"""What a trained model says of rows, without a step: logprobs, values, a loss's metrics."""

import torch
from torch import Tensor

from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.losses.protocol import Denominators, Loss, apply_loss
from nemo_like.observe.metrics import Metrics, merge
from nemo_like.policy.engine import MicroBatches, TrainEngine
from nemo_like.policy.inputs import empty_batch
from nemo_like.policy.lora import adapters_off
from nemo_like.policy.model import LogprobModel


def logprobs(
    engine: TrainEngine,
    micro_batches: MicroBatches,
    temperature: float,
    *,
    with_policy: bool = True,
) -> dict[str, list[Tensor]]:
    """Logprobs [N] of each micro-batch by ``policy`` and, if there is one, ``reference``.

    Also ``entropy`` [N] of the policy's distributions. Only ranks that answer for the driver
    (``mesh.answers``) have them; the lists are empty elsewhere.
    """
    columns: dict[str, list[Tensor]] = {}
    with engine.diagnostics.phase("logprobs"):
        if with_policy:
            outputs = _outputs(engine, micro_batches, temperature, with_entropy=True)
            columns["policy"] = [output[0] for output, _ in outputs]
            columns["entropy"] = [output[1] for output, _ in outputs]
        if engine.setup.with_reference:
            stages = engine.reference or engine.stages
            with adapters_off(engine.stages):
                outputs = _outputs(engine, micro_batches, temperature, stages=stages)
            columns["reference"] = [output[0] for output, _ in outputs]
    return columns


def evaluate(
    engine: TrainEngine,
    micro_batches: MicroBatches,
    loss: Loss,
    denominators: Denominators,
    temperature: float,
) -> Metrics:
    """The metrics of ``loss`` on this rank's micro-batches; none on ranks that do not answer."""
    with engine.diagnostics.phase("evaluate"):
        outputs = _outputs(engine, micro_batches, temperature)
    return merge(
        [
            apply_loss(loss, output[0], output[1], batch, denominators)[1]
            for output, batch in outputs
        ]
    )


def scores(engine: TrainEngine, micro_batches: MicroBatches, temperature: float) -> list[Tensor]:
    """Logprobs or values, [N], of each micro-batch's tokens; none on ranks that do not answer."""
    with engine.diagnostics.phase("score"):
        return [output[0] for output, _ in _outputs(engine, micro_batches, temperature)]


def _outputs(
    engine: TrainEngine,
    micro_batches: MicroBatches,
    temperature: float,
    *,
    stages: list[LogprobModel] | None = None,
    with_entropy: bool = False,
) -> list[tuple[Tensor, TensorBatch]]:
    """What the model gives, [2, N], for each real micro-batch."""
    batches = [each or empty_batch(engine.device) for each in micro_batches]
    shape = engine.common_shape(batches)
    calls = [engine.call(batch, temperature, shape, with_entropy) for batch in batches]
    with torch.no_grad(), engine.precision():
        outputs = engine.score(stages or engine.stages, calls, shape)
    return [
        (output[:, : batch.num_tokens], batch)
        for output, batch in zip(outputs, micro_batches, strict=bool(outputs))
        if batch is not None
    ]
