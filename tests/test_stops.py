"""Signals at every point of a run: at most the step in progress is lost, and exit codes say so."""

import json
import multiprocessing
import os
import signal
import time
from functools import cache
from pathlib import Path

import pytest

from nemo_like.compose.load import compose_config
from nemo_like.errors import StoppedError, exit_code
from nemo_like.observe.metrics import Metric
from nemo_like.run.ending import LeftError, StopRequest
from nemo_like.run.run import Run
from tests.small_runs import ROOT


class Counter:
    """A model and its data in one number, saved as such, and a measure of it."""

    def __init__(self, act=lambda phase: None):
        self.value = 0
        self.act = act
        self.validated = []

    @property
    def weight_version(self):
        return self.value

    def save(self, folder):
        self.act("save")
        Path(folder).mkdir()
        (Path(folder) / "value").write_text(str(self.value))

    def load(self, folder, weight_version):
        self.value = int((Path(folder) / "value").read_text())
        assert self.value == weight_version

    def state(self):
        return {"value": self.value}

    def load_state(self, state):
        assert state == {"value": self.value}

    def validate(self, step):
        self.act("validate")
        self.validated.append(step)
        return {"validation/loss": Metric(1.0 / (1 + self.value))}


@cache
def composed(*overrides):
    always = ("run.resume=true", "logging.sinks=[]", "run.dir=elsewhere")
    return compose_config(ROOT / "configs", "sft", [*always, *overrides])


def run_counter(folder, *overrides, act=lambda phase: None, steps=4, every=2, began=None, **facts):
    """``steps`` steps that add one; ``act`` gets the name of each phase. Returns the model."""
    config = composed(*overrides)
    config = config.replace(run=config.run.replace(dir=str(folder)))
    model = Counter(act)
    with Run(config, "sft", began) as run:
        run.callbacks.tell("on_start", run.dir, config, run.first_step)
        with run.start_phase("data"):
            act("start")
        run.restore({"policy": model})
        run.restore_position(model)
        for _ in run.steps(steps, {"policy": model}, model, model, every):
            act("step")
            model.value += 1
            run.log({"train/loss": Metric(float(model.value))})
        act("export")
        run.finish(**facts)
    return model


def at(phase, number, action):
    """Carry out ``action`` when ``phase`` comes for that time."""
    times = []

    def act(current):
        times.append(current)
        if current == phase and times.count(phase) == number:
            action()

    return act


def send(*numbers):
    def action():
        for number in numbers:
            os.kill(os.getpid(), number)

    return action


def saved(folder):
    return sorted(int(path.name[5:]) for path in (Path(folder) / "checkpoints").glob("step_*"))


def lines(folder):
    """What was logged, each line on its own."""
    found = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").open()]
    return [
        {name: value for name, value in one.items() if not name.startswith("time")} for one in found
    ]


TERM, USR1 = signal.SIGTERM, signal.SIGUSR1


@pytest.mark.parametrize(
    ("number", "phase", "times", "last"),
    [
        (TERM, "step", 1, 1),
        (TERM, "step", 2, 2),
        (USR1, "step", 2, 2),
        (TERM, "step", 4, 4),
        (TERM, "save", 1, 2),
        (USR1, "save", 1, 2),
    ],
)
def test_a_stop_saves_the_step_in_progress_and_the_rest_is_as_without_it(
    tmp_path, number, phase, times, last
):
    """Also where the step is due for a validation, which is then made first thing afterwards."""
    run_counter(tmp_path / "straight", "checkpoint.every_steps=2")
    options = ("checkpoint.every_steps=2",)
    with pytest.raises(StoppedError, match=f"after step {last} of 4, which is saved") as stopped:
        run_counter(tmp_path / "stopped", *options, act=at(phase, times, send(number)))
    assert exit_code(stopped.value) == 75
    assert saved(tmp_path / "stopped")[-1] == last
    assert run_counter(tmp_path / "stopped", *options).value == 4
    assert lines(tmp_path / "stopped") == lines(tmp_path / "straight")
    assert [one["step"] for one in lines(tmp_path / "stopped")] == [0, 1, 2, 3, 4]


def test_a_validation_is_left_for_a_stop_and_made_when_the_run_continues(tmp_path):
    run_counter(tmp_path / "straight")
    with pytest.raises(StoppedError, match="after step 2 of 4"):
        run_counter(tmp_path / "run", act=at("validate", 2, send(TERM)))
    assert saved(tmp_path / "run") == [2]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 2
    assert [one["step"] for one in lines(tmp_path / "run")] == [0, 1]
    with pytest.raises(StoppedError, match="before the first step"):
        run_counter(tmp_path / "run", act=at("validate", 1, send(TERM)))
    model = run_counter(tmp_path / "run")
    assert model.validated == [2, 4]
    assert lines(tmp_path / "run") == lines(tmp_path / "straight")


