"""A folder's architecture without its weights: for the policy, engines, and what they exchange."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from nemo_like.config.model_files import CONFIG
from nemo_like.config.policy import Output
from nemo_like.config.remote_code import trusts_code
from nemo_like.errors import UserError

_LONGEST_REASON = 160


def model_class(path: str, output: Output) -> tuple[Any, PreTrainedConfig]:
    """transformers' class for a folder's model with this output, and its configuration.

    Values are the one label of its model for sequence classification. Raises UserError if
    transformers has none for the architecture.
    """
    settings = model_settings(path)
    if output == "logprobs":
        return AutoModelForCausalLM, settings
    if type(settings) not in AutoModelForSequenceClassification._model_mapping:
        raise UserError(
            f"{path}: transformers has no {type(settings).__name__} with one score a sequence; use "
            "another architecture."
        )
    settings.num_labels = 1
    named: Any = AutoModelForSequenceClassification._model_mapping[type(settings)]
    settings.architectures = [named.__name__]
    return AutoModelForSequenceClassification, settings


def new_model(path: str, output: Output = "logprobs", **options: Any) -> PreTrainedModel:
    """The architecture on the device in context; ``options`` are those of ``from_config``."""
    kind, settings = model_class(path, output)
    return kind.from_config(settings, trust_remote_code=trusts_code(), **options)


def empty_model(path: str, dtype: torch.dtype, output: Output = "logprobs") -> PreTrainedModel:
    """The architecture without memory for its tensors."""
    with torch.device("meta"):
        return new_model(path, output, dtype=dtype)


def model_settings(folder: Path | str) -> PreTrainedConfig:
    """A new one at each call, which the caller may change; UserError if transformers refuses it."""
    try:
        settings = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trusts_code()
        )
        # How to compute is the run's decision, and some names look for kernels on the hub. These
        # are setters, which reach the parts of a multimodal model too. None: not configured.
        settings._attn_implementation = None
        settings._experts_implementation = None
    except Exception as error:  # the boundary to a model's code, which may raise anything
        raise UserError(
            f"{Path(folder) / CONFIG} is refused by transformers ({one_line(error)}); repair it, "
            "or use another model."
        ) from error
    return settings


def one_line(error: BaseException) -> str:
    """An error of a library or of a model's code, short enough for a sentence."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}..."
