"""Low-rank adapters (LoRA, arXiv:2106.09685) through peft: where they sit, how they begin, merging.

A matrix W stays as it is, and W + (alpha / rank) * B @ A is computed; only A [rank, in] and
B [out, rank] train. B begins at 0, so that training begins with the model itself.
"""

import json
import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from nemo_like.config.policy import LoraConfig
from nemo_like.models.adapters import NAME, inject_adapters
from nemo_like.policy.names import hf_name
from nemo_like.policy.shards import local_part
from nemo_like.weights.adapters import A

_A, _B = f".lora_A.{NAME}.weight", f".lora_B.{NAME}.weight"


def add_adapters(model: PreTrainedModel, config: LoraConfig) -> None:
    """Put adapters beside the configured matrices, in place; all else is frozen but ``score``.

    Raises UserError if a target is the name of no linear layer.
    """
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
            generator = torch.Generator().manual_seed(zlib.crc32(hf_name(name).encode()))
            whole = torch.empty(parameter.shape)
            nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
            whole = whole.to(parameter.device)
            if isinstance(parameter, DTensor):
                # Every rank has drawn the same: nothing needs to travel.
                whole = distribute_tensor(
                    whole, parameter.device_mesh, parameter.placements, src_data_rank=None
                )
            local_part(parameter).copy_(local_part(whole))


@contextmanager
def adapters_off(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Within, the models are those that training began with; without adapters, nothing changes."""
    layers = [each for module in modules for each in _adapted(module)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """What is added to one matrix."""

    a: Tensor
    b: Tensor
    scale: float

    def merged(self, whole: Tensor, gather: Any) -> Tensor:
        """Float32 ``whole`` + scale * b @ a; ``gather`` makes a shard whole, in float32."""
        return torch.addmm(whole, gather(self.b), gather(self.a), alpha=self.scale)


def adapters_of(module: nn.Module, state: dict[str, Tensor]) -> dict[str, Adapter]:
    """The adapter of each adapted matrix, by the matrix's name in ``state``.

    ``state`` is by Hugging Face names, adapters' parameters included.
    """
    adapted = _adapted(module)
    return {
        f"{name.removesuffix(_A)}.weight": Adapter(
            a=tensor,
            b=state[name.removesuffix(_A) + _B],
            scale=adapted[0].scaling[NAME],  # all have the same
        )
        for name, tensor in state.items()
        if name.endswith(_A)
    }


def write_adapter(folder: Path, tensors: dict[str, Tensor], config: LoraConfig, base: str) -> None:
    """A folder that ``peft.PeftModel.from_pretrained`` loads onto the model of ``base``."""
    folder.mkdir(parents=True, exist_ok=True)
    named = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    targets = {name.removesuffix(A).rpartition(".")[2] for name in tensors if name.endswith(A)}
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "target_modules": sorted(targets),
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _adapted(module: nn.Module) -> list[Any]:
    return [each for each in module.modules() if hasattr(each, "lora_A")]
