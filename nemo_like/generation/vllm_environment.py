"""How vLLM's processes start: their environment variables, with our reasons, and their fork server.

Without an import of vLLM or torch, so that the server begins to import them before we do.
"""

import importlib.util
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from typing import Any

from nemo_like.errors import UserError

_LONGEST_TMPDIR = 70
"""A Unix socket's path has 107 characters, and vLLM's names take 37 of them."""


@dataclass(frozen=True, kw_only=True)
class EngineDevices:
    """What the environment of an engine's processes depends on."""

    device: str
    """``cpu`` or ``cuda``."""
    tensor_parallel_size: int
    engine_kwargs: Mapping[str, Any]


def start_fork_server(devices: EngineDevices) -> None:
    """Begin to import vLLM in the process that this engine's processes will be forks of.

    Raises UserError where temporary files are too deep for their sockets.
    """
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) > _LONGEST_TMPDIR:
        raise UserError(
            f"TMPDIR={folder} is too long a path for the Unix sockets of vLLM's processes; before "
            f"Ray starts, set it on every node to a folder of at most {_LONGEST_TMPDIR} characters."
        )
    with start_environment(devices):
        forkserver.set_forkserver_preload(["nemo_like.generation.vllm_processes"])
        forkserver.ensure_running()


@contextmanager
def start_environment(devices: EngineDevices) -> Iterator[None]:
    """Set what vLLM's processes inherit, where the user has not; undo that, and vLLM's own, after.

    Left set, these variables would reach whatever else this process starts.
    """
    saved = dict(os.environ)
    for name, value in _variables(devices).items():
        os.environ.setdefault(name, value)
    try:
        yield
    finally:
        for name in os.environ.keys() - saved.keys():
            del os.environ[name]
        os.environ.update(saved)


def common_variables() -> dict[str, str]:
    """What any process with vLLM needs on this machine, whoever starts it."""
    variables = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    if importlib.util.find_spec("flashinfer") is None:
        variables["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    return variables


def _variables(devices: EngineDevices) -> dict[str, str]:
    variables = common_variables()
    # Not of our process, which has threads (Ray's, torch's): see ``vllm_processes``.
    variables["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    if devices.device != "cpu":
        return variables
    cores = len(os.sched_getaffinity(0))
    variables |= {
        # On the CPU it warns of each of the settings above and of optional libraries.
        "VLLM_LOGGING_LEVEL": "ERROR",
        # One process less, and half the start-up: the model runs in the engine's own process.
        # (That stays apart from ours: AsyncLLM ignores the variable, the choice of executor not.)
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # By default every replica binds itself to the same cores, and several ranks need as many
        # NUMA nodes.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(max(1, cores // devices.tensor_parallel_size)),
    }
    if devices.engine_kwargs.get("enforce_eager", True):
        # vLLM compiles the embedding of several ranks in spite of ``enforce_eager`` (13 s).
        variables["TORCHDYNAMO_DISABLE"] = "1"
    return variables
