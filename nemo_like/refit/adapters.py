"""Adapters that travel apart from their matrices: names and buckets."""

from collections.abc import Sequence

import torch

from nemo_like.config.lora import LoraConfig
from nemo_like.errors import RunError
from nemo_like.models.adapter_places import adapter_places
from nemo_like.models.build import empty_model
from nemo_like.models.naming import is_adapter
from nemo_like.refit.buckets import Bucket, announced_tensors, plan_buckets
from nemo_like.refit.manifest import TensorSpec, check_tensors, expected_tensors

A, B = ".lora_A.weight", ".lora_B.weight"
"""Ends of the names of an adapter's two tensors, after the name of its layer."""


def travels_apart(lora: LoraConfig) -> bool:
    """Whether engines get adapters separately, not merged into the model."""
    return lora.rank > 0 and lora.refit == "adapters"


def expected_adapters(
    model_path: str, dtype: torch.dtype, lora: LoraConfig
) -> dict[str, TensorSpec]:
    """What ``lora`` adds to a model, in the order of its layers; UserError if that is nothing.

    Derived from the architecture, as ``expected_tensors`` is, and not from what peft has made.
    """
    specs: dict[str, TensorSpec] = {}
    for place in adapter_places(empty_model(model_path, dtype), lora):
        ends = place.shape if place.input_first else place.shape[::-1]
        specs[place.module + A] = ((lora.rank, ends[0]), dtype)
        specs[place.module + B] = ((ends[1], lora.rank), dtype)
    return specs


def check_buckets(
    buckets: Sequence[Bucket], model_path: str, dtype: torch.dtype, lora: LoraConfig | None
) -> None:
    """Raise RunError unless ``buckets`` hold exactly the tensors of model and adapters.

    ``lora``: whose adapters travel apart. None: those of no adapter.
    """
    expected = expected_tensors(model_path, dtype)
    if lora is not None:
        expected = expected | expected_adapters(model_path, dtype, lora)
    check_tensors(announced_tensors(buckets), expected)


def check_refit(
    version: int, current: int | None, lora: LoraConfig | None, *, adapters_only: bool, running: int
) -> None:
    """Raise RunError for a refit that an engine must refuse before it touches a weight.

    ``current``: the version that it holds (None: nothing). ``lora``: what it was started with.
    ``running``: completions that it is sampling.
    """
    if running:
        raise RunError(
            f"Refit {version} came while {running} completions were being sampled; wait for them "
            "first."
        )
    if current is not None and version <= current:
        raise RunError(
            f"Refit {version} is stale: the engine holds version {current}, and versions only grow."
        )
    if adapters_only and lora is None:
        raise RunError(
            f"Refit {version} matches no adapter: it has adapters alone, and the engine was "
            "started without any."
        )
    if adapters_only and current is None:
        raise RunError(
            f"Refit {version} has adapters alone, and the engine holds no model to which they "
            "could be applied."
        )


def plan_refit(
    model_path: str, dtype: torch.dtype, lora: LoraConfig | None, bucket_bytes: int
) -> list[Bucket]:
    """All that an engine without weights needs; no bucket has both adapters and other tensors."""
    buckets = plan_buckets(expected_tensors(model_path, dtype), bucket_bytes)
    if lora is not None:
        buckets += plan_buckets(expected_adapters(model_path, dtype, lora), bucket_bytes)
    return buckets


def numbered(buckets: Sequence[Bucket], *, adapters_only: bool) -> list[tuple[int, Bucket]]:
    """The buckets of a refit, with their agreed positions."""
    return [
        (number, bucket)
        for number, bucket in enumerate(buckets)
        if not adapters_only or is_adapter(bucket.slots[0].name)
    ]
