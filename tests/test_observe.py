"""Metrics, sinks, console, logs and spans."""

import io
import json
import logging
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console as Terminal

from nemo_like.algorithms.grpo.config import GRPOConfig
from nemo_like.config.run import SINKS
from nemo_like.errors import RunError, UserError
from nemo_like.observe.console import Column, Progress, live_terminal, setup_logging
from nemo_like.observe.metrics import Metric, Metrics, Reduce, Spans, merge, values
from nemo_like.observe.sinks import Details, JsonlFile, Sinks, TensorBoardSink

DEV_FULL = Path("/dev/full")  # every write to it fails with "No space left on device"
needs_dev_full = pytest.mark.skipif(not DEV_FULL.exists(), reason="Linux only")


class StrictTracker:
    """A tracker like W&B's: it refuses steps that fall or that are already committed."""

    def __init__(self) -> None:
        self.records: dict[int, dict[str, float]] = {}
        self.num_closed = 0

    def log(self, step: int, values: dict[str, float]) -> None:
        """Commit ``step``."""
        if self.records and step <= max(self.records):
            raise ValueError(f"step {step} is committed")
        self.records[step] = values

    def close(self) -> None:
        """Count the call."""
        self.num_closed += 1


class BrokenTracker:
    """A tracker whose server is down."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Fail."""
        raise ConnectionError(f"no route for step {step} of {len(values)} values")

    def close(self) -> None:
        """Fail."""
        raise ConnectionError("no route")


class ManualClock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def root_logging() -> Iterator[None]:
    """Leave the root logger as it was."""
    root = logging.getLogger()
    handlers, level = [*root.handlers], root.level
    yield
    for handler in set(root.handlers) - set(handlers):
        handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)


DETAILS = Details(
    histograms={"rollout/rewards": [0.0, 1.0, 1.0]},
    samples=[{"prompt": "<b>1 + 1 =", "completion": "2", "reward": 1.0}],
)


def records_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


# Metrics


def test_batches_of_different_size_count_by_their_rows() -> None:
    correct = [1, 1, 1, 1, 0]
    batches = [correct[start : start + 2] for start in range(0, 5, 2)]
    parts = [{"validation/accuracy": Metric(sum(b) / len(b), weight=len(b))} for b in batches]
    assert values(merge(parts)) == {"validation/accuracy": 0.8}


def test_padded_rows_never_count() -> None:
    parts = [{"a/b": Metric(1.0, weight=3)}, {"a/b": Metric(0.0, weight=0)}]
    assert values(merge(parts)) == {"a/b": 1.0}


def test_weighted_rewards_are_logged_with_their_weights() -> None:
    parts = [{"rollout/reward": Metric(1.0, weight=0.7)}, {"rollout/reward": Metric(0.0, 0.3)}]
    assert values(merge(parts))["rollout/reward"] == pytest.approx(0.7, abs=1e-15)


def test_each_reduction_does_what_its_name_says() -> None:
    expected = {Reduce.mean: 2.5, Reduce.sum: 4.0, Reduce.max: 3.0}
    for reduce, value in expected.items():
        parts = [{"a/b": Metric(1.0, 1, reduce)}, {"a/b": Metric(3.0, 3, reduce)}]
        assert values(merge(parts)) == {"a/b": value}


@pytest.mark.parametrize("reduce", list(Reduce))
def test_merging_in_two_stages_equals_merging_at_once(reduce: Reduce) -> None:
    parts: list[Metrics] = [{"a/b": Metric(0.1 * i - 0.3, float(i), reduce)} for i in range(7)]
    staged = merge([merge(parts[:2]), merge(parts[2:3]), merge(parts[3:])])
    assert values(staged)["a/b"] == pytest.approx(values(merge(parts))["a/b"], abs=1e-15)


def test_a_fully_masked_micro_batch_does_not_count_even_if_it_is_nan() -> None:
    for reduce in (Reduce.mean, Reduce.max):
        parts = [{"a/b": Metric(math.nan, 0, reduce)}, {"a/b": Metric(2.0, 5, reduce)}]
        assert values(merge(parts)) == {"a/b": 2.0}


