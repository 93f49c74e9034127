"""peft's layers, in place in a model: of the policy and of the ``hf`` engine."""

from transformers import PreTrainedModel

from nemo_like.config.lora import LoraConfig
from nemo_like.errors import UserError
from nemo_like.models.adapter_places import peft_targets

NAME = "default"
"""The one adapter's name in peft."""


def inject_adapters(model: PreTrainedModel, config: LoraConfig) -> None:
    """Add adapters to the configured matrices, in place; all else is frozen.

    Raises UserError if a target names nothing that can have one.
    """
    import peft  # needs a second to import, and few runs have adapters

    # Names alone: peft's own "all-linear" would add routers, and take shared experts for experts.
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # pyright: ignore[reportArgumentType]  # fractions work
        **peft_targets(model, config),
        exclude_modules=["score"] if hasattr(model, "score") else None,  # it trains itself
    )
    try:
        peft.inject_adapter_in_model(settings, model)
    except ValueError as error:
        raise UserError(
            f"policy.lora.targets: {error} Name other layers there, or set policy.lora.rank=0."
        ) from error
