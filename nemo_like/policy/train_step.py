"""One optimizer step: micro-batches add up to the gradient of one global loss."""

from collections.abc import Sequence

import torch
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.config.choices import Batching
from nemo_like.errors import RunError
from nemo_like.losses.protocol import Denominators, Loss
from nemo_like.observe.metrics import Metric, Metrics, Reduce, merge
from nemo_like.policy.inputs import empty_inputs, model_inputs
from nemo_like.policy.model import LogprobModel
from nemo_like.policy.optim import clip_gradients


def train_step(
    model: LogprobModel,
    optimizer: AdamW,
    scheduler: LambdaLR,
    micro_batches: Sequence[TensorBatch | None],
    loss: Loss,
    denominators: Denominators,
    *,
    temperature: float,
    batching: Batching,
    max_grad_norm: float | None,
    device: torch.device,
) -> Metrics:
    """Forward and backward over this rank's micro-batches, then one step of all ranks together.

    ``None`` stands for a micro-batch that only other ranks have: it takes part in their collectives
    with an empty pass. The returned metrics are this rank's share. Raises RunError before the
    optimizer step if the loss or the gradient norm is not finite.
    """
    parts: list[Metrics] = []
    for micro_batch in micro_batches:
        if micro_batch is None:
            logprobs, _ = model(empty_inputs(batching, device), temperature)
            logprobs.sum().backward()
            continue
        logprobs, _ = model(model_inputs(micro_batch, batching), temperature)
        value, metrics = loss(logprobs, micro_batch, denominators)
        _check_finite(value)
        value.backward()
        parts.append(metrics)
    norm = clip_gradients(model, max_grad_norm)
    metrics = merge(parts)
    metrics["train/grad_norm"] = Metric(norm, reduce=Reduce.max)
    metrics["train/lr"] = Metric(float(scheduler.get_last_lr()[0]), reduce=Reduce.max)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad(set_to_none=True)
    return metrics


def _check_finite(loss: torch.Tensor) -> None:
    if not bool(torch.isfinite(loss)):
        raise RunError(
            f"The loss of a micro-batch is {loss.item()}; stopped before the optimizer step. Lower "
            "policy.optimizer.lr, or look at the step's rows in trajectories.jsonl."
        )
