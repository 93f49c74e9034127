"""Programs that a model wrote: what they can use, see and leave behind."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from nemo_like.rewards.sandbox import program as sandbox
from nemo_like.rewards.sandbox import walls
from nemo_like.rewards.sandbox.program import Limits, SandboxError, isolation, run_program
from tests.hostile_programs import HOSTILE
from tests.not_here import MARK

HAS_NAMESPACES = walls.has_namespaces(isolation().level)
needs_namespaces = pytest.mark.skipif(not HAS_NAMESPACES, reason=MARK + "needs namespaces")


def run(program, stdin="", variables=None, **limits):
    return asyncio.run(run_program(program, stdin, Limits(**limits), variables))


def test_a_program_reads_and_writes_as_any_other():
    result = run("import sys\nprint(input() * 2)\nprint('no', file=sys.stderr)\nsys.exit(3)", "ab")
    assert (result.stdout, result.stderr) == ("abab\n", "no\n")
    assert (result.reason, result.exit) == ("exit", 3)
    assert 0 < result.seconds < 5
    assert 5 << 20 < result.peak_bytes < 100 << 20


def test_a_command_runs_as_well_as_python():
    result = run(["sh", "-c", "cat; echo $0; exit 2"], b"\xff")
    assert (result.stdout, result.exit) == ("\ufffdsh\n", 2)
    with pytest.raises(SandboxError, match="FileNotFoundError"):
        run(["no-such-command"])


def test_a_large_input_arrives_whole():
    assert run("import sys; print(len(sys.stdin.read()))", "x" * (3 << 20)).stdout == "3145728\n"


MET = {
    "time": ("while True: pass", {"seconds": 0.3}),
    "cpu": ("while True: pass", {"seconds": 60.0, "cpu_seconds": 1}),
    "memory": (
        "import os\nfor _ in range(5):\n    if os.fork() == 0: break\n"
        "held = bytearray(b'x') * (60 << 20)\nimport time; time.sleep(5)",
        {"memory_bytes": 200 << 20},
    ),
    "output": ("while True: print('x' * 1000)", {"output_bytes": 100_000}),
    "signal": ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", {}),
}


@pytest.mark.parametrize("reason", MET)
def test_a_limit_of_all_processes_together_ends_the_program(reason):
    program, limits = MET[reason]
    result = run(program, **limits)
    assert result.reason == reason
    assert (result.exit is None) == (reason != "signal")
    assert result.seconds < (30 if reason == "cpu" else 5)
    assert len(result.stdout) == (100_000 if reason == "output" else 0)


REFUSED = {
    "memory": ("bytearray(1 << 30)", {}, "MemoryError"),
    "processes": ("import os\nfor _ in range(9): os.fork()", {"processes": 4}, "BlockingIOError"),
    "file": (
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "open('x', 'wb').write(bytes(2 << 20))",
        {"scratch_bytes": 1 << 20},
        "OSError",
    ),
    "folder": (
        "for i in range(99): open(str(i), 'wb').write(bytes(200_000))",
        {"scratch_bytes": 1 << 20},
        "No space left",
    ),
    "files": ("for i in range(99): open(str(i), 'w')", {"scratch_files": 50}, "No space left"),
    "open files": ("x = [open('x', 'w') for _ in range(99)]", {"open_files": 20}, "Too many open"),
    "network": ("import socket; socket.create_connection(('127.0.0.1', PORT), 1)", {}, "Error"),
    "root": ("open('/etc/new', 'w')", {}, "Read-only file system"),
    "users": (
        "import ctypes, os\nl = ctypes.CDLL(None, use_errno=True)\n"
        "l.unshare(0x10000000) and exec('raise OSError(ctypes.get_errno(), \"users\")')",
        {},
        "PermissionError",
    ),
}


@needs_namespaces
@pytest.mark.parametrize("what", REFUSED)
def test_a_limit_of_one_call_is_the_programs_own_error(what):
    program, limits, error = REFUSED[what]
    with socket.create_server(("127.0.0.1", 0)) as server:
        result = run(program.replace("PORT", str(server.getsockname()[1])), **limits)
    assert (result.reason, result.exit) == ("exit", 1)
    assert error in result.stderr


def test_core_files_are_not_written():
    program = "import resource; print(resource.getrlimit(resource.RLIMIT_CORE))"
    assert run(program).stdout == "(0, 0)\n"


def test_a_program_sees_listed_variables_and_an_empty_home(monkeypatch):
    secrets = ("WANDB_API_KEY", "HF_TOKEN", "AWS_SESSION_TOKEN", "DATABASE_URL", "MY_COMPANY_PASS")
    for name in (*secrets, "NAMED"):
        monkeypatch.setenv(name, "s3cr3t")
    seen = run("import os; print(sorted(os.environ), os.listdir(os.environ['HOME']))").stdout
    names = "['HOME', 'LANG', 'OMP_NUM_THREADS', 'PATH', 'TMPDIR']"
    assert seen == f"{names} ['main.py']\n"
    passed = run("import os; print(os.environ['NAMED'])", variables={"NAMED": os.environ["NAMED"]})
    assert passed.stdout == "s3cr3t\n"
    everything = """
