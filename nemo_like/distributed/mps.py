"""NVIDIA's MPS: processes that share a GPU compute at the same time, and take no turns."""

import logging
import os
import shutil
import signal
import subprocess
from pathlib import Path

from nemo_like.distributed.sweeper import Sweeper
from nemo_like.errors import RunError, UserError

logger = logging.getLogger(__name__)
_COMMAND = "nvidia-cuda-mps-control"
_PIPES = "CUDA_MPS_PIPE_DIRECTORY"
_STARTS_WITHIN_S = 20.0


def recommend_mps() -> None:
    """Recommend MPS unless somebody has started it."""
    if not _is_started():
        logger.info(
            "Engine and policy share each GPU and take turns on it; NVIDIA's MPS lets them compute "
            "at the same time: cluster.mps=true (docs/training.md)."
        )


def _is_started() -> bool:
    """By the user, or by ``slurm/ray.sbatch`` on each node."""
    return _PIPES in os.environ or os.environ.get("NEMO_LIKE_MPS") == "1"


def check_mps() -> None:
    """UserError on a Ray that runs already, unless MPS was started before it."""
    if not _is_started():
        raise UserError(
            "cluster.mps=true starts MPS with a Ray of the run's own, and this run joins another; "
            f"start MPS on each node before Ray, and set {_PIPES} here too (docs/training.md; "
            "NEMO_LIKE_MPS=1 has slurm/ray.sbatch do it), or leave cluster.mps out."
        )


def start_mps(sweeper: Sweeper, logs: Path) -> dict[str, str]:
    """Start its daemon, which ``sweeper`` ends; returns what workers need in their environment.

    Does nothing if the user has started one. Raises UserError without its command, RunError if it
    does not start.
    """
    if _PIPES in os.environ:
        return {}
    command = shutil.which(_COMMAND)
    if command is None:
        raise UserError(
            f"cluster.mps=true needs {_COMMAND}, which comes with NVIDIA's driver, in a folder of "
            "PATH; add that folder, or leave cluster.mps out."
        )
    logs.mkdir(exist_ok=True)
    variables = {_PIPES: str(sweeper.folder), "CUDA_MPS_LOG_DIRECTORY": str(logs)}
    environment = os.environ | sweeper.environment | variables
    # Workers use the machine's GPU numbers; a restricted daemon would renumber them.
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    # A file, as a pipe would stay open as long as the daemon lives.
    with (logs / "answer.txt").open("w+", errors="replace") as answer:
        # A job's signals are none of the daemon's business: workers live until all is saved.
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP})
        try:
            subprocess.run(
                [command, "-d"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=answer,
                stderr=answer,
                timeout=_STARTS_WITHIN_S,
                start_new_session=True,
                check=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            answer.seek(0)
            said = " ".join(answer.read().split())
            raise RunError(
                f"cluster.mps=true: {command} -d did not start ({said or error}); see {logs}, or "
                "leave cluster.mps out."
            ) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
    return variables
