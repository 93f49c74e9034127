"""The gradients of all ranks as one vector: completing it, its norm, clipping it, its scale.

Gradients are plain tensors, equal on all ranks, or DTensors under any mesh: FSDP2 shards, copies of
shards (hybrid sharding), tensor-parallel shards, and both at once.
"""

import math
from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from nemo_like.errors import RunError
from nemo_like.observe.metrics import Metrics
from nemo_like.policy.parallel.full_tensors import local_part
from nemo_like.policy.parallel.mesh import PolicyMesh

# Keeps the clipping factor finite; the number is that of torch.nn.utils.clip_grad_norm_.
_EPS = 1e-6
_NUM_NAMED = 3

_Axes = tuple[tuple[DeviceMesh, int], ...]


def forget_gradients(named_parameters: Mapping[str, Parameter]) -> None:
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

    A shard counts once, however many ranks hold a copy. ``pipeline_group`` joins stages;
    ``counted_elsewhere``: copies of a parameter that another stage counts (a tied embedding).
    All ranks of a stage pass the same names in the same order.
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

    ``norm`` is that of the gradients after division by ``grad_scale``.
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
    """Names of parameters with a NaN or infinity in this rank's shard of the gradient."""
    return [
        name
        for name, parameter in named_parameters.items()
        if parameter.grad is not None and not local_part(parameter.grad).isfinite().all()
    ]


def explain_non_finite(
    norm: Tensor, named_parameters: Mapping[str, Parameter], rank: int, key: str
) -> RunError:
    """``key``: that of the learning rate."""
    names = non_finite_gradients(named_parameters)
    if names:
        where = f"rank {rank}: {len(names)} parameters, first {', '.join(names[:_NUM_NAMED])}"
    else:
        where = f"rank {rank}: all finite, so they are on another rank or their squares overflow"
    return RunError(
        f"The gradient norm is {norm.item()} ({where}); stopped before the optimizer step. Begin a "
        f"new run with a lower learning rate ({key}; a resumed run keeps its own), or "
        "look at the step's rows (where the run samples: trajectories.jsonl)."
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


_LEAST = 1.0


class LossScale:
    """The factor on the loss that keeps small gradients above float16's least number.

    Section 3.2 of Micikevicius et al., arXiv:1710.03740: halved at each overflow, whose step is
    skipped, and doubled after ``growth_steps`` steps in a row without one.

    >>> scale = LossScale(8.0, growth_steps=2)
    >>> for overflowed in (True, False, False, False):
    ...     scale.update(overflowed)
    >>> scale.factor, scale.skipped_steps
    (8.0, 1)
    """

    def __init__(self, initial: float = 65536.0, growth_steps: int = 200) -> None:
        self.factor = initial
        self._growth_steps = growth_steps
        self.skipped_steps = 0
        self._good_steps = 0

    def update(self, overflowed: bool) -> None:
        """Take note of a step, as all ranks do; RunError for an overflow at the least factor."""
        if not overflowed:
            self._good_steps += 1
            if self._good_steps == self._growth_steps:
                self.factor *= 2
                self._good_steps = 0
            return
        if self.factor <= _LEAST:
            raise RunError(
                "Gradients overflow float16 without any loss scale, so every further step would be "
                "skipped; set policy.dtype=bfloat16 or lower policy.optimizer.lr."
            )
        self.factor = max(self.factor / 2, _LEAST)
        self.skipped_steps += 1
        self._good_steps = 0

    def state_dict(self) -> dict[str, float]:
        return {
            "factor": self.factor,
            "good_steps": self._good_steps,
            "skipped_steps": self.skipped_steps,
        }

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.factor = state["factor"]
        self._good_steps = int(state["good_steps"])
        self.skipped_steps = int(state["skipped_steps"])


def any_bad_loss(parts: Sequence[Metrics], device: torch.device) -> bool:
    """Whether any rank's loss is not finite, which no loss scale could cause; collective."""
    losses = [float(part["train/loss"].value) for part in parts if "train/loss" in part]
    bad = torch.tensor(float(not all(map(math.isfinite, losses))), device=device)
    dist.all_reduce(bad, op=dist.ReduceOp.MAX)
    return bool(bad)


class SharedParameters:
    """Full parameters that a rank shares with tensor-parallel ranks or the pipeline's far end.

    ``partial`` see a share of the heads or positions (see tensor_parallel.py); ``ties``: output
    head -> embedding, of which the last stage has one and the first the other.
    """

    def __init__(
        self,
        mesh: PolicyMesh,
        parameters: Mapping[str, Parameter],
        partial: Collection[str],
        ties: Mapping[str, str],
    ) -> None:
        self._tp = mesh.group("tp")
        self._partial = [parameters[name] for name in sorted(partial)]
        self._ends = mesh.first_and_last_stage
        at_ends = (*ties, *ties.values()) if self._ends is not None else ()
        tied = [name for name in at_ends if name in parameters]
        self._tied = [parameters[name] for name in tied]
        self.counted_elsewhere = frozenset(tied if mesh.coordinate("pp") > 0 else ())
        """Copies that the first stage counts in the gradient norm."""

    def complete_gradients(self) -> None:
        """Sum the gradients of shared parameters over the ranks that share them; collective."""
        for parameters, group in ((self._partial, self._tp), (self._tied, self._ends)):
            for parameter in parameters if group is not None else ():
                assert parameter.grad is not None
                dist.all_reduce(local_part(parameter.grad), group=group)
