"""A small process that outlives this one and removes what it leaves, however it ends.

Nobody else can after ``kill -9``: Ray's processes and vLLM's have folders and sockets, and some of
them live on. As a script this file is that process, without site-packages: 10 MB, up in 20 ms.
"""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MARK = "NEMO_LIKE_SWEPT_BY"
"""Variable with the folders of all sweepers that a process was started under."""
_ENDS_WITHIN_S = 20.0
_TRACKERS_S = 2.0
_LOOK_EVERY_S = 0.5


class Sweeper:
    """``folder`` is for temporary files; processes started with ``environment`` end with us."""

    def __init__(self) -> None:
        """Raises OSError where the folder cannot be made."""
        above = os.environ.get(MARK, "").rpartition(":")[2]  # it sweeps ours too, and ends us
        base = above or os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
        self.folder = Path(base, f"nl{os.urandom(4).hex()}")
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(self.folder), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            text=True,
            start_new_session=True,  # signals to our process group are none of its business
        )
        assert self._process.stdout is not None
        with self._process.stdout as answer:
            complaint = answer.readline().strip()
        if complaint != "ready":
            raise OSError(complaint or f"{self.folder} cannot be made")

    @property
    def environment(self) -> dict[str, str]:
        above = os.environ.get(MARK)
        return {MARK: f"{above}:{self.folder}" if above else str(self.folder)}

    def close(self) -> None:
        """Sweep now; returns when it is done."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it was ended itself
            self._process.stdin.write("sweep\n")  # a fork of this process keeps the pipe open
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDS_WITHIN_S)


def _main(folder: str, owner: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        Path(folder).mkdir(mode=0o700)
    except OSError as error:
        sys.stdout.write(f"{error}\n")
        return
    sys.stdout.write("ready\n")
    sys.stdout.close()
    # Forks of the owner have the other end of the pipe too: it does not close when they live on.
    while os.getppid() == owner and not select.select([sys.stdin], [], [], _LOOK_EVERY_S)[0]:
        pass
    try:
        _end_processes(folder, with_forks=os.getppid() != owner)
    finally:
        _remove(folder)


def _remove(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if Path(folder).exists():  # something that we may not end was still writing
        time.sleep(0.5)
        shutil.rmtree(folder, ignore_errors=True)


def _end_processes(folder: str, *, with_forks: bool) -> None:
    """Kill them, and remove what of shared memory they alone have mapped."""
    start = time.monotonic()
    shared: dict[int, str] = {}
    while (
        left := _started_under(folder, with_forks)
    ) and time.monotonic() < start + _ENDS_WITHIN_S / 2:
        for pid in left:
            with contextlib.suppress(OSError):  # some let nobody read what they have mapped
                shared |= _shared_memory(pid)
            with contextlib.suppress(OSError):
                if time.monotonic() > start + _TRACKERS_S or not _is_tracker(pid):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    used: set[int] = set()
    for entry in Path("/proc").glob("[0-9]*") if shared else ():
        with contextlib.suppress(OSError):
            used |= _shared_memory(int(entry.name)).keys()
    for inode, path in shared.items():
        with contextlib.suppress(OSError):
            if inode not in used and Path(path).stat().st_ino == inode:
                Path(path).unlink()


def _is_tracker(pid: int) -> bool:
    """Whether it is Python's own process that removes shared memory, as soon as its users end."""
    return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()


def _shared_memory(pid: int) -> dict[int, str]:
    """Files in /dev/shm that a process has mapped, by inode."""
    content = Path(f"/proc/{pid}/maps").read_bytes()
    lines = [line.split(maxsplit=5) for line in content.split(b"\n")]  # names may hold b"\r"
    return {
        int(line[4]): os.fsdecode(line[5])
        for line in lines
        if len(line) == 6 and line[5].startswith(b"/dev/shm/")
    }


def _started_under(folder: str, with_forks: bool) -> set[int]:
    """Those with our mark, forks of the owner (which alone have our pipe), and all below them."""
    pipe = Path("/proc/self/fd/0").readlink() if with_forks else None
    marked: set[int] = set()
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # ended meanwhile, or not ours
            pid = int(entry.name)
            state, parent = (entry / "stat").read_bytes().rpartition(b")")[2].split()[:2]
            if state == b"Z":
                continue
            children.setdefault(int(parent), []).append(pid)
            if _is_ours(entry, folder) or (pipe and pipe in _open_files(entry)):
                marked.add(pid)
    found, more = set[int](), list(marked)
    while more:
        pid = more.pop()
        if pid not in found and pid != os.getpid():
            found.add(pid)
            more += children.get(pid, [])
    return found


def _is_ours(process: Path, folder: str) -> bool:
    """By the mark; Ray's processes write their titles over it, and have logs in the folder."""
    environment = (process / "environ").read_bytes()
    for variable in environment.split(b"\0"):
        name, _, value = variable.partition(b"=")
        if name == MARK.encode():
            return folder.encode() in value.split(b":")
    overwritten = environment[:1] == b"\0"
    return overwritten and any(str(path).startswith(f"{folder}/") for path in _open_files(process))


def _open_files(process: Path) -> list[Path]:
    return [file.readlink() for file in (process / "fd").iterdir()]


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]))