from pathlib import Path
for path in [*Path("/proc").glob("[0-9]*/environ"), *Path("/proc").glob("[0-9]*/cmdline")]:
    try:
        print(path.read_bytes())
    except OSError:
        pass
"""
    assert "s3cr3t" not in run(everything).stdout


def test_a_program_inherits_no_files():
    with tempfile.TemporaryFile() as file:
        os.set_inheritable(file.fileno(), True)
        program = "import os; print(sorted(os.readlink(f'/proc/self/fd/{n}') for n in range(3)))"
        assert "memfd:stdin" in run(program).stdout
        result = run("import os; print([n for n in range(256) if os.path.exists(f'/dev/fd/{n}')])")
    assert result.stdout == "[0, 1, 2]\n"


def test_cancelling_ends_the_program_with_all_that_it_started():
    word = f"71.{os.getpid()}"

    async def cancel():
        program = f"import subprocess, time; subprocess.Popen(['sleep', '{word}']); time.sleep(60)"
        task = asyncio.create_task(run_program(program, limits=Limits(seconds=60)))
        while not running(word):
            await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    before = scratch_folders()
    asyncio.run(cancel())
    assert not running(word)
    assert scratch_folders() == before


def test_programs_end_with_a_run_that_is_killed():
    word = f"72.{os.getpid()}"
    script = f"""
import asyncio
from nemo_like.rewards.sandbox.program import Limits, run_program
asyncio.run(run_program(["sleep", "{word}"], limits=Limits(seconds=60)))
"""
    before = scratch_folders()
    parent = subprocess.Popen([sys.executable, "-c", script])
    while not running(word):
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while running(word) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not running(word)
    while scratch_folders() != before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert scratch_folders() == before


OUTSIDE = """
import os, socket, subprocess, sys
victim, process, run = sys.argv[1:]

def tries():
    yield lambda: open(f"{victim}/new", "w")
    yield lambda: open(f"{victim}/secret").read()
    yield lambda: os.remove(f"{victim}/secret")
    yield lambda: os.rename(f"{victim}/secret", "mine")
    yield lambda: os.chmod(victim, 0)
    yield lambda: os.utime(victim, (0, 0))
    yield lambda: os.listdir(os.path.dirname(victim))
    yield lambda: open("/etc/new", "w")
    yield lambda: os.kill(int(process), 15)
    yield lambda: open(f"/proc/{run}/environ").read()
    yield lambda: open(f"/proc/{os.getppid()}/environ").read()
    yield lambda: os.setuid(0 if os.getuid() else 1)
    yield lambda: socket.socket()
    yield lambda: socket.socket(socket.AF_UNIX)

for number, one in enumerate(tries()):
    try:
        one()
        print("done", number)
    except OSError:
        pass
