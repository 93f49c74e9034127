"""However a run ends and whatever it is doing: an exit code, one step lost at most, nothing left.

Signals go to all processes of a run, as Slurm and others send them.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from nemo_like.config.run import CheckpointConfig
from nemo_like.run.checkpoint import Checkpoints
from nemo_like.run.folder import claim
from tests.small_runs import ROOT, SMALL, last_of

HF = "generation.backend=hf"
VLLM = "generation.backend=vllm"
ENDLESS = "grpo.max_steps=500"
SHORT = ("grpo.max_steps=3", "checkpoint.every_steps=1")


class Command:
    """A run as a command, in a TMPDIR of its own."""

    def __init__(self, folder, *overrides, script="run_grpo.py", **env):
        self.folder = folder / "run"
        self.temporary = Path(tempfile.gettempdir(), f"e{os.urandom(4).hex()}")
        self.temporary.mkdir()
        self.shared_memory = set(os.listdir("/dev/shm"))  # noqa: PTH208
        self.mark = str(self.temporary)
        self.output = folder / "output.txt"
        mine = {"TMPDIR": self.mark, "NEMO_LIKE_TEST": self.mark, "OMP_NUM_THREADS": "1"}
        kept = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        typed = (f"run.dir={self.folder}", *overrides)
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, ROOT / "examples" / script, *last_of(typed)],
                cwd=folder,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=kept | mine | env,
                start_new_session=True,
            )

    def text(self):
        return self.output.read_text()

    def log(self):
        path = self.folder / "run.log"
        return path.read_text() if path.exists() else ""

    def wait_until(self, what, timeout_s=300.0):
        """Until ``what()`` is true, or is a part of the run's log; looks often."""
        seen = what if callable(what) else lambda: what in self.log()
        end = time.monotonic() + timeout_s
        while not seen():
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < end, self.text()
            time.sleep(0.005)

    def send(self, number):
        """To every process, whatever its group, as Slurm does it."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def end(self, timeout_s=120.0):
        """The exit code; afterwards no process and no file may be left."""
        code = self.process.wait(timeout_s)
        end = time.monotonic() + 60.0
        while (left := self.left()) and time.monotonic() < end:
            time.sleep(0.1)
        assert not left, f"{left}\n{self.text()}"
        shutil.rmtree(self.temporary)
        return code

    def left(self):
        """Processes, temporary files and shared memory that the run has made."""
        found = [str(process) for process in self.processes()]
        new = set(os.listdir("/dev/shm")) - self.shared_memory  # noqa: PTH208
        return [*found, *map(str, self.temporary.rglob("*")), *unused(new)]

    def processes(self):
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                mark = process.environ().get("NEMO_LIKE_TEST")
                if mark == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def steps(self):
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line)["step"] for line in lines if line.endswith("}")]

    def saved(self):
        return Checkpoints(self.folder, CheckpointConfig()).steps()


def unused(names):
    """Those of files in /dev/shm that nobody has mapped; what others use is none of the run's."""
    used = set()  # by inode: a semaphore is mapped before it gets its name
    for maps in Path("/proc").glob("[0-9]*/maps") if names else ():
        with contextlib.suppress(OSError):
            lines = [line.split() for line in maps.read_text().splitlines() if "/dev/shm/" in line]
            used |= {int(line[4]) for line in lines}
    found = []
    for path in (Path("/dev/shm", one) for one in names):
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino not in used:
                found.append(str(path))
    return found


def at_step(number):
    return lambda run: run.wait_until(lambda: number in run.steps())


def soon_after_step(number):
    """Somewhere in the next step."""

    def wait(run):
        at_step(number)(run)
        time.sleep(random.uniform(0.0, 0.4))

    return wait


COUNTING = """
import time
from pathlib import Path

def counts(prompt, completion, **_):
    with (Path(__file__).parent / "scored").open("a") as scored:
        scored.write("x")
    time.sleep(0.2)
    return float(len(completion) % 2)
"""
ROWS = 16
"""Of a step; see SMALL."""


def scored(run):
    path = run.folder.parent / "scored"
    return path.stat().st_size if path.exists() else 0


def while_sampling(run, rows=3):
    """In the second step, when so many of its rows, and those of its validation, have arrived."""
    at_step(1)(run)
    before = scored(run)
    run.wait_until(lambda: scored(run) >= before + rows)


