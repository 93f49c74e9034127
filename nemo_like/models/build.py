"""A folder's architecture without its weights: for the policy, engines, and what they exchange."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from nemo_like.config.model_files import CONFIG, trusts_code
from nemo_like.config.policy import Output
from nemo_like.errors import UserError
from nemo_like.models.naming import Naming, Translation

_LONGEST_REASON = 160


def model_class(path: str, output: Output) -> tuple[Any, PreTrainedConfig]:
    """transformers' class for a folder's model with this output, and its configuration.

    Values are the one label of its model for sequence classification; UserError if there is none.
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


TensorSpec = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Architecture:
    """The tensors of a model in memory, without their memory, and how they are spelled on disk."""

    model: PreTrainedModel
    naming: Naming
    tensors: dict[str, Tensor]
    """By their names in memory. A tied tensor is there once, under its first name (the
    embedding's), and buffers that are not saved (rotary frequencies) are not there at all."""
    translations: list[Translation]

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self:
        naming = Naming(model)
        tensors: dict[str, Tensor] = {}
        seen: set[int] = set()
        for name, tensor in model.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                tensors[name] = tensor.detach().to("meta")
        return cls(model, naming, tensors, naming.to_disk(tensors))

    def specs(self) -> dict[str, TensorSpec]:
        return {
            name: (tuple(tensor.shape), tensor.dtype)
            for each in self.translations
            for name, tensor in self.naming.convert(each, self.tensors.__getitem__).items()
        }


@functools.cache
def architecture(model_path: str, dtype: torch.dtype, output: Output = "logprobs") -> Architecture:
    """The export of a folder's model with parameters in ``dtype``; cached, so read-only."""
    return Architecture.of(empty_model(model_path, dtype, output))


@functools.cache
def expected_tensors(model_path: str, dtype: torch.dtype) -> dict[str, TensorSpec]:
    """Shape and dtype of each tensor in a causal language model's files; read-only, too."""
    return architecture(model_path, dtype, "logprobs").specs()
