"""peft's layers, in place in a model: of the policy and of the ``hf`` engine."""

from torch import nn
from transformers import PreTrainedModel

from nemo_like.config.policy import LoraConfig
from nemo_like.errors import UserError

NAME = "default"
"""The one adapter's name in peft."""


def sent_name(name: str) -> str:
    """The name by which a tensor of an adapted model travels and lies in files.

    >>> sent_name("model.layers.0.mlp.up_proj.base_layer.weight")
    'model.layers.0.mlp.up_proj.weight'
    >>> sent_name("model.layers.0.mlp.up_proj.lora_A.default.weight")
    'model.layers.0.mlp.up_proj.lora_A.weight'
    """
    return name.replace(".base_layer.", ".").replace(f".{NAME}.weight", ".weight")


def inject_adapters(model: PreTrainedModel, config: LoraConfig) -> None:
    """Put adapters beside the configured matrices, in place; all else is frozen.

    Raises UserError if a target is the name of no linear layer, or of a head, whose weights are
    used without its layer.
    """
    import peft  # needs a second to import, and few runs have adapters

    heads = (model.get_output_embeddings(), getattr(model, "score", None))
    linear = {
        name.rpartition(".")[2]
        for name, each in model.named_modules()
        if type(each) is nn.Linear and each not in heads
    }
    for target in config.targets:
        if target not in linear:
            raise UserError(
                f"policy.lora.targets: {target} is no linear layer of {type(model).__name__} "
                f"before its output head; there are {', '.join(sorted(linear))}."
            )
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # pyright: ignore[reportArgumentType]  # fractions work
        target_modules=list(config.targets) or "all-linear",
        exclude_modules=["score"] if hasattr(model, "score") else None,  # it trains itself
    )
    peft.inject_adapter_in_model(settings, model)
