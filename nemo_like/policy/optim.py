"""Optimizers, the learning rate in optimizer steps, and where state is kept.

Parameters are plain tensors or DTensors under any mesh. AdamW and SGD work element by element, so
each rank updates its shard; Muon and Adafactor (full_matrix.py) look at full matrices.
"""

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from nemo_like.config.optimizer import OptimizerConfig, SchedulerConfig
from nemo_like.config.policy import PolicyConfig
from nemo_like.errors import UserError
from nemo_like.planning.model_shape import GIB
from nemo_like.planning.offload import MemoryNeeds, Placement, choose
from nemo_like.policy.parallel.full_tensors import local_part

Named = list[tuple[str, Parameter]]


def make_optimizers(
    named_parameters: Iterable[tuple[str, Parameter]],
    config: OptimizerConfig,
    *,
    on_host: bool = False,
) -> list[Optimizer]:
    """The optimizers that together step on all parameters that require a gradient.

    One, or for ``muon`` two. Sharded parameters move as those of a single process do. ``on_host``:
    state is kept in host memory; see ``step_with``. Raises UserError if no parameter suits the
    kind.
    """
    named = [(name, p) for name, p in named_parameters if p.requires_grad]
    match config.kind:
        case "adamw":
            return [adamw(named, config, on_host)]
        case "sgd":
            return [SGD(groups_of(named, config), lr=config.lr, momentum=config.momentum)]
        case "adafactor":
            from nemo_like.policy.full_matrix import FullMatrixAdafactor

            return [FullMatrixAdafactor(groups_of(named, config), lr=config.lr)]
        case "muon":
            from nemo_like.policy.full_matrix import muon_and_adamw

            return muon_and_adamw(named, config, on_host)


def make_schedulers(
    optimizers: Iterable[Optimizer], config: SchedulerConfig, max_steps: int
) -> list[LambdaLR]:
    """One for each optimizer: step i of 0..max_steps-1 uses lr * ``lr_factor(i)``."""
    return [
        LambdaLR(optimizer, lambda step: lr_factor(step, config, max_steps))
        for optimizer in optimizers
    ]


def make_state(model: Module, optimizers: Sequence[Optimizer], options: StateDictOptions) -> None:
    """Give optimizers that have not stepped yet the state that a first step begins with: zeros.

    Torch makes it by a step on gradients of zero, and counts that step.
    """
    if fresh := [one for one in optimizers if not one.state]:
        get_optimizer_state_dict(model, optimizers, options=options)
        for state in chain.from_iterable(one.state.values() for one in fresh):
            for value in state.values():
                if isinstance(value, Tensor):
                    value.zero_()


def step_with(optimizer: Optimizer, device: torch.device, *, on_host: bool) -> None:
    """Step on ``device``; state that is kept ``on_host`` comes and goes, AdamW's by itself."""
    moves = on_host and not isinstance(optimizer, AdamW)
    if moves:
        _move_state(optimizer, device)
    optimizer.step()
    if moves:
        _move_state(optimizer, torch.device("cpu"))


def _move_state(optimizer: Optimizer, device: torch.device) -> None:
    """Moments only; step counts stay where the optimizer put them."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim() > 0:
                state[name] = value.to(device)


def lr_factor(step: int, config: SchedulerConfig, max_steps: int) -> float:
    """Share of the peak learning rate at optimizer step ``step``, counted from 0.

    >>> config = SchedulerConfig(kind="linear", warmup_steps=2, min_lr_ratio=0.0)
    >>> [round(lr_factor(i, config, 5), 3) for i in range(5)]
    [0.5, 1.0, 0.667, 0.333, 0.0]
    >>> config = SchedulerConfig(kind="wsd", decay_steps=2)
    >>> [lr_factor(i, config, 5) for i in range(5)]
    [1.0, 1.0, 1.0, 0.5, 0.0]
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.kind == "constant":
        return 1.0
    last = max_steps - 1
    # The last step at the peak: where warm-up ends, or where the decay of ``wsd`` begins.
    peak = max(config.warmup_steps - 1, 0)
    if config.kind == "wsd":
        peak = max(peak, last - config.decay_steps)
    progress = min(max(step - peak, 0) / max(last - peak, 1), 1.0)
    shape = 1 - progress
    if config.kind == "cosine":
        shape = (1 + math.cos(math.pi * progress)) / 2
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * shape


