"""Sections ``optimizer`` and ``scheduler``, which each trained model has."""

import importlib.util
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from nemo_like.config.section import Count, NonNegative, OnlyIf, Positive, Section, Share

Schedule = Literal["constant", "linear", "cosine", "wsd"]
Moments = Literal["float32", "bfloat16", "int8"]

_ADAM = ("adamw", "adamw8bit", "muon")
_OF_ADAM = OnlyIf(
    lambda here, _: here.kind in _ADAM, "only {here}.kind=adamw, adamw8bit and muon have it"
)
_OF_ADAMW = OnlyIf(
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

    kind: Literal["adamw", "sgd", "muon", "adafactor", "adamw8bit"] = "adamw"
    """``adamw``; ``sgd``; ``muon`` for the matrices of layers, with AdamW for all else;
    ``adafactor``: second moments by row and column; ``adamw8bit`` (package torchao): 8-bit
    moments."""
    lr: Positive = 1e-4
    """Peak learning rate. For adafactor it is relative to a parameter's root mean square and at
    most 1 / sqrt(step); muon scales its updates to the size of AdamW's."""
    beta1: Annotated[Share, _OF_ADAM] = 0.9
    """Decay of the first moment, in [0, 1) (adamw, adamw8bit, muon's AdamW part)."""
    beta2: Annotated[Share, _OF_ADAM] = 0.999
    """Decay of the second moment, in [0, 1) (as ``beta1``)."""
    eps: Annotated[Positive, _OF_ADAM] = 1e-8
    """Added to the root of the second moment (as ``beta1``)."""
    moments: Annotated[Moments, _OF_ADAMW] = "float32"
    """Format of AdamW's moments between steps (adamw, muon's AdamW part): 8, 4 or 2 bytes for each
    parameter. ``int8``: whole numbers with a scale for 256 of a row; vectors keep float32."""
    momentum: Annotated[Share, _OF_MOMENTUM] = 0.95
    """Decay of the momentum, in [0, 1) (sgd, muon)."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay of matrices (biases and norms have none); sgd adds it to the
    gradient."""

    def rules(self, here: str, run: Any) -> Iterator[str]:
        """adamw8bit comes from a package of its own; blocks of int8 are not cut."""
        if self.kind == "adamw8bit" and importlib.util.find_spec("torchao") is None:
            yield (
                f"{here}.kind=adamw8bit needs the package torchao, which is not installed; "
                "pip install torchao, or use adamw."
            )
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
