"""What a process leaves is cleared away by another one, however it ends."""

import mmap
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from nemo_like.distributed.sweeper import MARK, Sweeper

# Its children: one in a session of its own that ignores signals, and a daemon without the mark.
OWNER = textwrap.dedent(
    """
    import os, subprocess, sys, time
    from nemo_like.distributed.sweeper import Sweeper

    sweeper = Sweeper()
    (sweeper.folder / "deep").mkdir()
    (sweeper.folder / "deep" / "file").write_text("x")
    env = os.environ | sweeper.environment
    deaf = ["sh", "-c", "trap '' TERM HUP INT; sleep 600 & echo $!; wait"]
    child = subprocess.Popen(deaf, env=env, start_new_session=True, stdout=subprocess.PIPE)
    unmarked = ["sh", "-c", "env -i sleep 600 & echo $!; wait"]
    other = subprocess.Popen(unmarked, env=env, stdout=subprocess.PIPE)
    pids = [child.pid, int(child.stdout.readline()), other.pid, int(other.stdout.readline())]
    print(sweeper.folder, *pids, flush=True)
    if sys.argv[1] == "close":
        sweeper.close()
        print("closed", flush=True)
    time.sleep(600)
    """
)


def gone(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def owner(tmp_path, how, program=OWNER):
    process = subprocess.Popen(
        [sys.executable, "-c", program, how],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    folder, *pids = process.stdout.readline().split()
    return process, Path(folder), [int(pid) for pid in pids]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_whatever_ends_a_process_what_it_started_ends_too(tmp_path, number):
    process, folder, pids = owner(tmp_path, "wait")
    assert folder.parent == tmp_path
    assert (folder / "deep" / "file").exists()
    assert not any(map(gone, pids))
    process.send_signal(number)
    process.wait(10)
    end = time.monotonic() + 15
    while (folder.exists() or not all(map(gone, pids))) and time.monotonic() < end:
        time.sleep(0.05)
    assert all(map(gone, pids))
    assert not [*tmp_path.iterdir()]


FORKS = """
import os, subprocess, sys, time
from nemo_like.distributed.sweeper import Sweeper

sweeper = Sweeper()
command = ["sh", "-c", "sleep 600 & echo $!; wait"]
started = subprocess.Popen(command, env=os.environ | sweeper.environment, stdout=subprocess.PIPE)
fork = os.fork()
if fork == 0:
    time.sleep(600)
print(sweeper.folder, fork, started.pid, int(started.stdout.readline()), flush=True)
if sys.argv[1] == "close":
    begin = time.monotonic()
    sweeper.close()
    print(time.monotonic() - begin, flush=True)
time.sleep(600)
"""


def test_a_fork_that_lives_on_after_kill_9_is_ended_like_all_else(tmp_path):
    """It has a copy of all that its parent had open, and no program of its own."""
    process, folder, pids = owner(tmp_path, "wait", FORKS)
    process.kill()
    process.wait(10)
    end = time.monotonic() + 15
    while (folder.exists() or not all(map(gone, pids))) and time.monotonic() < end:
        time.sleep(0.05)
    assert [gone(pid) for pid in pids] == [True, True, True]
    assert not folder.exists()


def test_an_orderly_end_does_not_wait_for_a_fork_which_lives_on(tmp_path):
    process, folder, (fork, *others) = owner(tmp_path, "close", FORKS)
    assert float(process.stdout.readline()) < 10
    assert not folder.exists()
    assert all(map(gone, others))
    assert not gone(fork)
    process.kill()
    process.wait(10)
    os.kill(fork, signal.SIGKILL)


def test_an_orderly_end_waits_until_all_is_cleared_away(tmp_path):
    process, folder, pids = owner(tmp_path, "close")
    assert process.stdout.readline() == "closed\n"
    assert not folder.exists()
    assert all(map(gone, pids))
    assert not gone(process.pid)
    process.kill()
    process.wait(10)


MAPS = """
import mmap, sys, time
from multiprocessing import shared_memory

tracked = shared_memory.SharedMemory(create=True, size=100)
with open(sys.argv[1], "w+b") as file:
    file.truncate(100)
    mapped = mmap.mmap(file.fileno(), 100)
print(tracked.name, flush=True)
time.sleep(600)
"""


def test_shared_memory_is_removed_unless_others_use_it(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    sweeper = Sweeper()
    names = [Path("/dev/shm", f"t{os.urandom(4).hex()}") for _ in range(2)]
    ours = []
    for name in names:
        command = [sys.executable, "-c", MAPS, str(name)]
        env = os.environ | sweeper.environment
        ours.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    tracked = [Path("/dev/shm", process.stdout.readline().strip()) for process in ours]
    assert all(path.exists() for path in (*names, *tracked))
    with names[1].open("r+b") as file, mmap.mmap(file.fileno(), 100):
        sweeper.close()
        assert [path.exists() for path in (*names, *tracked)] == [False, True, False, False]
    names[1].unlink()
    for process in ours:
        assert process.wait(10) == -signal.SIGKILL


@pytest.mark.parametrize("name", [b"t\xff", b"t\r"])
def test_shared_memory_of_any_name_is_removed(tmp_path, monkeypatch, name):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    sweeper = Sweeper()
    path = Path(os.fsdecode(b"/dev/shm/" + name + os.urandom(4).hex().encode()))
    command = [sys.executable, "-c", MAPS, str(path)]
    env = os.environ | sweeper.environment
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    process.stdout.readline()
    sweeper.close()
    assert process.wait(10) == -signal.SIGKILL
    assert not path.exists()
    assert not [*tmp_path.iterdir()]


def test_processes_of_others_live_on(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    first, second = Sweeper(), Sweeper()
    other = subprocess.Popen(["sleep", "600"], env=os.environ | second.environment)
    plain = subprocess.Popen(["sleep", "600"])
    first.close()
    assert other.poll() is None
    assert plain.poll() is None
    second.close()
    assert other.wait(10) == -signal.SIGKILL
    plain.kill()
    plain.wait(10)


def test_a_sweeper_under_another_one_belongs_to_both(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    outer = Sweeper()
    monkeypatch.setenv(MARK, outer.environment[MARK])
    inner = Sweeper()
    process = subprocess.Popen(["sleep", "600"], env=os.environ | inner.environment)
    outer.close()
    assert process.wait(10) == -signal.SIGKILL
    inner.close()
    assert not [*tmp_path.iterdir()]


def test_a_folder_that_cannot_be_made_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "missing"))
    with pytest.raises(OSError, match=r"No such file or directory: '.*/missing/nl"):
        Sweeper()
