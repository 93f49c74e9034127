"""Refit through safetensors files: in /dev/shm (``shared_memory``) or in the run folder (``disk``).

Each file is one bucket: names, shapes and dtypes are in its header, the weight version in its
metadata. In shared memory one policy rank of every node with replicas writes, and the engines map
the pages; nothing crosses the network. On disk rank 0 writes for all.
"""

import logging
import os
import shutil
import time
import uuid
from pathlib import Path
from typing import Any

import psutil

from nemo_like.config.choices import Transport
from nemo_like.config.schema import RefitConfig
from nemo_like.errors import RunError, UserError, WaitTimeoutError
from nemo_like.generation.generation import Generation
from nemo_like.policy.policy import Policy
from nemo_like.refit.protocol import RefitStats

logger = logging.getLogger(__name__)

_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "nemo-like-refit-"


def _remove_leftovers() -> None:
    """Free the memory that drivers killed amid a refit have left on this node."""
    for folder in _SHARED_MEMORY.glob(f"{_PREFIX}*-*"):
        pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


class FileTransport:
    """See the module. Raises UserError if a replica's node could not see the files."""

    def __init__(
        self, config: RefitConfig, run_dir: Path, policy: Policy, generation: Generation[Any]
    ) -> None:
        name = f"{_PREFIX}{os.getpid()}-{uuid.uuid4().hex[:12]}"
        self._bucket_bytes = config.bucket_mib << 20
        self._shared_folder = config.transport is Transport.disk
        if self._shared_folder:
            self._folder = run_dir / name
            self._writers = [rank == 0 for rank in range(len(policy.nodes))]
            return
        _remove_leftovers()
        self._folder = _SHARED_MEMORY / name
        self._writers = [
            node in generation.nodes and node not in policy.nodes[:rank]
            for rank, node in enumerate(policy.nodes)
        ]
        missing = sorted(set(generation.nodes) - set(policy.nodes))
        if missing:
            raise UserError(
                "refit.transport=shared_memory needs a policy worker on every node that generates, "
                f"and {len(missing)} node(s) have none; use refit.transport=disk."
            )

    def sync(self, policy: Policy, generation: Generation[Any]) -> RefitStats:
        """See ``RefitTransport``."""
        start = time.monotonic()
        try:
            written = policy.write_weights(str(self._folder), self._writers, self._bucket_bytes)
            sent = time.monotonic()
            generation.load_weights(self._visible(written.paths, generation), policy.weight_version)
        finally:
            self._clean_up(policy)
        return RefitStats(
            num_bytes=written.num_bytes, send_s=sent - start, load_s=time.monotonic() - sent
        )

    def _clean_up(self, policy: Policy) -> None:
        """Never the reason for a failure, nor for a long wait on workers that failed before."""
        try:
            policy.remove_weights(str(self._folder))
        except (RunError, WaitTimeoutError) as error:
            logger.warning("Files of a refit may be left in %s: %s", self._folder, error)

    def _visible(
        self, paths: dict[str, list[str]], generation: Generation[Any]
    ) -> dict[str, list[str]]:
        """Files that each generating node reads: its own, or the shared folder's."""
        if self._shared_folder:
            (shared,) = paths.values()
            return dict.fromkeys(generation.nodes, shared)
        return paths

    def close(self) -> None:
        """The files are gone after every ``sync``; this is for a run that ended within one."""
        shutil.rmtree(self._folder, ignore_errors=True)
