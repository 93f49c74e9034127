"""Low-rank adapters (LoRA, arXiv:2106.09685) through peft: where they sit, how they begin, merging.

A matrix W stays as it is, and W + (alpha / rank) * B @ A is computed; only A [rank, in] and
B [out, rank] train. Experts that are stacked in one parameter have an A and a B each. B begins at
0, so that training begins with the model itself.
"""

import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from nemo_like.config.optimizer import LoraConfig
from nemo_like.models.adapter_places import NAME, inject_adapters, peft_targets
from nemo_like.models.naming import plain_name
from nemo_like.policy.parallel.full_tensors import local_part

_A, _B = f".lora_A.{NAME}.weight", f".lora_B.{NAME}.weight"


def add_adapters(model: PreTrainedModel, config: LoraConfig) -> None:
    """Add adapters to the configured matrices, in place; everything but ``score`` is frozen."""
    inject_adapters(model, config)
    for name, parameter in model.named_parameters():
        if name.startswith("score."):  # a head that begins at 0 can't stay there
            parameter.requires_grad_(True)


@torch.no_grad()
def initialize_adapters(model: nn.Module) -> None:
    """A as peft has it (uniform, Kaiming), B zero; drawn by name, so the same in any layout."""
    for name, parameter in model.named_parameters():
        if name.endswith(_B):
            nn.init.zeros_(local_part(parameter))
        if name.endswith(_A):
            generator = torch.Generator().manual_seed(zlib.crc32(plain_name(name).encode()))
            full = torch.empty(parameter.shape)
            nn.init.kaiming_uniform_(full, a=math.sqrt(5), generator=generator)
            full = full.to(parameter.device)
            if isinstance(parameter, DTensor):
                # Every rank has drawn the same: nothing needs to travel.
                full = distribute_tensor(
                    full, parameter.device_mesh, parameter.placements, src_data_rank=None
                )
            local_part(parameter).copy_(local_part(full))


@contextmanager
def adapters_off(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Within, the models are those that training began with."""
    layers: list[Any] = [
        each for module in modules for each in module.modules() if hasattr(each, "lora_A")
    ]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """What is added to one parameter, which is [out, in] unless said otherwise."""

    a: Tensor
    b: Tensor
    scale: float
    input_first: bool
    num_experts: int

    def merged(self, full: Tensor, gather: Callable[[Tensor], Tensor]) -> Tensor:
        """Float32 ``full`` + scale * b @ a; ``gather`` gives a shard's full tensor, in float32."""
        a, b = gather(self.a), gather(self.b)
        if full.dim() == 3:
            # As peft has them: A is [experts * rank, in], B is [out, rank * experts].
            a = a.unflatten(0, (self.num_experts, -1))
            b = b.unflatten(1, (-1, self.num_experts)).permute(2, 0, 1)
        factors = (a.mT, b.mT) if self.input_first else (b, a)
        add = torch.baddbmm if full.dim() == 3 else torch.addmm
        return add(full, *factors, alpha=self.scale)


def adapters_of(module: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Adapter]:
    """The adapter of each adapted parameter, by its name in a model without wrappers.

    ``tensors``: ``module``'s state, by names without wrappers.
    """
    found: dict[str, Adapter] = {}
    for name, layer in module.named_modules():
        if not hasattr(layer, "lora_A"):
            continue
        own: Any = layer
        parameter = getattr(own, "parameter_name", "weight")
        stack = getattr(own, "num_experts", 1)
        # Stacks are [experts, out, in] where peft has swapped its factors' ends for them.
        swapped = getattr(own, "_did_swap_in_out_features", False)
        found[plain_name(f"{name}.{parameter}")] = Adapter(
            a=tensors[plain_name(name + _A)],
            b=tensors[plain_name(name + _B)],
            scale=own.scaling[NAME],
            input_first=own.fan_in_fan_out or (stack > 1 and not swapped),
            num_experts=stack,
        )
    return found


def write_adapter(
    folder: Path, tensors: dict[str, Tensor], config: LoraConfig, base: str, plain: PreTrainedModel
) -> None:
    """A folder that ``peft.PeftModel.from_pretrained`` loads onto the model of ``base``.

    ``tensors``: the adapters', and the head of a model that gives values. ``plain``: ``base``'s
    architecture, without adapters.
    """
    folder.mkdir(parents=True, exist_ok=True)
    named = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    gives_values = "score.weight" in tensors
    settings = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if gives_values else "CAUSAL_LM",
        "modules_to_save": ["score"] if gives_values else None,
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        **peft_targets(plain, config),
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n")