def test_a_metric_measured_over_nothing_is_dropped_but_a_sum_over_nothing_is_zero() -> None:
    nothing: Metrics = {
        "a/mean": Metric(0.0, weight=0),
        "a/max": Metric(-math.inf, 0, Reduce.max),
        "a/sum": Metric(0.0, 0, Reduce.sum),
    }
    assert values(merge([nothing, nothing])) == {"a/sum": 0.0}
    assert values(nothing) == {"a/sum": 0.0}


@pytest.mark.parametrize("reduce", list(Reduce))
def test_nan_stays_visible_wherever_it_stands(reduce: Reduce) -> None:
    numbers = [1.0, math.nan, 2.0]
    for turn in range(3):
        order = numbers[turn:] + numbers[:turn]
        merged = merge([{"a/b": Metric(number, 1, reduce)} for number in order])
        assert math.isnan(merged["a/b"].value)


def test_a_sum_is_rounded_once_however_its_parts_cancel() -> None:
    parts = [{"x": Metric(value, reduce=Reduce.sum)} for value in (1e16, 1.0, -1e16)]
    assert merge(parts)["x"].value == 1.0


def test_opposite_infinities_give_nan_instead_of_an_exception() -> None:
    assert math.isnan(merge([{"a/b": Metric(math.inf)}, {"a/b": Metric(-math.inf)}])["a/b"].value)


def test_one_part_passes_through_unchanged() -> None:
    assert merge([{"a/b": Metric(0.1, weight=3)}]) == {"a/b": Metric(0.1, weight=3)}


def test_parts_that_disagree_about_the_reduction_are_refused() -> None:
    with pytest.raises(AssertionError, match="a/b is reduced as"):
        merge([{"a/b": Metric(1.0)}, {"a/b": Metric(1.0, reduce=Reduce.sum)}])


def test_metrics_need_no_torch() -> None:
    check = "import sys, nemo_like.observe.metrics; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


# Sinks


def test_a_monitor_between_steps_costs_no_training_metric() -> None:
    tracker = StrictTracker()
    sinks = Sinks([tracker])
    for step in (1, 2, 3):
        samples = [{"gpu/mem_gib": Metric(float(i), reduce=Reduce.max)} for i in range(50)]
        train = {"train/loss": Metric(step / 10)}
        sinks.log(step, values(merge([*samples, train])))
    assert {step: record["train/loss"] for step, record in tracker.records.items()} == {
        1: 0.1,
        2: 0.2,
        3: 0.3,
    }
    assert all(record["gpu/mem_gib"] == 49.0 for record in tracker.records.values())
    assert not sinks.num_failures


@pytest.mark.parametrize("step", [1, 2])
def test_nothing_is_logged_to_a_step_that_is_complete(step: int) -> None:
    tracker = StrictTracker()
    sinks = Sinks([tracker])
    sinks.log(2, {"train/loss": 1.0})
    with pytest.raises(AssertionError, match="already logged"):
        sinks.log(step, {"validation/reward": 1.0})
    assert tracker.records == {2: {"train/loss": 1.0}}


def test_a_resumed_run_logs_no_step_a_second_time() -> None:
    sinks = Sinks([StrictTracker()], last_step=5)
    with pytest.raises(AssertionError, match="already logged"):
        sinks.log(5, {})
    sinks.log(6, {})


def test_a_sink_that_fails_is_counted_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tracker = StrictTracker()
    sinks = Sinks([BrokenTracker(), tracker])
    for step in range(3):
        sinks.log(step, {"train/loss": 1.0})
    assert sinks.num_failures == {"BrokenTracker": 3}
    assert len(caplog.records) == 1
    assert "the run goes on: ConnectionError('no route for step 0" in caplog.text
    sinks.close()
    assert list(tracker.records) == [0, 1, 2]
    assert tracker.num_closed == 1
    assert "BrokenTracker failed 4 times" in caplog.text


@pytest.mark.parametrize("failed", [False, True])
def test_a_tracker_hears_how_a_run_ended(failed: bool) -> None:
    class Tracker(StrictTracker):
        ends = "closed"

        def fail(self) -> None:
            self.ends = "failed"

    tracker, other = Tracker(), StrictTracker()
    Sinks([tracker, other]).close(failed=failed)
    assert (tracker.ends, tracker.num_closed) == (("failed", 0) if failed else ("closed", 1))
    assert other.num_closed == 1