open("mine", "w").write("x")
subprocess.Popen(["sleep", "WORD"], start_new_session=True)
print(sorted(os.listdir(".")))
"""


def levels():
    """That this machine and its Python allow."""
    found = []
    for level in (walls.AS_ROOT, walls.AS_USER, walls.AS_NOBODY, walls.PLAIN):
        if level in (walls.AS_USER, walls.PLAIN) or os.geteuid() == 0:
            with contextlib.suppress(SandboxError):
                missing = sandbox.probe(level)
                if level != walls.PLAIN or not missing:
                    found.append(level)
    return found


@pytest.mark.parametrize("level", levels())
def test_at_every_level_a_program_changes_nothing_outside_of_its_folder(level, tmp_path):
    word = f"74.{os.getpid()}"
    (tmp_path / "secret").write_text("s3cr3t")
    before, scratch = tmp_path.stat(), scratch_folders()
    with subprocess.Popen(["sleep", "20"]) as process:
        arguments = [str(tmp_path), str(process.pid), str(os.getpid())]
        code = OUTSIDE.replace("WORD", word)
        command = [sys.executable, "-I", "-c", code, *arguments]
        result = asyncio.run(sandbox.run_at(level, command))
        assert process.poll() is None
        process.kill()
    assert (result.stdout, result.exit) == ("['mine']\n", 0), result.stderr
    assert (tmp_path / "secret").read_text() == "s3cr3t"
    assert tmp_path.stat()[:9] == before[:9]
    assert not running(word)
    assert scratch_folders() == scratch


PLAIN_MET = {
    "disk": ("for i in range(9): open(str(i), 'wb').write(bytes(1 << 20))", "scratch_bytes", 3),
    "processes": ("import os\nwhile os.fork(): pass", "processes", 4),
}


@pytest.mark.skipif(walls.PLAIN not in levels(), reason=MARK + "needs Landlock and seccomp")
@pytest.mark.parametrize("reason", PLAIN_MET)
def test_without_namespaces_limits_of_all_processes_are_watched(reason):
    program, name, most = PLAIN_MET[reason]
    limits = Limits(**{name: most << 20 if reason == "disk" else most})
    program += "\nimport time; time.sleep(9)"
    scratch = scratch_folders()
    result = asyncio.run(sandbox.run_at(walls.PLAIN, program, limits=limits))
    assert (result.reason, result.exit) == (reason, None)
    assert result.seconds < 3
    assert scratch_folders() == scratch


@pytest.mark.skipif(walls.PLAIN not in levels(), reason=MARK + "needs Landlock and seccomp")
@pytest.mark.parametrize("name", ["deep", "locked", "kill", "daemon", "deaf", "fill"])
def test_without_namespaces_hostile_programs_leave_nothing(name):
    word, scratch = f"75.{os.getpid()}", scratch_folders()
    program = HOSTILE[name].replace("WORD", word)
    limits = Limits(seconds=0.5)
    asyncio.run(sandbox.run_at(walls.PLAIN, program, limits=limits))
    assert not running(word)
    assert scratch_folders() == scratch


def test_many_programs_at_once_do_not_mix():
    async def all_of_them():
        limits = Limits(seconds=30)
        rows = (run_program("print(input() * 1000)", str(i), limits) for i in range(24))
        cancelled = [asyncio.create_task(run_program("while True: print(1)")) for _ in range(4)]
        await asyncio.sleep(0.2)
        for one in cancelled:
            one.cancel()
        return await asyncio.gather(*rows)

    before = num_files()
    results = asyncio.run(all_of_them())
    assert [r.stdout for r in results] == [f"{str(i) * 1000}\n" for i in range(24)]
    assert num_files() == before


def test_programs_run_where_another_loop_is_the_default():
    """Ray makes uvloop's the default in its workers."""
    uvloop = pytest.importorskip("uvloop")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(run_program("print(1)")).stdout == "1\n"


def running(word):
    return [p.pid for p in psutil.process_iter(["cmdline"]) if word in (p.info["cmdline"] or [])]


def num_files():
    return psutil.Process().num_fds()


def scratch_folders():
    return set(Path(tempfile.gettempdir()).glob("nemo-like-*"))
