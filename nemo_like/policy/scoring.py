"""What a trained model says of rows, without a step: a loss's metrics, or its own output."""

import torch
from torch import Tensor

from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.losses.protocol import Denominators, Loss, apply_loss
from nemo_like.observe.metrics import Metrics, merge
from nemo_like.policy.engine import MicroBatches, TrainEngine
from nemo_like.policy.inputs import empty_batch


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
    engine: TrainEngine, micro_batches: MicroBatches, temperature: float
) -> list[tuple[Tensor, TensorBatch]]:
    """What the model gives, [2, N], for each real micro-batch."""
    batches = [each or empty_batch(engine.device) for each in micro_batches]
    shape = engine.common_shape(batches)
    calls = [engine.call(batch, temperature, shape) for batch in batches]
    with torch.no_grad(), engine.precision():
        outputs = engine.score(engine.stages, calls, shape)
    return [
        (output[:, : batch.num_tokens], batch)
        for output, batch in zip(outputs, micro_batches, strict=bool(outputs))
        if batch is not None
    ]