@pytest.mark.parametrize(
    ("phase", "number"), [("start", TERM), ("start", USR1), ("validate", TERM)]
)
def test_before_the_first_step_a_run_ends_without_a_checkpoint(tmp_path, phase, number):
    with pytest.raises(StoppedError, match="before the first step, so nothing is lost"):
        run_counter(tmp_path, act=at(phase, 1, send(number)))
    assert saved(tmp_path) == []
    assert run_counter(tmp_path).value == 4


def test_sigterm_leaves_start_up_where_it_is_however_long_that_takes(tmp_path):
    went_on = []

    def starting():
        os.kill(os.getpid(), TERM)
        went_on.append(time.sleep(60))

    with pytest.raises(StoppedError):
        run_counter(tmp_path, act=at("start", 1, starting))
    assert not went_on


@pytest.mark.parametrize("phase", ["step", "save", "export"])
def test_what_takes_longer_than_the_grace_is_abandoned(tmp_path, phase):
    def slow():
        os.kill(os.getpid(), TERM)
        time.sleep(60)

    start = time.monotonic()
    options = ("run.stop_grace_s=0.2", "checkpoint.every_steps=1", "checkpoint.keep_last=9")
    times = 1 if phase == "export" else 3
    with pytest.raises(StoppedError, match=r"longer than run\.stop_grace_s=0\.2 and is abandoned"):
        run_counter(tmp_path, *options, act=at(phase, times, slow))
    assert time.monotonic() - start < 50
    assert saved(tmp_path)[-1] == (4 if phase == "export" else 2)
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    assert run_counter(tmp_path, *options).value == 4


def test_a_second_sigterm_ends_at_once(tmp_path):
    with pytest.raises(KeyboardInterrupt) as interrupted:
        run_counter(tmp_path, act=at("step", 2, send(TERM, TERM)))
    assert exit_code(interrupted.value) == 130
    assert saved(tmp_path) == []


def test_a_stop_after_the_last_step_lets_the_run_end_as_it_would(tmp_path):
    run_counter(tmp_path, act=at("export", 1, send(TERM)))
    assert (tmp_path / "summary.json").exists()
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_a_stop_in_a_call_of_rays_that_wraps_what_it_raises_leaves_a_validation():
    stop = StopRequest()
    with pytest.raises(LeftError), stop.leaving():
        raise SystemError("returned a result with an exception set") from LeftError()
    other = SystemError("of another kind")
    with pytest.raises(SystemError, match="of another kind"), stop.leaving():
        raise other


@pytest.mark.parametrize("number", [TERM, USR1])
def test_a_fork_of_the_driver_ends_by_the_signal_and_saves_nothing(tmp_path, number):
    """Such as workers of a data loader, which their owner ends by SIGTERM."""
    codes = []

    def fork():
        context = multiprocessing.get_context("fork")
        ready = context.Event()
        child = context.Process(target=lambda: (ready.set(), time.sleep(60)))
        child.start()
        assert ready.wait(10)
        os.kill(child.pid, number)
        child.join(10)
        codes.append(child.exitcode)

    assert run_counter(tmp_path, act=at("step", 2, fork)).value == 4
    assert codes == [-number]
    assert saved(tmp_path) == [4]


def test_a_run_saves_by_time_and_reasons_that_coincide_make_one_checkpoint(tmp_path):
    saves = []
    options = ("checkpoint.every_minutes=1e-6", "checkpoint.every_steps=2")

    def act(phase):
        if phase == "save":
            saves.append(phase)

    run_counter(tmp_path / "often", *options, "checkpoint.keep_last=9", act=act)
    assert saved(tmp_path / "often") == [1, 2, 3, 4]
    assert len(saves) == 4
    run_counter(tmp_path / "never", "checkpoint.every_minutes=0")
    run_counter(tmp_path / "later", "checkpoint.every_minutes=30")
    assert saved(tmp_path / "never") == saved(tmp_path / "later") == [4]
    assert lines(tmp_path / "often") == lines(tmp_path / "never")


def test_time_to_save_counts_from_the_start_of_the_process(tmp_path):
    """Start-up is lost as well, where a machine is taken away."""
    overrides = ("checkpoint.every_minutes=1", "checkpoint.keep_last=9")
    run_counter(tmp_path, *overrides, began=time.time() - 60)
    assert saved(tmp_path) == [1, 4]


def test_an_evaluation_keeps_nothing_and_so_ends_at_once(tmp_path):
    options = ("logging.sinks=[]", f"run.dir={tmp_path}")
    config = compose_config(ROOT / "configs", "eval", list(options))
    with (
        pytest.raises(StoppedError, match="after 1 of 3 parts; it starts over when run again"),
        Run(config, "eval") as run,
    ):
        for part in run.rounds(3):
            if part == 2:
                os.kill(os.getpid(), TERM)
                time.sleep(60)
            run.log({})
