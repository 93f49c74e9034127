"""Which parameters of an architecture can have an adapter, and which of them a configuration names.

Engines and the policy both use this list. Neither can forget a place that the other has.
"""

import difflib
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from nemo_like.config.optimizer import LoraConfig
from nemo_like.errors import UserError
from nemo_like.models.build import TensorSpec, empty_model
from nemo_like.models.naming import Naming

NAME = "default"

_ROUTER_IN_PEFT = "gate"  # which peft takes for a mixture's router, whatever it is
_LAYERS = (nn.Linear, Conv1D)
_ROUTER = "Router"  # some are linear layers that return more than a product
_NOT_MATRICES = (nn.modules.conv._ConvNd, nn.Embedding)
_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class AdapterPlace:
    module: str
    parameter: str
    shape: tuple[int, ...]
    input_first: bool = False
    """Whether it is stored as [in, out], as GPT-2's."""
    is_layer: bool = True
    """Whether the module does nothing but multiply by it: not so experts and routers."""
    by_default: bool = True
    """Whether it has an adapter where no target is named: routers have not."""
    taken_for_experts: bool = False
    """Whether peft would mistake the module's name for an expert's in older files."""

    @property
    def name(self) -> str:
        """By which ``policy.lora.targets`` knows it."""
        named = self.parameter if len(self.shape) == 3 else self.module
        return named.rpartition(".")[2]

    @property
    def full_name(self) -> str:
        return f"{self.module}.{self.parameter}"


def adapter_places(model: PreTrainedModel, lora: LoraConfig) -> list[AdapterPlace]:
    """What ``lora`` adapts in a model without adapters, in the order of its modules.

    Raises UserError if a target names nothing that can be adapted, or if refits of adapters alone
    would carry some that engines have no place for.
    """
    every = _candidates(model)
    names = sorted({place.name for place in every})
    for target in lora.targets:
        if target not in names:
            near = difflib.get_close_matches(target, names, n=_SHOWN)
            hint = f"did you mean {' or '.join(near)}? There" if near else "there"
            raise UserError(
                f"policy.lora.targets: {target} names no linear layer, experts' matrix or router "
                f"of {type(model).__name__} (its output head cannot have an adapter); {hint} are "
                f"{', '.join(names)}."
            )
    chosen = [p for p in every if (p.name in lora.targets if lora.targets else p.by_default)]
    if not chosen:
        raise UserError(
            f"policy.lora.rank={lora.rank}: {type(model).__name__} has no linear layer that could "
            "have an adapter; set policy.lora.rank=0."
        )
    inner = [place.name for place in chosen if not place.is_layer]
    if inner and lora.refit == "adapters":
        raise UserError(
            f"policy.lora.refit=adapters: engines have no place for adapters of {inner[0]}, which "
            "is a mixture of experts' own; set policy.lora.refit=merged, or name linear layers "
            "alone in policy.lora.targets."
        )
    return chosen


def peft_targets(model: PreTrainedModel, lora: LoraConfig) -> dict[str, Any]:
    """The settings of peft's that name ``adapter_places``; short where no other layer is meant."""
    places = adapter_places(model, lora)
    layers = {p.module for p in places if p.is_layer and not p.taken_for_experts}
    others = {name.rpartition(".")[2] for name, _ in model.named_modules() if name not in layers}
    short = {name.rpartition(".")[2] for name in layers}
    # The part of a name that all layers share: of model.layers.11.mlp.experts, mlp.experts.
    full = (place.full_name for place in places if place.module not in layers)
    inner = {re.split(r"\.\d+\.", name)[-1] for name in full}
    return {
        "target_modules": sorted(layers if short & others else short),
        "target_parameters": sorted(inner) or None,
        "fan_in_fan_out": all(place.input_first for place in places),
    }


def inject_adapters(model: PreTrainedModel, config: LoraConfig) -> None:
    """Add adapters in place and freeze all else; UserError if a target names nothing that can."""
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


def _candidates(model: PreTrainedModel) -> list[AdapterPlace]:
    heads = (model.get_output_embeddings(), getattr(model, "score", None))
    older = Naming(model).names_of_experts
    taken = older | {_ROUTER_IN_PEFT} if older else set()
    found = []
    for name, module in model.named_modules():
        if any(module is head for head in heads):
            continue
        leaf = name.rpartition(".")[2]
        if isinstance(module, _LAYERS) and _ROUTER not in type(module).__name__:
            found.append(
                AdapterPlace(
                    module=name,
                    parameter="weight",
                    shape=tuple(module.weight.shape),
                    input_first=isinstance(module, Conv1D),
                    taken_for_experts=leaf in taken,
                )
            )
        elif not isinstance(module, _NOT_MATRICES):
            found += [  # what another kind of module multiplies by: stacked experts, a router
                AdapterPlace(
                    module=name,
                    parameter=own,
                    shape=tuple(parameter.shape),
                    is_layer=False,
                    by_default=parameter.dim() == 3,
                )
                for own, parameter in module.named_parameters(recurse=False)
                if parameter.dim() == 3 or (parameter.dim() == 2 and own == "weight")
            ]
    return found


A, B = ".lora_A.weight", ".lora_B.weight"
"""Ends of the names of an adapter's two tensors, after the name of its layer."""


def expected_adapters(
    model_path: str, dtype: torch.dtype, lora: LoraConfig
) -> dict[str, TensorSpec]:
    """What ``lora`` adds to a model, from the architecture, not from what peft has made."""
    specs: dict[str, TensorSpec] = {}
    for place in adapter_places(empty_model(model_path, dtype), lora):
        ends = place.shape if place.input_first else place.shape[::-1]
        specs[place.module + A] = ((lora.rank, ends[0]), dtype)
        specs[place.module + B] = ((ends[1], lora.rank), dtype)
    return specs
