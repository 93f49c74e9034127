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
from transformers import PreTrainedModel

from nemo_like.config.policy import Output
from nemo_like.errors import RunError
from nemo_like.models.build import empty_model
from nemo_like.models.naming import Naming, Translation

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
def architecture(model_path: str, dtype: torch.dtype, output: Output = "logprobs") -> Architecture:
    """What leaves a folder's model whose parameters have ``dtype``; read-only, as it is cached."""
    return Architecture.of(empty_model(model_path, dtype, output))


@functools.cache
def expected_tensors(model_path: str, dtype: torch.dtype) -> dict[str, TensorSpec]:
    """Shape and dtype of each tensor in a causal language model's files; read-only, too."""
    return architecture(model_path, dtype, "logprobs").specs()


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


def _describe(spec: TensorSpec) -> str:
    shape, dtype = spec
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def _first_of(names: Sequence[str]) -> str:
    rest = len(names) - NUM_NAMES_SHOWN
    return ", ".join(names[:NUM_NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
