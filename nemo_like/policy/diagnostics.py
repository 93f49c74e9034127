"""Hooks in a training step for ``policy.debug``, which do nothing where it is off."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.config.debug import DebugConfig
from nemo_like.observe.metrics import Metrics
from nemo_like.policy.parallel.mesh import PolicyMesh
from nemo_like.policy.trainer_setup import TrainerSetup


class Diagnostics:
    """Does nothing; ``policy/debug/diagnostics.py`` overrides every method."""

    def begin(self, step: int) -> None:
        """Begin an optimizer step; later calls for the same step do nothing."""

    def end(self) -> None:
        """End the optimizer step."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def pop(self) -> Metrics:
        """What was measured since the last call."""
        return {}

    def check_rows(self, micro_batches: Sequence[TensorBatch | None]) -> None:
        """Stop unless every data-parallel rank has rows of its own; collective."""

    def check_copies(self, tensors: Mapping[str, Tensor | None], what: str) -> None:
        """Stop unless copies of each tensor are equal; collective."""


def diagnostics_of(setup: TrainerSetup, mesh: PolicyMesh, device: torch.device) -> Diagnostics:
    """The hooks for ``policy.debug``."""
    if setup.config.debug == DebugConfig():
        return Diagnostics()
    from nemo_like.policy.debug.diagnostics import DebugDiagnostics

    return DebugDiagnostics(setup, mesh, device)
