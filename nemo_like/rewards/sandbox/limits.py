"""What one program may use, and all that its supervisor has to know."""

import contextlib
import json
import math
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from nemo_like.rewards.sandbox import walls

_MIB = 2**20
START_S = 30.0
_MAIN = "main.py"
_PYTHON = ("-I", "-X", "utf8", "-X", "int_max_str_digits=0")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one program may use, with all that it starts."""

    seconds: float = 5.0
    """By the clock."""
    cpu_seconds: int | None = None
    """That each process may compute. None: ``seconds``, rounded up."""
    memory_bytes: int = 512 * _MIB
    """Address space of each process, and memory of all together."""
    processes: int = 32
    """At once, threads of Python's included where the system counts them."""
    output_bytes: int = _MIB
    """Of standard output, and as many of standard error."""
    scratch_bytes: int = 64 * _MIB
    """Of all files together, and of each."""
    scratch_files: int = 4096
    open_files: int = 64
    """In each process."""

    @property
    def most_cpu_seconds(self) -> int:
        """The system counts whole ones."""
        return self.cpu_seconds or math.ceil(self.seconds)


def job_of(
    level: str,
    program: str | Sequence[str],
    stdin: bytes,
    limits: Limits,
    variables: Mapping[str, str],
    folder: str,
) -> bytes:
    """What the supervisor reads."""
    user = 1_000_000_000 + secrets.randbelow(1 << 24)  # of this program alone
    if level == walls.AS_NOBODY:
        os.chown(folder, user, user)
    parts = (sys.prefix, sys.base_prefix, Path(os.__file__).parent)
    folders = [path for part in parts for path in (str(part), os.path.realpath(part))]
    files, argv = {}, program
    if isinstance(program, str):
        files[_MAIN] = program.encode("utf-8", "replace")
        argv = [sys.executable, *_PYTHON, _MAIN]
    home = walls.HOME if walls.has_namespaces(level) else folder
    processes = limits.processes + 2
    if level == walls.PLAIN:
        processes += _num_tasks()
    spec = {
        "level": level,
        "user": user,
        "folder": folder,
        "folders": folders,
        "argv": list(argv),
        "variables": _variables(home, variables),
        "files": list(files),
        "sizes": [len(one) for one in (stdin, *files.values())],
        "wall_s": limits.seconds,
        "start_s": START_S,
        "processes": limits.processes + 1,
        "memory_bytes": limits.memory_bytes,
        "scratch_bytes": limits.scratch_bytes,
        "scratch_files": limits.scratch_files,
        "resources": {
            "RLIMIT_AS": limits.memory_bytes,
            "RLIMIT_DATA": limits.memory_bytes,  # not that of the process that runs programs
            "RLIMIT_CPU": limits.most_cpu_seconds,
            "RLIMIT_CORE": 0,
            "RLIMIT_FSIZE": limits.scratch_bytes,
            "RLIMIT_NOFILE": limits.open_files,
            "RLIMIT_NPROC": processes,
        },
    }
    return b"".join([json.dumps(spec).encode(), b"\n", stdin, *files.values()])


def _variables(home: str, given: Mapping[str, str]) -> dict[str, str]:
    """All that a program gets of its environment."""
    own = {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": home,
        "TMPDIR": home,
        "LANG": os.environ.get("LANG", "C.UTF-8"),
        "OMP_NUM_THREADS": "1",  # or numpy starts a thread a core
    }
    return own | dict(given)


def _num_tasks() -> int:
    """Of this user: what a limit of processes counts without namespaces, and some more."""
    own, count = os.geteuid(), 256
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.uids().real == own:
                count += process.num_threads()
    return count
