"""How a model is spread over data-parallel ranks, recomputed, and compiled."""

from typing import TYPE_CHECKING

import torch
import torch._inductor
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from nemo_like.config.policy import PolicyConfig
from nemo_like.errors import UserError

if TYPE_CHECKING:
    from nemo_like.policy.model import LogprobModel
    from nemo_like.policy.parallel.mesh import PolicyMesh


def _varlen_operator() -> object | None:
    packet = getattr(torch.ops.torch_attn, "_varlen_attn", None)
    return getattr(packet, "default", None)


# What selective checkpointing keeps: results that are dear to compute and small beside their cost.
_KEPT = frozenset(
    op
    for op in (
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        _varlen_operator(),
    )
    if op is not None
)


def wrap_layers(model: "LogprobModel", config: PolicyConfig) -> None:
    """Recompute, offload and compile each layer, as configured; before ``shard_model``."""
    for layers in _layer_lists(model):
        for i, layer in enumerate(layers):
            if not _is_here(layer):
                continue
            if config.activation_checkpointing == "full":
                layers[i] = checkpoint_wrapper(layer)
            elif config.activation_checkpointing == "selective":
                layers[i] = checkpoint_wrapper(layer, context_fn=_selective_contexts)
            if config.activation_offload:
                layers[i] = offload_wrapper(layers[i])
            if config.compile:
                # A warm-up shows torch two sizes first, so that it compiles for changing sizes.
                layers[i].compile(options=_compile_options())


def shard_model(
    model: "LogprobModel", mesh: "PolicyMesh", config: PolicyConfig, dtype: torch.dtype
) -> None:
    """Shard ``model`` in place (FSDP2) by layers; compute in ``dtype``, reduce in float32."""
    _check_divides(model, mesh)
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    root = precision
    if config.float32_head:  # the root unit: embedding, final norm and head
        root = MixedPrecisionPolicy(
            param_dtype=torch.float32, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    offload = CPUOffloadPolicy() if config.offload == "all" else OffloadPolicy()
    reshard = mesh.parallel.reshard_after_forward
    for layers in _layer_lists(model):
        for layer in layers:
            if _is_here(layer):
                fully_shard(
                    layer,
                    mesh=mesh.fsdp,
                    mp_policy=precision,
                    offload_policy=offload,
                    reshard_after_forward=reshard,
                )
    fully_shard(
        model,
        mesh=mesh.fsdp,
        mp_policy=root,
        offload_policy=offload,
        reshard_after_forward=reshard,
    )
    # Losses are already divided by the global denominator, so gradients of ranks add up: SUM, not
    # FSDP's mean. (The flag keeps gloo away from reduce operations that only NCCL has.)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _check_divides(model: "LogprobModel", mesh: "PolicyMesh") -> None:
    """Rows of tensor-parallel matrices are split twice; torch has that for even splits only."""
    size = mesh.sizes.shard * mesh.sizes.cp
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) and len(parameter.to_local()) % size:
            raise UserError(
                f"policy.parallel: {name} leaves {len(parameter.to_local())} rows to each "
                f"tensor-parallel rank, which {size} sharding ranks (shard x context) do not "
                "divide; use other sizes."
            )


def _compile_options() -> dict[str, bool]:
    """Leaves out a fusion that fails in norms when sizes change (torch 2.11)."""
    fusion = "triton.mix_order_reduction"
    return {fusion: False} if fusion in torch._inductor.list_options() else {}


def _selective_contexts() -> object:
    def policy(_: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _is_here(layer: nn.Module) -> bool:
    """What stands for a layer of another pipeline stage has no parameters."""
    return any(True for _ in layer.parameters())


def _layer_lists(model: nn.Module) -> list[nn.ModuleList]:
    """The outermost lists of repeated blocks: ``layers``, ``h`` or whatever a model calls them."""
    found: list[nn.ModuleList] = []
    for child in model.children():
        found += [child] if isinstance(child, nn.ModuleList) else _layer_lists(child)
    return found
