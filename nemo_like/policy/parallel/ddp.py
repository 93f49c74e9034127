"""Replicated data parallelism: DistributedDataParallel with hooks, or local SGD."""

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from nemo_like.config.policy import POWERSGD_START_STEP
from nemo_like.policy.parallel.mesh import PolicyMesh


def wrap_ddp(model: nn.Module, mesh: PolicyMesh) -> DistributedDataParallel | None:
    """None for local SGD and for a single rank, where nothing is synchronised.

    DDP divides by the number of ranks; the trainer multiplies losses by it (exact for powers of 2).
    """
    config = mesh.parallel.ddp
    group = mesh.group("replicate")
    if group is None or config.average_every_steps > 1:
        return None
    ddp = DistributedDataParallel(
        model,
        process_group=group,
        gradient_as_bucket_view=True,  # saves one copy of them
    )
    if config.compression == "bf16":
        ddp.register_comm_hook(group, default_hooks.bf16_compress_hook)
    elif config.compression == "fp16":
        ddp.register_comm_hook(group, default_hooks.fp16_compress_hook)
    elif config.compression == "powersgd":
        state: Any = powerSGD_hook.PowerSGDState(
            process_group=group,
            matrix_approximation_rank=2,
            start_powerSGD_iter=POWERSGD_START_STEP,
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return ddp


def adopt_state(optimizers: Iterable[Optimizer], group: dist.ProcessGroup | None) -> None:
    """Take the state of the group's first rank: a checkpoint has one copy (local SGD)."""
    if group is None:
        return
    for state in chain.from_iterable(one.state.values() for one in optimizers):
        for value in state.values():
            if isinstance(value, Tensor):
                dist.broadcast(value, group=group, group_src=0)


def average_parameters(
    parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup | None
) -> None:
    """Replace each parameter by its mean over ``group`` (local SGD, arXiv:1805.09767)."""
    if group is None:
        return
    for parameter in parameters.values():
        assert not isinstance(parameter, DTensor)
        dist.all_reduce(parameter.data, group=group)
        parameter.data.div_(dist.get_world_size(group))
