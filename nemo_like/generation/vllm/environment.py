"""How vLLM's processes start: their environment variables, with our reasons, and their fork server.

Imports neither vLLM nor torch: the server should start importing them before we do.
"""

import functools
import importlib.util
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from typing import Any

from nemo_like.distributed.sweeper import Sweeper
from nemo_like.errors import UserError

_LONGEST_TMPDIR = 59
"""A Unix socket's path has 107 characters; our folder takes 11 of them, and vLLM's names 37."""


@dataclass(frozen=True, kw_only=True)
class EngineDevices:
    """What the environment of an engine's processes depends on."""

    device: str
    """``cpu`` or ``cuda``."""
    tensor_parallel_size: int
    engine_kwargs: Mapping[str, Any]


def start_fork_server(devices: EngineDevices) -> None:
    """Start importing vLLM in the process that this engine's processes are forked from.

    Raises UserError where temporary files are too deep for their sockets.
    """
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) > _LONGEST_TMPDIR:
        raise UserError(
            f"TMPDIR={folder} is too long a path for the Unix sockets of vLLM's processes; before "
            f"Ray starts, set it on every node to a folder of at most {_LONGEST_TMPDIR} characters."
        )
    with start_environment(devices):
        # Where its socket is; Python would make a folder of its own, and a killed worker leave it.
        vars(multiprocessing.current_process())["_config"]["tempdir"] = str(_sweeper().folder)
        forkserver.set_forkserver_preload(["nemo_like.generation.vllm.processes"])
        with _same_mask_after():
            resource_tracker.ensure_running()
            # A signal to all processes of the run is for the driver; see ``connection``.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            forkserver.ensure_running()


@contextmanager
def _same_mask_after() -> Iterator[None]:
    """Keep this thread's mask of signals, part of which Python's resource tracker lifts."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@functools.cache
def _sweeper() -> Sweeper:
    """Of this process, for its fork server, the engines and their sockets."""
    return Sweeper()


@contextmanager
def start_environment(devices: EngineDevices) -> Iterator[None]:
    """Set what vLLM's processes inherit, where the user has not; undo that, and vLLM's own, after.

    Left set, these variables would reach whatever else this process starts.
    """
    saved = dict(os.environ)
    for name, value in _variables(devices).items():
        os.environ.setdefault(name, value)
    folder = str(_sweeper().folder)
    os.environ.update(_sweeper().environment, TMPDIR=folder, VLLM_RPC_BASE_PATH=folder)
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
    # Not of our process, which has threads (Ray's, torch's): see ``processes``.
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
