"""Tensors as they leave the policy: full, adapters merged, by their names on disk."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_like.models.naming import is_adapter, plain_name
from nemo_like.policy.lora import Adapter, adapters_of
from nemo_like.policy.model import LogprobModel
from nemo_like.policy.parallel.full_tensors import full_tensor, full_tensors
from nemo_like.policy.state.loading import tied_names
from nemo_like.refit.manifest import Architecture


def leaving_tensors(
    stages: Sequence[LogprobModel],
    architecture: Architecture,
    device: torch.device,
    *,
    merged: bool = True,
    pp: dist.ProcessGroup | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of ``architecture`` once, by its name on disk, full, in its dtype.

    ``merged``: adapters are added to their matrices, in float32. Collective: all ranks must draw
    from it at the same pace. With a pipeline, each tensor is sent from the stage that has it.
    """
    state, adapters = _parts(stages, merged=merged)
    naming, translations = architecture.naming, architecture.translations
    names = [name for each in translations for name in each.names]
    full = _full(state, adapters, names, architecture, device, pp)
    for each in translations:
        if each.converter is None:
            yield each.targets[0], next(full)
        else:
            own = {name: next(full) for name in each.names}
            yield from naming.convert(each, own.pop).items()


def adapter_tensors(
    stages: Sequence[LogprobModel], dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Each tensor of an adapter by the name that it travels by, full; collective."""
    adapters = {
        plain_name(name): tensor
        for stage in stages
        for name, tensor in stage.state_dict().items()
        if is_adapter(name)
    }
    parts = ((tensor.detach(), dtype) for tensor in adapters.values())
    yield from zip(adapters, full_tensors(parts, device), strict=True)


def _parts(
    stages: Sequence[LogprobModel], *, merged: bool
) -> tuple[dict[str, Tensor], dict[str, Adapter]]:
    """What this rank has of each tensor, and the adapters to merge, by names in memory."""
    state: dict[str, Tensor] = {}
    adapters: dict[str, Adapter] = {}
    for stage in stages:
        ties = tied_names(stage) if stage.is_first else {}
        tensors = {plain_name(n): tensor.detach() for n, tensor in stage.state_dict().items()}
        state |= {name: tensor for name, tensor in tensors.items() if name not in ties}
        if merged:
            adapters |= adapters_of(stage, tensors)
    return state, adapters


def _full(
    state: dict[str, Tensor],
    adapters: dict[str, Adapter],
    names: Sequence[str],
    architecture: Architecture,
    device: torch.device,
    pp: dist.ProcessGroup | None,
) -> Iterator[Tensor]:
    """The tensors of ``names`` in memory."""
    stored = {name: architecture.tensors[name].dtype for name in names}
    owners = _owners(list(state), pp)
    gather = partial(full_tensor, dtype=torch.float32, device=device)
    plain = full_tensors(
        ((state[name], stored[name]) for name in names if name in state and name not in adapters),
        device,
    )
    for name in names:
        if name in adapters:
            tensor = adapters[name].merged(gather(state[name]), gather).to(stored[name])
        elif name in state:
            tensor = next(plain)
        else:
            tensor = torch.empty_like(architecture.tensors[name], device=device)
        if pp is not None:
            tensor = tensor.contiguous()
            dist.broadcast(tensor, dist.get_global_rank(pp, owners[name]), group=pp)
        yield tensor


def _owners(names: list[str], pp: dist.ProcessGroup | None) -> dict[str, int]:
    """Tensor name -> the first pipeline rank that has it."""
    if pp is None:
        return {}
    everyone: list[Any] = [None] * dist.get_world_size(pp)
    dist.all_gather_object(everyone, names, group=pp)
    return {name: rank for rank in reversed(range(len(everyone))) for name in everyone[rank]}
