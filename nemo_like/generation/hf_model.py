"""The transformers model of the ``hf`` engine: built without weights, filled by refits."""

from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from nemo_like.generation.protocol import EngineConfig
from nemo_like.models.adapter_places import inject_adapters
from nemo_like.models.build import architecture, new_model
from nemo_like.models.naming import plain_name


def build_model(config: EngineConfig) -> PreTrainedModel:
    """Build the architecture with random weights, which the first refit replaces."""
    with torch.device(config.device):
        model = new_model(
            config.model_path,
            dtype=getattr(torch, config.dtype),
            # None: sdpa, or eager for models that lack it.
            attn_implementation="eager" if config.eager_attention else None,
        )
        if config.lora is not None:
            inject_adapters(model, config.lora)
    return model.eval().requires_grad_(False)


@torch.no_grad()
def copy_weights(
    model: PreTrainedModel, config: EngineConfig, tensors: Iterator[tuple[str, torch.Tensor]]
) -> None:
    """Overwrite the model's tensors in place; tied copies share storage and follow."""
    naming = architecture(config.model_path, getattr(torch, config.dtype)).naming
    own = {plain_name(name): tensor for name, tensor in model.state_dict().items()}
    for name, tensor in naming.in_memory(tensors):
        own[name].copy_(tensor)
    model.tie_weights()
