"""How a model is spread over ranks: FSDP2 full sharding, one unit a layer."""

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from nemo_like.policy.model import LogprobModel


def shard_model(
    model: LogprobModel, mesh: DeviceMesh, dtype: torch.dtype, activation_checkpointing: bool
) -> None:
    """Shard ``model`` in place over ``mesh``; compute in ``dtype``, reduce in float32."""
    if activation_checkpointing:
        for layers in _layer_lists(model):
            for i, layer in enumerate(layers):
                layers[i] = checkpoint_wrapper(layer)
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layers in _layer_lists(model):
        for layer in layers:
            fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    # Losses are already divided by the global denominator, so gradients of ranks add up: SUM, not
    # FSDP's mean. (The flag keeps gloo away from reduce operations that only NCCL has.)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _layer_lists(model: nn.Module) -> list[nn.ModuleList]:
    """The outermost lists of repeated blocks: ``layers``, ``h`` or whatever a model calls them."""
    found: list[nn.ModuleList] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{other}.") for other in _names(model, found))
        if isinstance(module, nn.ModuleList) and not inside:
            found.append(module)
    return found


def _names(model: nn.Module, modules: list[nn.ModuleList]) -> list[str]:
    return [name for name, module in model.named_modules() if any(module is m for m in modules)]
