"""What a refit must contain: the names, shapes and dtypes of an architecture, and its version.

Both sides derive the list from the model's configuration alone, so that a sender that forgets a
tensor and a receiver that would accept the gap cannot agree with each other by accident.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM

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
    config = AutoConfig.from_pretrained(model_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    specs: dict[str, TensorSpec] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            specs[name] = (tuple(tensor.shape), tensor.dtype)
    return specs


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


def refit_metadata(version: int) -> dict[str, str]:
    """Return the metadata that a sender writes into every safetensors file of a refit."""
    return {"format": "pt", "version": str(version)}


def check_refit(
    paths: Sequence[str], version: int, current: int | None, expected: Mapping[str, TensorSpec]
) -> None:
    """Raise RunError unless ``paths`` hold one whole refit that is newer than ``current``.

    Reads headers only, so it costs milliseconds and is done before any weight is touched.
    """
    if current is not None and version <= current:
        raise RunError(
            f"Refit {version} is stale: the engine holds version {current}, and versions only grow."
        )
    found: dict[str, TensorSpec] = {}
    for path in paths:
        with _open_safetensors(path) as file:
            written = (file.metadata() or {}).get("version")
            if written != str(version):
                raise RunError(
                    f"{path} belongs to refit {written}, but refit {version} was announced."
                )
            for name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
                if name in found:
                    raise RunError(f"Refit {version} holds {name} twice; again in {path}.")
                tensor = file.get_tensor(name)
                found[name] = (tuple(tensor.shape), tensor.dtype)
    check_tensors(found, expected)


def read_tensors(paths: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a refit one by one, on the CPU and mapped rather than read at once."""
    for path in paths:
        with _open_safetensors(path) as file:
            for name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
                yield name, file.get_tensor(name)


def _open_safetensors(path: str) -> safe_open:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise RunError(f"The refit file {path} cannot be read: {error}.") from error


def _describe(spec: TensorSpec) -> str:
    shape, dtype = spec
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def _first_of(names: Sequence[str]) -> str:
    rest = len(names) - NUM_NAMES_SHOWN
    return ", ".join(names[:NUM_NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