@needs_dev_full
def test_a_full_disk_under_the_metrics_file_ends_the_run() -> None:
    sinks = Sinks([JsonlFile(DEV_FULL)])
    with pytest.raises(RunError, match=r"cannot write /dev/full: No space left .*run.resume=true"):
        sinks.log(1, {"train/loss": 1.0})
    sinks.close()


def test_each_step_is_one_line_on_disk_before_the_next_begins(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    sink = JsonlFile(path)
    sink.log(1, {"train/loss": 0.5, "train/kl": math.nan})
    (record,) = records_of(path)
    assert list(record) == ["step", "time", "train/loss", "train/kl"]
    assert record["step"] == 1
    assert record["train/loss"] == 0.5
    assert record["time"] == pytest.approx(time.time(), abs=60)
    sink.log(2, {})
    assert len(records_of(path)) == 2
    sink.close()


def test_resume_drops_later_steps_and_a_torn_last_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlFile(path)
    for step in range(6):
        sink.log(step, {"train/loss": float(step)})
    sink.close()
    with path.open("ab") as file:
        file.write('{"step": 6, "time": 1.0, "note": "\u00e9'.encode()[:-1])

    resumed = JsonlFile(path)
    resumed.truncate_after(3)
    resumed.log(4, {"train/loss": 40.0})
    resumed.close()
    assert [(r["step"], r["train/loss"]) for r in records_of(path)] == [
        (0, 0.0),
        (1, 1.0),
        (2, 2.0),
        (3, 3.0),
        (4, 40.0),
    ]
    assert "dropped 1 torn lines" in caplog.text
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_last_line_that_lacks_only_its_newline_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}')
    file = JsonlFile(path)
    file.truncate_after(2)
    file.append({"step": 3})
    file.close()
    assert [record["step"] for record in records_of(path)] == [1, 2, 3]


def test_tensorboard_hides_what_a_resumed_run_writes_again(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    first = TensorBoardSink(tmp_path, None, None)
    for step in range(5):
        first.log(step, {"train/loss": float(step)})
    first.close()
    time.sleep(1.1)  # event files are ordered by the second in their names
    second = TensorBoardSink(tmp_path, None, 2)
    second.log(3, {"train/loss": 30.0})
    second.close()
    events = (
        accumulators.EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("train/loss")
    )
    assert [(e.step, e.value) for e in events] == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 30.0)]


