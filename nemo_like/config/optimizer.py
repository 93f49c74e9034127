"""Sections ``optimizer``, ``scheduler`` and ``lora``: what of a model trains, and how."""

import importlib.util
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from nemo_like.config.section import Count, NonNegative, OnlyIf, Positive, Section, Share

Schedule = Literal["constant", "linear", "cosine", "wsd"]
Moments = Literal["float32", "bfloat16", "int8"]

_OF_ADAM = OnlyIf(
    lambda here, _: here.kind in ("adamw", "muon"), "only {here}.kind=adamw and muon have it"
)
_OF_MOMENTUM = OnlyIf(
    lambda here, _: here.kind in ("sgd", "muon"),
    "only {here}.kind=sgd and muon have it; adamw has beta1",
)
_OF_SHAPE = OnlyIf(
    lambda here, _: here.kind != "constant",
    "a constant schedule has no minimum; set {here}.kind to linear, cosine or wsd",
)
_OF_WSD = OnlyIf(lambda here, _: here.kind == "wsd", "only {here}.kind=wsd has it")


class OptimizerConfig(Section):
    """The update rule. Parameters, gradients and state are float32 whatever ``policy.dtype`` is."""

    kind: Literal["adamw", "sgd", "muon", "adafactor"] = "adamw"
    """``adamw``; ``sgd``; ``muon`` for the matrices of layers, with AdamW for all else;
    ``adafactor``: second moments by row and column."""
    lr: Positive = 1e-4
    """Peak learning rate. For adafactor it is relative to a parameter's root mean square and at
    most 1 / sqrt(step); muon scales its updates to the size of AdamW's."""
    beta1: Annotated[Share, _OF_ADAM] = 0.9
    """Decay of the first moment, in [0, 1) (adamw, muon's AdamW part)."""
    beta2: Annotated[Share, _OF_ADAM] = 0.999
    """Decay of the second moment, in [0, 1) (as ``beta1``)."""
    eps: Annotated[Positive, _OF_ADAM] = 1e-8
    """Added to the root of the second moment (as ``beta1``)."""
    moments: Annotated[Moments, _OF_ADAM] = "float32"
    """Format of AdamW's moments between steps (adamw, muon's AdamW part): 8, 4 or 2 bytes for each
    parameter. ``int8``: whole numbers with a scale for 256 of a row; vectors keep float32."""
    momentum: Annotated[Share, _OF_MOMENTUM] = 0.95
    """Decay of the momentum, in [0, 1) (sgd, muon)."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay of matrices (biases and norms have none); sgd adds it to the
    gradient."""

    def rules(self, here: str, run: Any) -> Iterator[str]:
        """Blocks of int8 are not cut."""
        if self.moments == "int8" and (size := run.policy.parallel.tensor_parallel_size) > 1:
            yield (
                f"{here}.moments=int8 has a scale for 256 numbers of a row, which "
                f"policy.parallel.tensor_parallel_size={size} would cut; set {here}.moments="
                "bfloat16 or tensor_parallel_size=1."
            )


class SchedulerConfig(Section):
    """Learning rate over optimizer steps."""

    kind: Schedule = "constant"
    """Shape after warm-up. ``linear`` and ``cosine`` reach their minimum at the last step; ``wsd``
    stays at the peak and falls linearly over the last ``decay_steps``."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of linear warm-up from lr / warmup_steps to lr."""
    decay_steps: Annotated[Count, _OF_WSD] = 10
    """Last steps, over which ``wsd`` falls."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1), _OF_SHAPE] = 0.0
    """Learning rate at the last step as a share of the peak, in [0, 1]."""


_HAS_ADAPTERS = OnlyIf(
    lambda here, _: here.rank > 0, "policy.lora.rank is 0, so there are no adapters; set it too"
)


class LoraConfig(Section):
    """Low-rank adapters (arXiv:2106.09685): the model is frozen, and small added matrices train."""

    rank: Annotated[int, Field(ge=0)] = 0
    """Rank of the adapters. 0: none, the full model trains."""
    alpha: Annotated[Positive, _HAS_ADAPTERS] = 16.0
    """An adapter's output is multiplied by alpha / rank."""
    targets: Annotated[list[str], _HAS_ADAPTERS] = Field(default_factory=list)
    """Matrices that get an adapter, by the last part of their name: linear layers (``q_proj``),
    experts, which transformers stacks (``gate_up_proj``, ``down_proj``), routers (``gate``). Empty:
    all linear layers and experts. (The output head cannot have one.)"""
    refit: Annotated[
        Literal["merged", "adapters"],
        _HAS_ADAPTERS,
        OnlyIf(lambda _, run: run.samples, "this run has no engines to refit"),
    ] = "merged"
    """``merged``: each refit carries the full model, with adapters added and rounded to
    ``policy.dtype``; ``adapters``: engines keep model and adapters apart, as the policy does, and
    refits after the first carry adapters alone (vLLM samples more slowly). Engines that sleep drop
    the model, and each refit brings it again: see ``generation.sleep``."""

    def rules(self, here: str, run: Any) -> Iterator[str]:
        if self.rank == 0:
            return
        if importlib.util.find_spec("peft") is None:
            yield (
                f"{here}.rank={self.rank} needs the package peft, which is not installed; "
                "pip install peft."
            )
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if (size := getattr(run.policy.parallel, name)) > 1:
                yield (
                    f"policy.parallel.{name}={size} does not go with {here}; set it to 1: frozen "
                    "weights are sharded over all ranks anyway."
                )
        if run.policy.optimizer.kind == "muon":
            yield (
                "policy.optimizer.kind=muon orthogonalises whole matrices and does not go with "
                f"{here}, which trains factors of them; use adamw."
            )
        if run.samples and self.refit == "adapters":
            yield from self._in_engine(here, run)

    def _in_engine(self, here: str, run: Any) -> Iterator[str]:
        engine = f"generation.backend={run.generation.backend}"
        if self.rank > (most := run.generation.kind.most_adapter_rank):
            yield (
                f"{here}.rank={self.rank} is more than {engine} computes with (at most {most}); "
                f"set {here}.refit=merged."
            )
        exact = run.generation.kind.float32_adapters_on_gpus
        if run.cluster.gpus_per_node and run.policy.dtype == "float32" and not exact:
            yield (
                f"{here}.refit=adapters does not go with policy.dtype=float32 on GPUs, where "
                f"{engine} computes with adapters of 16 bits only; set {here}.refit=merged, which "
                "is exact in float32."
            )
