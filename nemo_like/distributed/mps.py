"""NVIDIA's MPS: processes that share a GPU compute at the same time, and take no turns."""

import logging
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray

from nemo_like.distributed.sweeper import Sweeper
from nemo_like.errors import RunError, UserError

logger = logging.getLogger(__name__)
_COMMAND = "nvidia-cuda-mps-control"
_PIPES = "CUDA_MPS_PIPE_DIRECTORY"
_STARTS_WITHIN_S = 20.0


def recommend_mps() -> None:
    """Say how processes that share a GPU need not take turns, where nobody has seen to it."""
    if _PIPES not in os.environ:
        logger.info(
            "Engine and policy share each GPU and take turns on it; with cluster.mps=true they "
            "compute at the same time."
        )


@contextmanager
def mps() -> Iterator[None]:
    """A daemon for all processes that are started within, which end before it, however this ends.

    Raises UserError without the command, or where Ray runs already; RunError if it does not start.
    """
    if ray.is_initialized() or os.environ.get("RAY_ADDRESS", "") not in ("", "local"):
        raise UserError(
            "cluster.mps=true starts MPS with a Ray of the run's own, and this run joins another; "
            "start MPS on each node before Ray (docs/training.md), and leave cluster.mps out."
        )
    command = shutil.which(_COMMAND)
    if command is None:
        raise UserError(
            f"cluster.mps=true needs {_COMMAND}, which comes with NVIDIA's driver, in a folder of "
            "PATH; add that folder, or leave cluster.mps out."
        )
    sweeper = Sweeper()
    before = dict(os.environ)
    variables = (_PIPES, "CUDA_MPS_LOG_DIRECTORY")
    os.environ |= dict.fromkeys(variables, str(sweeper.folder))
    try:
        _start(command, os.environ | sweeper.environment, sweeper.folder)
        yield
    finally:
        for name in variables:
            os.environ.pop(name)
        os.environ |= {name: before[name] for name in variables if name in before}
        sweeper.close()


def _start(command: str, environment: dict[str, str], folder: Path) -> None:
    # Workers name GPUs as the machine counts them; a daemon that saw some would count those.
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    answer = folder / "answer.txt"  # A pipe would stay open as long as the daemon lives.
    try:
        with answer.open("w") as file:
            subprocess.run(
                [command, "-d"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                timeout=_STARTS_WITHIN_S,
                check=True,
            )
    except (OSError, subprocess.SubprocessError) as error:
        said = " ".join(answer.read_text(errors="replace").split())
        raise RunError(
            f"cluster.mps=true: {command} -d did not start ({said or error}); mend that, or leave "
            "cluster.mps out."
        ) from error
