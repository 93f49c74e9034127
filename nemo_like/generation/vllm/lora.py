"""Adapters in vLLM (0.26 to 0.33): its own LoRA layers, filled from tensors instead of files.

There is one adapter, of one id, which every request asks for; a refit replaces it in the buffers
that its layers compute with.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights

from nemo_like.config.optimizer import LoraConfig
from nemo_like.generation.vllm.settings import ADAPTER_ID
from nemo_like.models.adapter_places import A, B


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Temporarily restore each layer to its own place, under the name that weights load by."""
    layers = {
        name: layer for name, layer in model.named_modules() if isinstance(layer, BaseLayerWithLoRA)
    }
    for name, layer in layers.items():
        model.set_submodule(name, layer.base_layer)
    try:
        yield
    finally:
        for name, layer in layers.items():
            model.set_submodule(name, layer)


def replace_adapters(model_runner: Any, tensors: Mapping[str, Tensor], lora: LoraConfig) -> None:
    """Let the model compute with ``tensors``; RuntimeError if a layer has no place for its own."""
    manager = model_runner.lora_manager._adapter_manager
    layers = {
        name: LoRALayerWeights(name, lora.rank, lora.alpha, a, tensors[name + B])  # pyright: ignore
        for name, a in ((one.removesuffix(A), a) for one, a in tensors.items() if one.endswith(A))
    }
    # What vLLM does not know, it would leave out in silence. (It packs q, k and v, for one.)
    known = set(manager.modules).union(*manager.packed_modules.values())
    if unknown := layers.keys() - known:
        raise RuntimeError(
            f"vLLM has no place for the adapter of {min(unknown)}; set policy.lora.refit=merged."
        )
    manager.remove_adapter(ADAPTER_ID)
    # Sleep takes the buffers that say which tokens use it, and the same tokens would not refill
    # them.
    manager._last_mapping = None
    manager.add_adapter(LoRAModel(ADAPTER_ID, lora.rank, layers))
    manager.activate_adapter(ADAPTER_ID)
