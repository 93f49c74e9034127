"""What ``policy.debug`` switches on, at the points of a step where it belongs."""

import faulthandler
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import torch._C._distributed_c10d as c10d
from torch import Tensor
from torch.distributed.tensor import DTensor

from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.observe.metrics import Metrics, merge, values
from nemo_like.policy.debug.checks import (
    CollectiveTimer,
    check_data,
    check_equal_over,
    fingerprint_rows,
    memory_metrics,
)
from nemo_like.policy.debug.profile import StepProfiles
from nemo_like.policy.diagnostics import Diagnostics
from nemo_like.policy.parallel.mesh import PolicyMesh
from nemo_like.policy.trainer_setup import TrainerSetup

logger = logging.getLogger(__name__)


class DebugDiagnostics(Diagnostics):
    """Checks and measurements of one rank; each does nothing unless it is configured."""

    def __init__(self, setup: TrainerSetup, mesh: PolicyMesh, device: torch.device) -> None:
        self._config = config = setup.config.debug
        self._mesh = mesh
        self._device = device
        self._timer = CollectiveTimer(device) if config.metrics else None
        self._hangs: HangReport | None = None
        if config.hang_report_s is not None:
            path = Path(setup.log_dir) / f"hang-{setup.role}-{mesh.rank}.txt"
            told = f"{setup.role} rank {mesh.rank}"
            self._hangs = HangReport(path, config.hang_report_s, lambda: told)
        self._measured: list[Metrics] = []
        path = Path(setup.log_dir) / f"profile-{mesh.rank}"
        self._profiles = StepProfiles(config, mesh.rank, device, path)

    def begin(self, step: int) -> None:
        self._profiles.begin(step)

    def end(self) -> None:
        self._profiles.end()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
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
        measured, self._measured = self._measured, []
        if self._timer is not None:
            measured.append(self._timer.pop())
        return merge(measured)

    def check_rows(self, micro_batches: Sequence[TensorBatch | None]) -> None:
        if not self._config.checks:
            return
        rows = [row for each in micro_batches if each is not None for row in fingerprint_rows(each)]
        same = [(axis, group) for axis in ("pp", "cp", "tp") if (group := self._mesh.group(axis))]
        check_data(rows, self._mesh.group("dp"), same, self._mesh.rank)

    def check_copies(self, tensors: Mapping[str, Tensor | None], what: str) -> None:
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


# PyTorch's flight recorders: one of NCCL's collectives (CUDA builds only), one of gloo's.
_FLIGHT_RECORDERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")


@dataclass(eq=False)
class _Phase:
    name: str
    since_s: float
    """On the monotonic clock."""
    began: str
    reported: bool = False


class HangReport:
    """Appends a report to ``path`` for each phase that lasts longer than ``limit_s`` seconds.

    It says who (``describe()``), which phase, since when, what every thread does, what memory is
    left and which collectives are pending. The run itself goes on.
    """

    def __init__(self, path: Path, limit_s: float, describe: Callable[[], str]) -> None:
        self._path = path
        self._limit_s = limit_s
        self._describe = describe
        self._open: list[_Phase] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @contextmanager
    def watch(self, phase: str) -> Iterator[None]:
        """Watch the block; blocks may nest, and each has its own limit and report."""
        entered = _Phase(phase, time.monotonic(), time.strftime("%Y-%m-%d %H:%M:%S %z"))
        with self._changed:
            self._open.append(entered)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hang-report", daemon=True)
                self._thread.start()
            self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._open.remove(entered)

    def _run(self) -> None:
        while True:
            phase = self._wait_for_late_phase()
            # Outside the lock: a phase that ends meanwhile must not wait for the file system.
            try:
                self._write(phase)
            except OSError as error:
                logger.warning("Cannot write a hang report to %s: %s", self._path, error)

    def _wait_for_late_phase(self) -> _Phase:
        with self._changed:
            while True:
                waiting = [phase for phase in self._open if not phase.reported]
                # Phases are opened in order, so the first one is the next to be late.
                left_s = (
                    self._limit_s - (time.monotonic() - waiting[0].since_s) if waiting else None
                )
                if left_s is not None and left_s <= 0:
                    waiting[0].reported = True
                    return waiting[0]
                self._changed.wait(left_s)

    def _write(self, phase: _Phase) -> None:
        lasted_s = time.monotonic() - phase.since_s
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(
                f"{self._describe()}\nphase {phase.name!r} began {phase.began} and has lasted "
                f"{lasted_s:.1f} s (limit {self._limit_s:g} s)\n\nThreads\n"
            )
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
            file.write(f"\nHost memory\n{_host_memory()}\n")
            # From here on locks of PyTorch are taken, which a thread that hangs may hold.
            for section in (_pending_collectives, _gpu_memory):
                file.flush()
                file.write(section())
            file.write("\n")
        logger.warning(
            "Phase %r has lasted %.0f s, longer than policy.debug.hang_report_s=%g; where this "
            "process stands is in %s.",
            phase.name,
            lasted_s,
            self._limit_s,
            self._path,
        )


def _host_memory() -> str:
    machine = psutil.virtual_memory()
    resident = psutil.Process().memory_info().rss
    return (
        f"this process {resident / 2**30:.2f} GiB; machine {machine.used / 2**30:.1f} of "
        f"{machine.total / 2**30:.1f} GiB used, {machine.available / 2**30:.1f} GiB available"
    )


def _gpu_memory() -> str:
    if not torch.cuda.is_initialized():
        return ""
    used = filter(torch.cuda.memory_reserved, range(torch.cuda.device_count()))
    summaries = [torch.cuda.memory_summary(i, abbreviated=True) for i in used]
    return "\nGPU memory\n" + "\n".join(summaries) + "\n"


def _pending_collectives() -> str:
    """Pending calls and the state of each process group, from the flight recorders."""
    lines: list[str] = []
    for dump in filter(None, (getattr(c10d, name, None) for name in _FLIGHT_RECORDERS)):
        trace: dict[str, Any] = json.loads(dump())
        lines += [f"group {group}: {state}" for group, state in trace.get("pg_status", {}).items()]
        lines += [_pending(entry) for entry in trace.get("entries", []) if not entry["retired"]]
    return "\nPending collectives (flight recorder)\n" + "\n".join(lines or ["none"]) + "\n"


def _pending(entry: dict[str, Any]) -> str:
    age_s = time.time() - entry["time_created_ns"] / 1e9
    return (
        f"{entry['profiling_name']} of group {entry['process_group']}: number "
        f"{entry['collective_seq_id']}, {entry['state']}, called {age_s:.1f} s ago, "
        f"sizes {entry['input_sizes']} -> {entry['output_sizes']}"
    )