def while_training(run):
    while_sampling(run, ROWS)
    policy = the_process(run, "PolicyWorker")

    def is_busy():
        before = policy.cpu_times().user
        time.sleep(0.05)
        return policy.cpu_times().user > before + 0.02

    run.wait_until(is_busy)


def while_validating(run):
    while_sampling(run, ROWS + 3)


def while_saving(run):
    run.wait_until(lambda: any(run.folder.glob("checkpoints/writing_step_2*")))


def while_exporting(run):
    run.wait_until(lambda: 3 in run.saved())


def while_shutting_down(run):
    run.wait_until("Summary:")


def logged(text):
    return lambda run: run.wait_until(text)


def test_sigterm_to_all_processes_saves_the_step_and_the_run_goes_on_from_it(tmp_path):
    run = Command(tmp_path, *SMALL, HF, ENDLESS)
    at_step(2)(run)
    run.send(signal.SIGTERM)
    assert run.end() == 75, run.text()
    assert "Stopped on request after step " in run.text()
    assert "Traceback" not in run.text()
    assert "SIGTERM received" not in run.text()
    assert run.saved() == [run.steps()[-1]]


def test_kill_9_of_the_driver_at_start_leaves_nothing(tmp_path):
    run = Command(tmp_path, *SMALL, HF, ENDLESS)
    run.wait_until(lambda: any(run.temporary.glob("nl*/session_2*/logs/raylet*")))
    run.process.kill()
    assert run.end() == -signal.SIGKILL


START = {
    "data": logged("Starting: data"),
    "ray": logged("Starting: ray"),
    "ray, later": lambda run: run.wait_until(
        lambda: any(run.temporary.glob("nl*/session_2*/logs/raylet*"))
    ),
    "imports": logged("Starting: imports"),
    "workers": logged("Starting: workers"),
    "engines": logged("Refits: "),
}
STEPS = {
    "first validation": logged("One optimizer step per batch"),
    "first step": soon_after_step(0),
    "second step": soon_after_step(1),
}
WITHIN_STEP = {"rollout": while_sampling, "train": while_training, "validation": while_validating}
LAST = {"save": while_saving, "export": while_exporting, "shutdown": while_shutting_down}


@pytest.mark.full
@pytest.mark.parametrize("backend", [HF, VLLM], ids=["hf", "vllm"])
@pytest.mark.parametrize("phase", [*START, *STEPS, *WITHIN_STEP, *LAST])
def test_sigterm_in_every_phase_loses_one_step_at_most(tmp_path, phase, backend):
    (tmp_path / "reward.py").write_text(COUNTING)
    options = (*SMALL, backend, *(SHORT if phase in LAST else (ENDLESS,)))
    if phase in WITHIN_STEP:
        options += ("environment.reward=reward.py:counts", "validation.every_steps=1")
    run = Command(tmp_path, *options)
    (START | STEPS | WITHIN_STEP | LAST)[phase](run)
    before = max(run.steps(), default=0)
    run.send(signal.SIGTERM)
    code = run.end()
    assert code == 75 or (phase in ("export", "shutdown") and code == 0), run.text()
    assert "Traceback" not in run.text()
    saved = run.saved()[-1] if run.saved() else 0
    if phase not in ("first validation", "first step"):  # may be just before the first step
        assert saved >= before
    if code == 0:
        assert (run.folder / "final" / "model.safetensors").is_file()
        return
    assert "Stopped on request" in run.text()
    again = Command(tmp_path, *options, f"grpo.max_steps={saved + 1}", "run.resume=true")
    assert again.end(240) == 0, again.text()
    assert again.steps() == [*range(saved + 2)]


@pytest.mark.full
@pytest.mark.parametrize("backend", [HF, VLLM], ids=["hf", "vllm"])
@pytest.mark.parametrize("phase", ["ray, later", "workers", "second step"])
def test_kill_9_of_the_driver_in_any_phase_leaves_nothing(tmp_path, phase, backend):
    run = Command(tmp_path, *SMALL, backend, ENDLESS)
    (START | STEPS)[phase](run)
    run.process.kill()
    assert run.end() == -signal.SIGKILL


