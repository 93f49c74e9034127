"""The gradients of all ranks as one vector: its norm, clipping it, and where it is not finite.

Gradients are plain tensors, equal on all ranks, or DTensors under any mesh: FSDP2 shards, copies of
shards (hybrid sharding), tensor-parallel shards, and both at once.
"""

from collections.abc import Collection, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from nemo_like.errors import RunError
from nemo_like.policy.parallel.full_tensors import local_part

# Keeps the clipping factor finite; the number is that of torch.nn.utils.clip_grad_norm_.
_EPS = 1e-6
_NUM_NAMED = 3

_Axes = tuple[tuple[DeviceMesh, int], ...]


def forget_gradients(named_parameters: Mapping[str, Parameter]) -> None:
    """After a step, or what only looked like one."""
    for parameter in named_parameters.values():
        parameter.grad = None


@torch.no_grad()
def gradient_norm(
    named_parameters: Mapping[str, Parameter],
    *,
    pipeline_group: dist.ProcessGroup | None = None,
    counted_elsewhere: Collection[str] = (),
) -> Tensor:
    """L2 norm of the global gradient, float32 [], equal on all ranks; collective.

    A shard counts once, however many ranks hold a copy. ``pipeline_group`` joins stages, whose
    parameters differ; names in ``counted_elsewhere`` are copies of a parameter that another stage
    counts (a tied embedding). All ranks of a stage pass the same names in the same order.
    """
    shards: dict[_Axes, list[Tensor]] = {}
    for name, parameter in named_parameters.items():
        gradient = parameter.grad
        held = shards.setdefault(_shard_axes(parameter if gradient is None else gradient), [])
        if gradient is not None and name not in counted_elsewhere:
            held.append(local_part(gradient))
    # Offloaded gradients lie on the CPU, but their ranks meet on the devices of the mesh.
    devices = [p.device for p in named_parameters.values()]
    devices[:0] = [torch.device(axes[0][0].device_type) for axes in shards if axes]
    device = devices[0]
    total = torch.zeros((), device=device)
    for axes, gradients in shards.items():
        squares = _sum_of_squares(gradients).to(device)
        for mesh, dim in axes:
            dist.all_reduce(squares, group=mesh.get_group(dim))
        total += squares
    if pipeline_group is not None:
        dist.all_reduce(total, group=pipeline_group)
    return total.sqrt()


@torch.no_grad()
def divide_gradients(parameters: Mapping[str, Parameter], by: float) -> None:
    """Turn a sum into a mean; in place."""
    for parameter in parameters.values() if by != 1 else ():
        if parameter.grad is not None:
            parameter.grad.div_(by)


def clip_gradients(
    named_parameters: Mapping[str, Parameter],
    norm: Tensor,
    max_norm: float | None,
    grad_scale: float = 1.0,
) -> None:
    """Scale gradients in place to a global norm of at most ``max_norm``, and by 1 / ``grad_scale``.

    ``norm`` is that of the gradients after division by ``grad_scale``. It is read on the host, as
    the caller had to in order to refuse one that is not finite; so a step below ``max_norm``
    touches no gradient.
    """
    factor = 1.0
    if max_norm is not None:
        factor = min(1.0, max_norm / (norm.item() + _EPS))
    factor /= grad_scale
    gradients = [local_part(p.grad) for p in named_parameters.values() if p.grad is not None]
    if factor != 1.0 and gradients:
        torch._foreach_mul_(gradients, factor)  # pyright: ignore[reportPrivateImportUsage]


@torch.no_grad()
def non_finite_gradients(named_parameters: Mapping[str, Parameter]) -> list[str]:
    """Names of parameters whose gradient has a NaN or infinity in this rank's shard."""
    return [
        name
        for name, parameter in named_parameters.items()
        if parameter.grad is not None and not local_part(parameter.grad).isfinite().all()
    ]


def explain_non_finite(
    norm: Tensor, named_parameters: Mapping[str, Parameter], rank: int, remedy: str
) -> RunError:
    """The error to raise for a norm that is not finite; ``remedy`` is a sentence."""
    names = non_finite_gradients(named_parameters)
    if names:
        where = f"rank {rank}: {len(names)} parameters, first {', '.join(names[:_NUM_NAMED])}"
    else:
        where = f"rank {rank}: all finite, so they are on another rank or their squares overflow"
    return RunError(
        f"The gradient norm is {norm.item()} ({where}); stopped before the optimizer step. {remedy}"
    )


def _shard_axes(tensor: Tensor) -> _Axes:
    """The mesh dimensions along which ranks hold different parts of ``tensor``."""
    if not isinstance(tensor, DTensor):
        return ()
    assert not any(placement.is_partial() for placement in tensor.placements), tensor.placements
    # Not ``is_shard``: FSDP2 x tensor parallel has strided shards, for which that is False.
    return tuple(
        (tensor.device_mesh, dim)
        for dim, placement in enumerate(tensor.placements)
        if not placement.is_replicate()
    )


def _sum_of_squares(tensors: list[Tensor]) -> Tensor:
    filled = [tensor for tensor in tensors if tensor.numel()]
    if not filled:
        return torch.zeros(())
    norms = torch._foreach_norm(  # pyright: ignore[reportPrivateImportUsage]
        filled, 2, dtype=torch.float32
    )
    return torch.stack(norms).square().sum()
