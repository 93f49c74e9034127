"""What a refit must contain: an architecture's names on disk, shapes and dtypes, and its version.

Both sides derive the list from the model's configuration alone: a sender that forgets a
tensor and a receiver that would accept the gap cannot agree with each other by accident.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from nemo_like.config.remote_code import trusts_code
from nemo_like.errors import RunError
from nemo_like.models.naming import Naming, Translation
from nemo_like.models.settings import model_settings

TensorSpec = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of one tensor."""

NUM_NAMES_SHOWN = 3


@dataclass(frozen=True)
class Architecture:
    """The tensors of a model in memory, without their memory, and how they are spelled on disk."""

    model: PreTrainedModel
    naming: Naming
    tensors: dict[str, Tensor]
    """By their names in memory. A tied tensor is there once, under its first name (the
    embedding's), and buffers that are not saved (rotary frequencies) are not there at all."""
    translations: list[Translation]
    """Of all ``tensors``, in order."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self:
        """Of a model without wrappers."""
        naming = Naming(model)
        tensors: dict[str, Tensor] = {}
        seen: set[int] = set()
        for name, tensor in model.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                tensors[name] = tensor.detach().to("meta")
        return cls(model, naming, tensors, naming.to_disk(tensors))

    def specs(self) -> dict[str, TensorSpec]:
        """What its files hold."""
        return {
            name: (tuple(tensor.shape), tensor.dtype)
            for each in self.translations
            for name, tensor in self.naming.convert(each, self.tensors.__getitem__).items()
        }


@functools.cache
def architecture(model_path: str, dtype: torch.dtype) -> Architecture:
    """Of a folder's causal language model with parameters of ``dtype``; treat it as read-only."""
    return Architecture.of(empty_model(model_path, dtype))


@functools.cache
def expected_tensors(model_path: str, dtype: torch.dtype) -> dict[str, TensorSpec]:
    """List what a causal language model's files hold when its parameters have ``dtype``.

    Treat the result as read-only: it is cached.
    """
    return architecture(model_path, dtype).specs()


def empty_model(model_path: str, dtype: torch.dtype) -> PreTrainedModel:
    """The architecture without memory for its tensors."""
    config = model_settings(model_path)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            config, dtype=dtype, trust_remote_code=trusts_code()
        )


def check_tensors(found: Mapping[str, TensorSpec], expected: Mapping[str, TensorSpec]) -> None:
    """Raise RunError naming the first missing, unexpected and misshapen tensors."""
    missing = [name for name in expected if name not in found]
    unexpected = [name for name in found if name not in expected]
    wrong = [
        f"{name} is {_describe(found[name])}, not {_describe(spec)}"
        for name, spec in expected.items()
        if name in found and found[name] != spec
    ]
    problems = [
        f"{kind}: {_first_of(names)}"
        for kind, names in (("missing", missing), ("unexpected", unexpected), ("wrong", wrong))
        if names
    ]
    if problems:
        raise RunError(f"The refit does not match the model's architecture; {'; '.join(problems)}.")


def check_version(version: int, current: int | None) -> None:
    """Raise RunError unless ``version`` is newer than what the engine holds (None: nothing)."""
    if current is not None and version <= current:
        raise RunError(
            f"Refit {version} is stale: the engine holds version {current}, and versions only grow."
        )


def _describe(spec: TensorSpec) -> str:
    shape, dtype = spec
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def _first_of(names: Sequence[str]) -> str:
    rest = len(names) - NUM_NAMES_SHOWN
    return ", ".join(names[:NUM_NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