@pytest.mark.full
@pytest.mark.parametrize("backend", [HF, VLLM], ids=["hf", "vllm"])
def test_kill_9_in_the_export_leaves_no_half_a_model_and_the_run_can_end(tmp_path, backend):
    run = Command(tmp_path, *SMALL, backend, *SHORT)
    while_exporting(run)
    run.process.kill()
    assert run.end() == -signal.SIGKILL
    assert not (run.folder / "final").exists()
    again = Command(tmp_path, *SMALL, backend, *SHORT, "run.resume=true")
    assert again.end(240) == 0, again.text()
    assert {path.name for path in again.folder.iterdir()} >= {"final", "summary.json"}
    assert (again.folder / "final" / "model.safetensors").is_file()
    assert not [path for path in again.folder.rglob("*") if "writing" in path.name]


@pytest.mark.full
@pytest.mark.parametrize("backend", [HF, VLLM], ids=["hf", "vllm"])
def test_an_error_leaves_nothing(tmp_path, backend):
    (tmp_path / "reward.py").write_text("def fails(prompt, completion, **_): raise KeyError")
    options = ("environment.reward=reward.py:fails", "validation.every_steps=0")
    run = Command(tmp_path, *SMALL, backend, *options)
    assert run.end(240) == 1, run.text()


@pytest.mark.full
@pytest.mark.parametrize("phase", ["workers", "part"])
def test_sigterm_ends_an_evaluation_at_once(tmp_path, phase):
    rows = ("data.num_validation_rows=400", "validation.num_generations_per_prompt=2")
    options = (HF, *rows, "generation.max_new_tokens=32", "logging.sinks=[]")
    run = Command(tmp_path, *options, script="run_eval.py")
    (logged("Starting: workers") if phase == "workers" else at_step(2))(run)
    run.send(signal.SIGTERM)
    assert run.end(30) == 75, run.text()


@pytest.mark.full
def test_a_step_longer_than_the_grace_is_abandoned(tmp_path):
    (tmp_path / "reward.py").write_text(
        "import time\ndef slow(prompt, completion, **_):\n    time.sleep(5)\n    return 1.0\n"
    )
    slow = ("environment.reward=reward.py:slow", "validation.every_steps=0")
    run = Command(tmp_path, *SMALL, HF, *slow, "run.stop_grace_s=2", "checkpoint.every_steps=1")
    run.wait_until("One optimizer step per batch")
    start = time.monotonic()
    run.send(signal.SIGTERM)
    assert run.end(60) == 75, run.text()
    assert time.monotonic() - start < 30
    assert "longer than run.stop_grace_s=2 and is abandoned" in run.text()
    claim(run.folder).close()  # nobody holds it


@pytest.mark.full
def test_a_worker_that_dies_idle_is_named_in_the_phase_that_others_are_in(tmp_path):
    """A policy rank while completions are sampled and scored, then an engine in the train step."""
    (tmp_path / "reward.py").write_text(
        "import time\ndef slow(prompt, completion, **_):\n    time.sleep(5)\n    return 1.0\n"
    )
    slow = ("environment.reward=reward.py:slow", "validation.every_steps=0")
    run = Command(tmp_path, *SMALL, HF, *slow)
    run.wait_until("One optimizer step per batch")
    time.sleep(3.0)
    start = time.monotonic()
    the_process(run, "PolicyWorker").kill()
    assert run.end(60) == 1, run.text()
    assert time.monotonic() - start < 20
    assert "died in rollout, while it was idle" in run.text()
    assert "(raylet)" not in run.text()  # Ray's page of advice is in the log
    assert "A worker died or was killed" in run.log()


@pytest.mark.full
def test_an_engine_that_dies_while_the_policy_works_is_named(tmp_path):
    run = Command(tmp_path, *SMALL, VLLM, ENDLESS, "validation.every_steps=0")
    at_step(2)(run)
    the_process(run, "PolicyWorker").suspend()  # the driver comes to wait for it
    time.sleep(4.0)
    (engine,) = [
        process
        for process in the_process(run, "GenerationWorker").children(recursive=True)
        if "forkserver" in " ".join(process.cmdline()) and not process.children()
    ]
    engine.kill()
    assert run.end(60) == 1, run.text()
    assert "generation rank 0 on " in run.text()
    assert "while it was idle: vLLM failed to stay up: its process died" in run.text()


def the_process(run, title):
    (found,) = [
        process
        for process in psutil.Process(run.process.pid).children(recursive=True)
        if process.cmdline()[:1] and f"ray::{title}" in process.cmdline()[0]
    ]
    return found
