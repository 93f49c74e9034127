"""Optimizer, schedule in optimizer steps, and clipping by the true global norm."""

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from nemo_like.config.choices import Schedule
from nemo_like.config.policy_schema import OptimizerConfig, SchedulerConfig
from nemo_like.errors import RunError


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> AdamW:
    """AdamW (arXiv:1711.05101) over all parameters."""
    return AdamW(
        model.parameters(),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
    )


def make_scheduler(optimizer: AdamW, config: SchedulerConfig, max_steps: int) -> LambdaLR:
    """Step i of 0..max_steps-1 uses lr * ``lr_factor(i)``."""
    return LambdaLR(optimizer, lambda step: lr_factor(step, config, max_steps))


def lr_factor(step: int, config: SchedulerConfig, max_steps: int) -> float:
    """Share of the peak learning rate at optimizer step ``step``, counted from 0.

    >>> config = SchedulerConfig(kind=Schedule.linear, warmup_steps=2, min_lr_ratio=0.0)
    >>> [round(lr_factor(i, config, 5), 3) for i in range(5)]
    [0.5, 1.0, 0.667, 0.333, 0.0]
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.kind is Schedule.constant:
        return 1.0
    first = max(config.warmup_steps - 1, 0)  # the step at which the peak is reached
    progress = min((step - first) / max(max_steps - 1 - first, 1), 1.0)
    shape = 1 - progress
    if config.kind is Schedule.cosine:
        shape = (1 + math.cos(math.pi * progress)) / 2
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * shape


def clip_gradients(model: nn.Module, max_norm: float | None) -> float:
    """Scale gradients to a global norm of at most ``max_norm``; returns the norm before that.

    The norm is over all shards of all ranks. Raises RunError if it is not finite, before any
    parameter changes, naming the first parameters whose gradient is not.
    """
    parameters = [p for p in model.parameters() if p.grad is not None]
    gradients = [p.grad for p in parameters if p.grad is not None]
    total = _materialize(torch.nn.utils.get_total_norm(gradients))
    norm = total.item()
    if not math.isfinite(norm):
        bad = [
            name
            for name, p in model.named_parameters()
            if p.grad is not None and not math.isfinite(_materialize(p.grad.norm()).item())
        ]
        raise RunError(
            f"The gradient norm is {norm} ({len(bad)} parameters, first {', '.join(bad[:3])}); "
            "stopped before the optimizer step. Lower policy.optimizer.lr or look at the data."
        )
    if max_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    return norm


def _materialize(x: Tensor) -> Tensor:
    """The whole value of a norm that FSDP leaves as one partial per shard."""
    return x.full_tensor() if isinstance(x, DTensor) else x
