"""What a refit must contain: the names, shapes and dtypes of an architecture, and its version.

Both sides derive the list from the model's configuration alone, so that a sender that forgets a
tensor and a receiver that would accept the gap cannot agree with each other by accident.
"""

import functools
from collections.abc import Mapping, Sequence

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from nemo_like.config.remote_code import trusts_code
from nemo_like.errors import RunError

TensorSpec = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of one tensor."""

NUM_NAMES_SHOWN = 3


@functools.cache
def expected_tensors(model_path: str, dtype: torch.dtype) -> dict[str, TensorSpec]:
    """List what a causal language model holds when its parameters have ``dtype``.

    Names are those of transformers; a tied tensor is listed once, under its first name (the
    embedding's), and buffers that are not saved (rotary frequencies) not at all. Treat the result
    as read-only: it is cached.
    """
    model = empty_model(model_path, dtype)
    specs: dict[str, TensorSpec] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            specs[name] = (tuple(tensor.shape), tensor.dtype)
    return specs


def empty_model(model_path: str, dtype: torch.dtype) -> PreTrainedModel:
    """The architecture without memory for its tensors."""
    config = AutoConfig.from_pretrained(model_path, trust_remote_code=trusts_code())
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
