"""The process of one rank: what every Ray actor of a worker group is and knows."""

import faulthandler
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """A worker's place. Its size does not depend on the size of the group."""

    role: str
    """Name in messages and log files: ``policy``, ``generation``."""
    rank: int
    world_size: int
    address: str
    """Address of its node."""
    node_id: str
    """Ray's id of its node."""
    gpu_ids: tuple[str, ...]
    """GPUs that it may use; empty in a CPU run."""
    environment: Mapping[str, str]
    """Variables that its process gets; see ``network.worker_environment``."""
    log_dir: str
    """Folder of ``<role>-<rank>.log``, which takes all that the process writes to stderr."""

    @property
    def name(self) -> str:
        """As messages name it, for example ``policy rank 3``."""
        return f"{self.role} rank {self.rank}"

    @property
    def log_path(self) -> Path:
        """The worker's own log."""
        return Path(self.log_dir) / f"{self.role}-{self.rank}.log"


class Worker:
    """Base of every actor: devices, log file, and nothing that a subclass must call again."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context
        # Set here, before CUDA is initialised, rather than by Ray's num_gpus: a vLLM engine
        # needs the GPUs of all its bundles in one process, and policy and engine share a GPU.
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(context.gpu_ids)
        os.environ.update(context.environment)
        self._redirect_stderr()

    def ready(self) -> int:
        """The process id, once the process is up."""
        return os.getpid()

    def missing(self, paths: list[str]) -> list[str]:
        """Those of ``paths`` that this node does not see."""
        return [path for path in paths if not Path(path).exists()]

    def _redirect_stderr(self) -> None:
        """Send file descriptor 2 to the log: C++ aborts and child processes end up there too."""
        path = self.context.log_path
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            os.dup2(file.fileno(), 2)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        faulthandler.enable(sys.stderr)
        logging.basicConfig(
            stream=sys.stderr,
            level=logging.INFO,
            format=f"%(asctime)s {self.context.name} %(levelname)s %(name)s: %(message)s",
            force=True,
        )
