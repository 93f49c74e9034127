"""Run one program that is not trusted, and find out what became of it."""

import asyncio
import contextlib
import functools
import json
import logging
import os
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import psutil

from nemo_like.errors import RunError
from nemo_like.rewards.sandbox import walls
from nemo_like.rewards.sandbox.limits import START_S, Limits, job_of
from nemo_like.rewards.sandbox.nursery import fork_supervisor
from nemo_like.rewards.sandbox.supervisor import remove

logger = logging.getLogger(__name__)

Reason = Literal["exit", "signal", "time", "cpu", "memory", "processes", "output", "disk"]

_GRACE_S = 15.0
_CPU_MARGIN_S = 0.1
_MIB = 2**20


class SandboxError(RunError):
    """The program could not be run: nothing is known of what it does."""


@dataclass(frozen=True)
class Isolation:
    """What stands between programs and everything else on this machine."""

    level: str
    missing: tuple[str, ...]
    """What the kernel cannot keep from them: ``files``, ``signals``, ``calls``."""
    why: str
    """What stood in the way of something better."""

    def __str__(self) -> str:
        if walls.has_namespaces(self.level):
            text = "namespaces of their own: no network, no file of yours, no other process"
        else:
            kind = "another user" if self.level == walls.AS_NOBODY else "this user"
            text = f"no namespaces ({self.why}), as {kind}, restricted by Landlock and seccomp"
        without = f"; this kernel does not restrict {', '.join(self.missing)}" * bool(self.missing)
        return f"Programs of completions run in {text}{without}."


@dataclass(frozen=True, kw_only=True)
class ProgramResult:
    """What became of a program."""

    stdout: str
    stderr: str
    exit: int | None
    """Exit code, or minus the signal's number; None if a limit ended it."""
    reason: Reason
    """``exit`` and ``signal``: it ended by itself; else the limit that it met."""
    seconds: float
    peak_bytes: int
    """Most memory of all its processes together that was seen."""


async def run_program(
    program: str | Sequence[str],
    stdin: str | bytes = "",
    limits: Limits | None = None,
    variables: Mapping[str, str] | None = None,
) -> ProgramResult:
    """Run Python source, or a command, in an empty folder; SandboxError if it cannot be started.

    It sees PATH, HOME, TMPDIR, LANG and ``variables``, which may replace them. Nothing that it
    starts is left when this returns, or is cancelled, and neither are its files.
    """
    return await run_at(isolation().level, program, stdin, limits, variables)


async def run_at(
    level: str,
    program: str | Sequence[str],
    stdin: str | bytes = "",
    limits: Limits | None = None,
    variables: Mapping[str, str] | None = None,
) -> ProgramResult:
    """The same behind what ``level`` names."""
    given = stdin.encode("utf-8", "replace") if isinstance(stdin, str) else stdin
    folder = tempfile.mkdtemp(prefix="nemo-like-")
    try:
        limits = limits or Limits()
        job = job_of(level, program, given, limits, variables or {}, folder)
        run = _Run(level, folder, limits)
        return await run.result(job)
    finally:
        remove(folder)


@functools.cache
def isolation() -> Isolation:
    """The best that this machine gives: tried once, by a program that prints a word."""
    root = os.geteuid() == 0
    levels = [walls.AS_ROOT] * root + [walls.AS_USER] + [walls.AS_NOBODY] * root + [walls.PLAIN]
    why = ""
    for level in levels:
        try:
            missing = probe(level)
        except SandboxError as error:
            why = why or str(error)
            continue
        found = Isolation(level, missing, why)
        is_weak = bool(missing) or not walls.has_namespaces(level)
        logger.log(logging.WARNING if is_weak else logging.INFO, "%s", found)
        return found
    raise SandboxError(f"programs cannot be run on this machine: {why}")


def probe(level: str) -> tuple[str, ...]:
    """What the kernel lacks at this level; SandboxError if it cannot be had here."""
    folder = tempfile.mkdtemp(prefix="nemo-like-")
    try:
        job = job_of(level, "print('ready')", b"", Limits(seconds=20), {}, folder)
        with _Pipes(job) as pipes:
            stdout = pipes.stdout.read()
            said = _said(pipes.report.read())
    finally:
        remove(folder)
    if stdout != b"ready\n":
        raise SandboxError(f"a program did not run: {said}")
    return tuple(said["missing"])