class ShardwiseAdamW(AdamW):
    """torch's AdamW on the shards that are here, without DTensor's dispatch.

    Of each new shape that costs tens of milliseconds: a first step took seconds.
    """

    def _init_group(
        self,
        group: dict[str, Any],
        params_with_grad: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        max_exp_avg_sqs: list[Tensor],
        state_steps: list[Tensor],
    ) -> bool:
        ours = (params_with_grad, grads, exp_avgs, exp_avg_sqs)
        has_complex = super()._init_group(group, *ours, max_exp_avg_sqs, state_steps)
        for tensors in ours:
            tensors[:] = map(local_part, tensors)
        return has_complex


def adamw(named: Named, config: OptimizerConfig, on_host: bool) -> AdamW:
    on_gpu = all(p.device.type == "cuda" for _, p in named)
    groups = groups_of(named, config)
    options: dict[str, Any] = {
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "fused": True if on_gpu else None,
    }
    if not on_host and config.moments == "float32":
        return ShardwiseAdamW(groups, **options)
    from nemo_like.policy.moments.flat_adamw import FlatAdamW

    return FlatAdamW(groups, moments=config.moments, on_host=on_host, **options)


def groups_of(named: Named, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Parameters by whether they decay, and by mesh: foreach and fused kernels refuse lists that
    mix."""
    groups: dict[tuple[bool, DeviceMesh | None], list[Parameter]] = {}
    for _, p in named:
        mesh = p.device_mesh if isinstance(p, DTensor) else None
        groups.setdefault((p.ndim > 1, mesh), []).append(p)
    return [
        {"params": params, "weight_decay": config.weight_decay if decays else 0.0}
        for (decays, _), params in groups.items()
    ]


logger = logging.getLogger(__name__)

_SPARED = 0.1
"""Share of a node's free memory that offloading leaves free."""


def place_state(
    config: PolicyConfig, of_rank: MemoryNeeds | None, ranks_per_node: int, device: torch.device
) -> Placement:
    """Decide, and check that the host has the memory; UserError if it does not.

    ``of_rank``: None for models that the formulas do not cover, or that do not train.
    """
    if device.type != "cuda":
        return Placement(offload="none" if config.offload == "auto" else config.offload)
    found = Placement(offload=config.offload)
    if config.offload == "auto":
        found = choose(config, of_rank, torch.cuda.get_device_properties(device).total_memory)
    if found.offload != "none" and of_rank is not None:
        key = f"policy.offload={config.offload}"
        check_host_memory(of_rank.on_host, ranks_per_node, key, of_rank.others_on_host)
        found = replace(found, host_bytes=of_rank.on_host)
    return found


def log_placement(placement: Placement) -> None:
    if placement.reason:
        logger.info("policy.offload=auto: %s, as %s.", placement.offload, placement.reason)
    if placement.host_bytes:
        size = placement.host_bytes / GIB
        logger.info("policy.offload: each rank keeps %.1f GiB in host memory.", size)
    if placement.too_small:
        logger.warning(
            "The GPU is predicted to be too small; lower policy.micro_batch_tokens, or set "
            "policy.activation_checkpointing=full, policy.optimizer.moments=bfloat16 or "
            "policy.offload=all."
        )


def check_host_memory(num_bytes: float, ranks_per_node: int, key: str, others: float = 0.0) -> None:
    """Raise UserError unless ``ranks_per_node`` ranks of this node can each have ``num_bytes``.

    ``others``: what other models take beside each rank, whether they have it already or not yet.
    """
    memory = psutil.virtual_memory()
    free = min(memory.available, memory.total - others * ranks_per_node) * (1 - _SPARED)
    if num_bytes * ranks_per_node > free:
        raise UserError(
            f"{key} keeps {num_bytes * ranks_per_node / GIB:.1f} GiB of optimizer state in the "
            f"memory of each node ({ranks_per_node} rank(s)), and {free / GIB:.1f} GiB may be used "
            "there; set policy.optimizer.moments=bfloat16 or int8, or use more nodes."
        )
