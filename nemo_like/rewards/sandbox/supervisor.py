"""The process between a run and one program: starts it behind walls, watches it, ends all of it.

Only the standard library, since it is forked by a process that is to be small.
"""

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from nemo_like.rewards.sandbox import kernel, walls

_POLL_S = 0.02
_END_S = 5.0
_PAGE = os.sysconf("SC_PAGE_SIZE")


def supervise(job: int, life: int, stdout: int, stderr: int, report: int) -> None:
    """Run the program that ``job`` describes, in a line of JSON with its files behind it.

    ``life`` is a pipe that ends when nobody waits any more. ``report`` gets this process's number
    on a line, and a line of JSON at the end.
    """
    os.setsid()
    for number, file in enumerate((life, stdout, stderr)):
        os.dup2(file, number)
        os.close(file)
    _say(report, os.getpid())
    try:
        said = _run(job, report)
    except Exception as error:
        said = {"failed": f"{type(error).__name__}: {error}"}
    with contextlib.suppress(OSError):  # nobody reads it
        _say(report, said)


def _run(job: int, report: int) -> dict[str, Any]:
    with os.fdopen(job, "rb") as file:
        spec = json.loads(file.readline())
        contents = [file.read(size) for size in spec["sizes"]]
    kernel.adopt_orphans()
    words, theirs = os.pipe()
    walls.leave_processes(spec["level"])
    first = os.fork()
    if first == 0:
        os.close(report)
        _guard(lambda: _first(spec, contents, theirs), theirs)
    os.close(theirs)
    for number in (1, 2):  # or the program's would never end
        os.close(number)
    try:
        return _Watch(spec, first, words).run()
    finally:
        _end_all(first)
        remove(spec["folder"])


def remove(folder: str) -> None:
    """What namespaces hold is gone with them; otherwise also what is nested deep, or locked."""
    try:
        Path(folder).rmdir()
    except FileNotFoundError:
        return
    except OSError:
        for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
            os.spawnvp(os.P_WAIT, command[0], [*command, "--", folder])


def _guard(body: Any, words: int) -> NoReturn:
    """Whatever goes wrong in a fork is said in one line."""
    try:
        body()
    except BaseException as error:
        with contextlib.suppress(OSError):
            _say(words, {"failed": f"{type(error).__name__}: {error}"})
    os._exit(1)


def _say(words: int, what: Any) -> None:
    os.write(words, json.dumps(what).encode() + b"\n")


def _first(spec: Mapping[str, Any], contents: list[bytes], words: int) -> None:
    """The first process of the namespaces: it buries orphans, and no signal from inside ends it."""
    kernel.adopt_orphans()
    walls.enter(spec)
    kernel.end_with_parent()
    folder = walls.HOME if walls.has_namespaces(spec["level"]) else spec["folder"]
    os.chdir(folder)
    stdin, *files = contents
    for name, content in zip(spec["files"], files, strict=True):
        Path(name).write_bytes(content)
    given = _as_file(stdin)
    kernel.set_dumpable(value=False)
    program = os.fork()
    if program == 0:
        kernel.set_dumpable(value=True)
        _guard(lambda: _program(spec, given, words), words)
    for number in (0, 1, 2, given):
        os.close(number)
    while True:
        pid, status, usage = os.wait4(-1, 0)
        if pid == program:
            cpu_s = usage.ru_utime + usage.ru_stime
            code = os.waitstatus_to_exitcode(status)
            said = {"exit": code, "peak": usage.ru_maxrss << 10, "cpu": cpu_s}
            _say(words, said)
            os._exit(0)


def _as_file(content: bytes) -> int:
    """Only readable, and without a name."""
    written = os.memfd_create("stdin")
    with os.fdopen(written, "wb", closefd=False) as file:
        file.write(content)
    read = os.open(f"/proc/self/fd/{written}", os.O_RDONLY)
    os.close(written)
    return read


def _program(spec: Mapping[str, Any], stdin: int, words: int) -> None:
    os.setsid()
    kernel.end_with_parent()
    os.dup2(stdin, 0)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    walls.start(spec)
    missing = walls.close_doors(spec)
    _say(words, missing)
    os.closerange(3, words)
    os.closerange(words + 1, 1 << 16)
    os.execvpe(spec["argv"][0], spec["argv"], spec["variables"])


class _Watch:
    """What the supervisor notices of the program while it runs."""

    def __init__(self, spec: Mapping[str, Any], first: int, words: int) -> None:
        self._spec, self._first, self._words = spec, first, words
        self._said = b""
        self._peak = 0

    def run(self) -> dict[str, Any]:
        """Return when the program has ended, or has to."""
        begin, started, reason = time.monotonic(), None, None
        limit = self._spec["wall_s"]
        while reason is None:
            if started is None and self._said:
                started = time.monotonic()
            passed = time.monotonic() - (started or begin)
            most = limit if started else limit + self._spec["start_s"]
            if passed >= most:
                reason = "time" if started else "failed"
                break
            ready, _, _ = select.select([self._words, 0], [], [], min(_POLL_S, most - passed))
            if self._words in ready:
                word = os.read(self._words, 1 << 16)
                self._said += word
                reason = None if word else "exit"
            elif 0 in ready:
                reason = "stopped"
            elif started:
                reason = self._over()
        seconds = time.monotonic() - (started or begin)
        return self._result(reason, seconds)

    def _result(self, reason: str, seconds: float) -> dict[str, Any]:
        missing, said, *_ = *map(json.loads, self._said.splitlines()), {}, {}
        for one in (missing, said):
            if "failed" in one:
                return one
        if reason == "failed" or not self._said:
            return {"failed": "the program's process did not start"}
        found: dict[str, Any] = {"seconds": seconds, "reason": reason, "missing": missing}
        found |= {"exit": None, "cpu": 0.0} | said
        found["peak"] = max(self._peak, said.get("peak", 0))
        if reason == "exit" and not said:  # the first process was killed with all others
            found["exit"] = -signal.SIGKILL
        return found

    def _over(self) -> str | None:
        """Which limit of all processes together is passed."""
        pids = list(_descendants(self._first))
        if len(pids) > self._spec["processes"]:
            return "processes"
        held = sum(map(_resident, pids))
        if held > self._spec["memory_bytes"]:
            held = sum(map(_proportional, pids))  # without counting what forks share twice
        self._peak = max(self._peak, held)
        if held > self._spec["memory_bytes"]:
            return "memory"
        if not walls.has_namespaces(self._spec["level"]):
            return self._over_disk()
        return None

    def _over_disk(self) -> str | None:
        held, files = 0, 0
        for size in _sizes(self._spec["folder"]):
            held, files = held + size, files + 1
            if held > self._spec["scratch_bytes"] or files > self._spec["scratch_files"]:
                return "disk"
        return None


def _sizes(folder: str) -> Iterator[int]:
    waiting = [folder]
    while waiting:
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    yield entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)


def _descendants(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                for child in (task / "children").read_text().split():
                    yield int(child)
                    yield from _descendants(int(child))


def _resident(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    return 0


def _proportional(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    return _resident(pid)


def _end_all(first: int) -> None:
    """Kill until there is nothing left; a namespace goes with its first process."""
    deadline = time.monotonic() + _END_S
    with contextlib.suppress(ProcessLookupError):
        os.kill(first, signal.SIGKILL)
    while time.monotonic() < deadline:
        for pid in list(_descendants(os.getpid())):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            time.sleep(0.002)