class _Pipes:
    """This process's ends of what connects it to a supervisor; closing them ends the program."""

    def __init__(self, job: bytes) -> None:
        self._life: int | None = None
        given = os.memfd_create("job")
        pairs = [os.pipe() for _ in range(4)]
        (life, self._life), *outs = pairs
        self.stdout, self.stderr, self.report = (os.fdopen(read, "rb", 0) for read, _ in outs)
        try:
            with os.fdopen(given, "wb", closefd=False) as file:
                file.write(job)
            os.lseek(given, 0, os.SEEK_SET)
            fork_supervisor([given, life, *(write for _, write in outs)])
        except BaseException:
            self.__exit__()
            raise
        finally:
            for one in (given, life, *(write for _, write in outs)):
                os.close(one)

    def end(self) -> None:
        """Have the supervisor end the program."""
        if self._life is not None:
            os.close(self._life)
            self._life = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        for file in (self.stdout, self.stderr, self.report):
            file.close()


class _Run:
    """One supervisor and the streams of its program."""

    def __init__(self, level: str, folder: str, limits: Limits) -> None:
        self._level, self._folder, self._limits = level, folder, limits
        self._is_over = False
        """Whether the program wrote more than it may."""

    async def result(self, job: bytes) -> ProgramResult:
        """What became of the program; whatever happens, nothing of it is left."""
        with _Pipes(job) as pipes:
            report = asyncio.create_task(_read(pipes.report, _MIB, pipes.end))
            streams = (pipes.stdout, pipes.stderr)
            outputs = [asyncio.create_task(self._output(one, pipes)) for one in streams]
            tasks = (report, *outputs)
            try:
                most_s = self._limits.seconds + START_S + _GRACE_S
                await asyncio.wait({report}, timeout=most_s)
                await self._end(pipes, report)
                _, late = await asyncio.wait(tasks, timeout=_GRACE_S)
            finally:
                await self._end(pipes, report)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)  # they close what they read
            if late:
                raise SandboxError("the supervisor of a program did not end")
            return self._found(report.result(), *(one.result() for one in outputs))

    async def _output(self, stream: Any, pipes: _Pipes) -> bytes:
        def over() -> None:
            self._is_over = True
            pipes.end()

        return await _read(stream, self._limits.output_bytes, over)

    async def _end(self, pipes: _Pipes, report: asyncio.Task[bytes]) -> None:
        """Wait for the supervisor to have ended everything, or do it in its place."""
        pipes.end()
        await asyncio.wait({report}, timeout=_GRACE_S)
        lines = report.result().splitlines() if report.done() else []
        if len(lines) != 2:
            _kill_strays(int(lines[0]) if lines else None, self._folder)

    def _found(self, report: bytes, stdout: bytes, stderr: bytes) -> ProgramResult:
        if len(report.splitlines()) < 2 and self._level == walls.PLAIN:
            # The program can have killed its supervisor there.
            said = {
                "reason": "exit",
                "exit": -signal.SIGKILL,
                "seconds": 0.0,
                "peak": 0,
                "cpu": 0.0,
            }
        else:
            said = _said(report)
        reason, code = said["reason"], said["exit"]
        if self._is_over:
            reason = "output"
        elif code is not None and code < 0:
            spent = said["cpu"] > self._limits.most_cpu_seconds - _CPU_MARGIN_S
            is_cpu = code == -signal.SIGXCPU or (code == -signal.SIGKILL and spent)
            reason = "cpu" if is_cpu else "signal"
        return ProgramResult(
            stdout=stdout.decode("utf-8", "replace"),
            stderr=stderr.decode("utf-8", "replace"),
            exit=code if reason in ("exit", "signal") else None,
            reason=reason,
            seconds=said["seconds"],
            peak_bytes=said["peak"],
        )


async def _read(file: Any, most: int, over: Callable[[], None]) -> bytes:
    """All that a pipe gives, up to ``most`` bytes; the rest is let through."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), file)
    data, is_over = bytearray(), False
    try:
        while chunk := await reader.read(1 << 16):
            if len(data) + len(chunk) > most and not is_over:
                is_over = True
                over()
            data += chunk[: most - len(data)]
    finally:
        transport.close()
    return bytes(data)


def _said(report: bytes) -> dict[str, Any]:
    lines = report.splitlines()
    if len(lines) < 2:
        raise SandboxError("the supervisor of a program was killed")
    said = json.loads(lines[1])
    if "failed" in said:
        raise SandboxError(said["failed"])
    return said


def _kill_strays(supervisor: int | None, folder: str) -> None:
    """Where the supervisor was ended by force: what is of its session, or works in the folder."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            is_own = supervisor is not None and os.getsid(process.pid) == supervisor
            home = process.environ().get("HOME")
            if is_own or home == folder or process.cwd().startswith(folder):
                process.kill()
