"""What ``policy.debug`` switches on, at the points of a step where it belongs."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.config.policy import DebugConfig
from nemo_like.observe.metrics import Metrics, merge, values
from nemo_like.policy.debug.checks import (
    CollectiveTimer,
    check_data,
    check_equal_over,
    fingerprint_rows,
    memory_metrics,
)
from nemo_like.policy.debug.hang_report import HangReport
from nemo_like.policy.parallel.mesh import PolicyMesh

logger = logging.getLogger(__name__)


class Diagnostics:
    """Checks and measurements of one rank; each does nothing unless it is configured."""

    def __init__(
        self, config: DebugConfig, mesh: PolicyMesh, device: torch.device, log_dir: str
    ) -> None:
        self._config = config
        self._mesh = mesh
        self._device = device
        self._timer = CollectiveTimer(device) if config.metrics else None
        self._hangs: HangReport | None = None
        if config.hang_report_s is not None:
            path = Path(log_dir) / f"hang-{mesh.rank}.txt"
            self._hangs = HangReport(path, config.hang_report_s, lambda: f"policy rank {mesh.rank}")
        self._measured: list[Metrics] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Watch and measure one phase of a step."""
        with ExitStack() as stack:
            if self._hangs is not None:
                stack.enter_context(self._hangs.watch(name))
            if self._timer is not None:
                stack.enter_context(self._timer)
            yield
        if self._config.metrics:
            memory = memory_metrics(name, self._device)
            logger.info("%s", values(memory))  # every rank has its own log
            self._measured.append(memory)

    def pop(self) -> Metrics:
        """Measurements since the last call."""
        measured, self._measured = self._measured, []
        if self._timer is not None:
            measured.append(self._timer.pop())
        return merge(measured)

    def check_rows(self, micro_batches: Sequence[TensorBatch | None]) -> None:
        """Stop unless every data-parallel rank has rows of its own; collective."""
        if not self._config.checks:
            return
        rows = [row for each in micro_batches if each is not None for row in fingerprint_rows(each)]
        same = [(axis, group) for axis in ("pp", "cp", "tp") if (group := self._mesh.group(axis))]
        check_data(rows, self._mesh.group("dp"), same, self._mesh.rank)

    def check_copies(self, tensors: Mapping[str, Tensor | None], what: str) -> None:
        """Stop unless copies of each tensor are equal; collective."""
        if not self._config.checks:
            return
        mesh, there = self._mesh, {name: one for name, one in tensors.items() if one is not None}
        replicas = mesh.group("replicate") if mesh.ddp else None
        groups = [("replicate", replicas)] if replicas is not None else []
        check_equal_over(there, groups, mesh.rank, what)
        if (tp := mesh.group("tp")) is not None:
            full = {name: one for name, one in there.items() if not _split_over_tp(one)}
            check_equal_over(full, [("tp", tp)], mesh.rank, what)


def _split_over_tp(tensor: Tensor) -> bool:
    names = tensor.device_mesh.mesh_dim_names if isinstance(tensor, DTensor) else None
    return names is not None and "tp" in names
