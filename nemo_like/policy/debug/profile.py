"""Profiles of chosen optimizer steps on the first rank: torch's profiler, and CUDA's memory."""

import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from nemo_like.config.debug import DebugConfig

logger = logging.getLogger(__name__)


class StepProfiles:
    """Files in ``logs/`` of one rank: a Chrome trace for each step, on a GPU also a snapshot."""

    def __init__(self, config: DebugConfig, rank: int, device: torch.device, path: Path) -> None:
        """``path`` begins the names of files."""
        self._steps = config.profile_steps if rank == 0 else ()
        self._on_gpu = device.type == "cuda"
        self._path = path
        self._running: tuple[int, profile] | None = None

    def begin(self, step: int) -> None:
        """The first work of an optimizer step; later calls for the same step do nothing."""
        if self._running is not None or step not in self._steps:
            return
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
        if self._on_gpu:
            torch.cuda.memory._record_memory_history()
        running = profile(activities=kinds, record_shapes=True, profile_memory=True)
        running.start()
        self._running = step, running

    def end(self) -> None:
        """The optimizer step is over."""
        if self._running is None:
            return
        (step, running), self._running = self._running, None
        running.stop()
        path = f"{self._path}-step{step}"
        running.export_chrome_trace(f"{path}.json")
        if self._on_gpu:
            torch.cuda.memory._dump_snapshot(f"{path}.pickle")
            torch.cuda.memory._record_memory_history(enabled=None)
        logger.info("Profile of optimizer step %d: %s.json", step, path)