def test_tensorboard_has_histograms_and_samples_as_they_are(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sinks = Sinks([TensorBoardSink(tmp_path, None, None), StrictTracker()])
    sinks.log(3, {"train/loss": 1.0}, DETAILS)
    sinks.close()
    assert not sinks.num_failures
    events = accumulators.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    (text,) = events.Tensors("sample 0/text_summary")
    assert text.step == 3
    assert text.tensor_proto.string_val[0] == b"    <b>1 + 1 =\n\n    2\n\n    reward 1.0"
    (histogram,) = events.Histograms("rollout/rewards")
    assert (histogram.histogram_value.num, histogram.histogram_value.sum) == (3, 2)


def test_trajectories_are_readable_text_and_resume_like_metrics(tmp_path: Path) -> None:
    path = tmp_path / "trajectories.jsonl"
    writer = JsonlFile(path)
    for step in (1, 2):
        # A line separator and half a character.
        writer.append({"step": step, "completion": "z\u00e9ro\u2028\n\udc9f", "reward": None})
    writer.truncate_after(1)
    writer.close()
    (row,) = records_of(path)
    assert row["completion"] == "z\u00e9ro\u2028\n\udc9f"
    assert (row["step"], row["reward"]) == (1, None)
    assert "z\u00e9ro" in path.read_text(encoding="utf-8")


# Weights & Biases


def test_wandb_offline_resumes_the_same_run_and_keeps_secrets_out(tmp_path, monkeypatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_PROJECT", "of-this-test")
    kwargs = {"hf_token": "s3cret", "max_num_seqs": 4}
    config = GRPOConfig.model_validate({"generation": {"engine_kwargs": kwargs}})
    ids = []
    for step in (1, 2):
        sink = SINKS.load("logging.sinks", "wandb")(tmp_path, config, None)
        sink.log_details(step, DETAILS)
        sink.log(step, {"train/loss": 0.5})
        sink.close()
        ids.append((tmp_path / "wandb_run_id").read_text().strip())
    wandb.teardown()  # its own process writes the record to its end before it ends
    assert ids[0] == ids[1]
    stored = list(tmp_path.glob(f"wandb/offline-run-*/run-{ids[0]}.wandb"))
    content = b"".join(path.read_bytes() for path in stored)
    assert b"train/loss" in content
    assert b"rollout/rewards" in content
    assert b"of-this-test" in content
    found = tmp_path.glob("wandb/offline-run-*/files/**/*.table.json")
    tables = [path.read_text() for path in found]
    assert [table.count("<b>1 + 1 =") for table in tables] == [1, 1]
    assert b"max_num_seqs" in content
    assert b"s3cret" not in content


@pytest.mark.parametrize(
    ("mode", "said"), [("disabled", "disabled, records nothing"), ("dryrun", "offline, in ")]
)
def test_the_log_says_whether_wandb_keeps_records(tmp_path, monkeypatch, caplog, mode, said):
    wandb = pytest.importorskip("wandb")
    wandb.teardown()  # it reads the variable once per process
    monkeypatch.setenv("WANDB_MODE", mode)
    with caplog.at_level(logging.INFO):
        sink = SINKS.load("logging.sinks", "wandb")(tmp_path, GRPOConfig(), None)
    sink.log(1, {"train/loss": 0.5})
    sink.close()
    (line,) = [one.getMessage() for one in caplog.records if one.name.endswith("wandb_sink")]
    assert line.startswith(f"wandb: {said}")
    assert (tmp_path / "wandb").exists() == (mode != "disabled")


def test_a_mode_that_wandb_does_not_know_is_refused_in_words(tmp_path, monkeypatch):
    pytest.importorskip("wandb").teardown()
    monkeypatch.setenv("WANDB_MODE", "OFFLINE")
    with pytest.raises(UserError, match=r"WANDB_MODE=offline .* W&B says: .*'OFFLINE'"):
        SINKS.load("logging.sinks", "wandb")(tmp_path, GRPOConfig(), None)


def test_a_missing_wandb_is_named_with_its_remedy(tmp_path: Path) -> None:
    script = (
        "import sys, pathlib; sys.modules['wandb'] = None\n"
        "from nemo_like.observe.wandb_sink import WandbSink\n"
        f"run_dir = pathlib.Path({str(tmp_path)!r})\n"
        "WandbSink(run_dir, None, None)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True
    )
    assert "UserError: logging.sinks=[wandb] needs the package wandb" in done.stderr
    assert "pip install wandb, or leave it out" in done.stderr


# Console and logs


def recording_terminal() -> Terminal:
    return Terminal(record=True, file=io.StringIO(), force_terminal=True, width=100, height=30)


def test_the_live_view_shows_steps_pace_phase_and_the_headline() -> None:
    terminal, clock = recording_terminal(), ManualClock()
    progress = Progress(60, terminal, clock=clock)
    progress.log(0, {"validation/reward": 0.031})
    for step in range(1, 13):
        clock.now_s += 2.0
        progress.log(step, {"rollout/reward": step / 100, "train/loss": -0.012, "x/hidden": 1.0})
    with progress.phase("rollout"):
        clock.now_s += 7.0
        terminal.print(progress)
    lines = [line.rstrip() for line in terminal.export_text().splitlines()]
    assert lines[0].startswith("step 12/60")
    assert lines[0].endswith("ETA 1:36")
    assert lines[1].split() == ["step", "reward", "loss"]
    assert [line.split()[0] for line in lines[2:10]] == [str(step) for step in range(5, 13)]
    assert lines[9].split() == ["12", "0.120", "-0.0120"]
    assert lines[10] == "rollout 7 s  |  validation/reward 0.031 at step 0"


def test_an_inner_phase_hides_the_outer_one_until_it_ends() -> None:
    terminal = recording_terminal()
    progress = Progress(3, terminal, clock=ManualClock())
    with progress.phase("step"):
        with pytest.raises(KeyError), progress.phase("refit"):
            terminal.print(progress)
            raise KeyError
        terminal.print(progress)
    terminal.print(progress)
    shown = terminal.export_text()
    assert shown.count("refit 0 s") == 1
    assert shown.count("step 0 s") == 1


@pytest.mark.usefixtures("root_logging")
def test_log_lines_stand_above_the_live_table(tmp_path: Path) -> None:
    terminal = recording_terminal()
    setup_logging(tmp_path, terminal)
    with Progress(2, terminal) as progress:
        logging.getLogger("nemo_like.x").info("engine [bold] is up")
        progress.log(1, {"rollout/reward": 0.25})
        logging.getLogger("nemo_like.x").warning("3 rows masked")
    shown = terminal.export_text()
    assert "engine [bold] is up" in shown
    assert "WARNING 3 rows masked" in shown
    assert shown.rindex("step 1/2") > shown.index("3 rows masked")
    assert "reward 0.250" not in shown, "the table has it; the line is for the file"
    assert "step 1/2  reward 0.250" in (tmp_path / "run.log").read_text()


def test_plain_lines_are_short_and_aligned(caplog: pytest.LogCaptureFixture) -> None:
    columns = (Column("a/reward", "reward", "{:.2f}"), Column("v/reward", "val", "{:.2f}"))
    columns = (*columns, Column("time/step_s", "time", "{:.1f} s"), Column("no/such", "no", "{}"))
    clock = ManualClock()
    progress = Progress(60, columns=columns, first_step=8, clock=clock)
    with caplog.at_level(logging.INFO):
        clock.now_s += 500.0  # start-up
        progress.log(9, {"a/reward": 0.4, "v/reward": 0.51, "time/step_s": 12.0})
        clock.now_s += 2.0
        with progress.phase("rollout"):
            progress.log(10, {"a/reward": math.nan, "time/step_s": 1.94})
        progress.log(60, {})
    assert [record.getMessage() for record in caplog.records] == [
        "step  9/60  reward 0.40  val 0.51  time 12.0 s  ETA 10:12",
        "step 10/60  reward  nan            time  1.9 s  ETA 5:50",
        "step 60/60",
    ]


def test_output_is_live_on_a_terminal_that_moves_its_cursor() -> None:
    assert live_terminal() is None, "pytest captures stderr"
    script = (
        "import os, pty, sys\n"
        "if (child := pty.fork())[0]:\n"
        "    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child[0], 0)[1]))\n"
        "from nemo_like.observe.console import live_terminal\n"
        "sys.exit(3 if live_terminal() else 4)\n"
    )
    ends = [
        subprocess.run([sys.executable, "-c", script], env=os.environ | {"TERM": kind}, check=False)
        for kind in ("xterm", "dumb")
    ]
    assert [one.returncode for one in ends] == [3, 4]


@pytest.mark.usefixtures("root_logging")
def test_setting_up_logging_twice_writes_each_line_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("first", "second"):
        undo = setup_logging(tmp_path / name)
        logging.getLogger("nemo_like.x").info("in %s", name)
        logging.getLogger("httpx").info("noise")
        if name == "second":
            logging.getLogger("nemo_like.x").error("bad")
        undo()
    logging.getLogger("nemo_like.x").error("after it")
    console = capsys.readouterr().err.splitlines()
    assert [line[9:] for line in console] == ["in first", "in second", "ERROR bad"]
    log = (tmp_path / "second" / "run.log").read_text().splitlines()
    assert len(log) == 2
    assert log[0].endswith("INFO MainProcess nemo_like.x: in second")
    assert len((tmp_path / "first" / "run.log").read_text().splitlines()) == 1


# Spans


def test_spans_add_up_by_name_and_start_again_after_pop() -> None:
    clock = ManualClock()
    spans = Spans(clock)
    with spans.span("step"):
        for _ in range(2):
            with spans.span("rollout"):
                clock.now_s += 1.5
        clock.now_s += 1.0
        assert values(spans.pop()) == {"time/rollout_s": 3.0}, "an open span is not finished"
    assert values(spans.pop()) == {"time/step_s": 4.0}
    assert spans.pop() == {}


def test_spans_that_an_exception_leaves_count() -> None:
    spans = Spans()
    with pytest.raises(RuntimeError), spans.span("step"), spans.span("refit"):
        raise RuntimeError
    assert set(spans.pop()) == {"time/step_s", "time/refit_s"}
    with spans.span("step"):
        pass
    assert set(spans.pop()) == {"time/step_s"}
