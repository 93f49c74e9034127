"""Every trajectory is kept, whole and once, whatever ends the run; the oldest make room."""

import shutil
import signal
import subprocess
import sys
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nemo_like.data.datasets import Row
from nemo_like.errors import RunError
from nemo_like.generation.protocol import Completion, FinishReason
from nemo_like.observe.trajectory_files import SCHEMA, Resumed, TrajectoryFiles, files_of
from nemo_like.rewards.protocol import RewardResult, failed
from nemo_like.rollout.trajectory import (
    RolloutTask,
    Segment,
    Trajectory,
    collate_tokens,
    single_turn,
)
from nemo_like.rollout.trajectory_table import table_of
from nemo_like.viewer.trajectories import Trajectories
from tests.small_runs import ROOT

sys.path.append(str(ROOT / "benchmarks"))  # scripts, which are no package

from dashboard import make_run, measure


def completion(ids, version=0):
    return Completion(
        token_ids=list(ids),
        logprobs=[-0.5] * len(ids),
        finish_reason=FinishReason.stop,
        weight_version=version,
    )


def task(group, index, prompt="1 + 1 ="):
    row = Row(
        index=0, messages=({"role": "user", "content": prompt},), fields={}, prompt_ids=(7, 8)
    )
    return RolloutTask(row=row, group=group, index=index, seed=0, request_id="r")


def one(group=0, index=0, text="two", reward=1.0, ids=(1, 2, 3), prompt="1 + 1 =", version=0):
    result = failed("no number") if reward is None else RewardResult(reward=reward)
    return single_turn(task(group, index, prompt), completion(ids, version), text, result)


def table(step, *trajectories, phase="train"):
    return table_of([(step, phase, trajectories, collate_tokens(trajectories))])


def keep(files, *tables):
    for each in tables:
        files.append(each)
        files.wait()


def opened(folder):
    found = Trajectories(folder)
    found.refresh()
    return found


def steps_in(folder):
    return [row["step"] for path in files_of(folder) for row in pq.read_table(path).to_pylist()]


@pytest.mark.parametrize("content", [b"", b"PAR1 hello"])
def test_a_damaged_file_is_left_out_and_said_once(tmp_path, caplog, content):
    files = TrajectoryFiles(tmp_path, 0, 1 << 20)
    keep(files, table(1, one(group=3)), table(2, one(group=4)))
    damaged = files_of(tmp_path)[0]
    damaged.write_bytes(content)
    found = opened(tmp_path)
    assert found.columns["group"].tolist() == [4]
    found.refresh()
    assert caplog.text.count(f"{damaged} cannot be read and is left out") == 1


def test_what_a_model_wrote_is_read_again_with_every_number(tmp_path):
    given = one(3, 1, text="z\u00e9ro\n\udc9f", reward=0.5, version=4)
    keep(TrajectoryFiles(tmp_path, 0, 1e9), table(9, given))
    (row,) = pq.read_table(tmp_path).to_pylist()  # as pandas and DuckDB read the folder
    assert (row["step"], row["phase"], row["group"], row["index"]) == (9, "train", 3, 1)
    assert (row["reward"], row["end"], row["error"], row["num_tokens"]) == (0.5, "final", None, 3)
    assert row["text"] == "z\u00e9ro\n\\udc9f"  # half of a character has no other form
    assert row["prompt"] == "1 + 1 ="
    assert row["input_ids"] == [7, 8, 1, 2, 3]
    assert row["loss_mask"] == [False, False, True, True, True]
    assert row["generation_logprobs"] == [0, 0, -0.5, -0.5, -0.5]
    assert row["weight_versions"] == [-1, -1, 4, 4, 4]


def test_the_same_number_at_another_step_or_of_a_validation_is_another_trajectory(tmp_path):
    """Validations have their prompts' positions as groups, whenever they come."""
    tables = [
        table(step, one(1, 0, f"{phase} {step}"), phase=phase)
        for step in range(40)
        for phase in ("train", "validation")
    ]
    keep(TrajectoryFiles(tmp_path, 0, 1e9), *tables)
    found = opened(tmp_path)
    for phase in ("train", "validation"):
        read = found.read(found.chosen({"phase": phase, "step_min": "7", "step_max": "8"}))
        assert [each["text"] for each in read] == [f"{phase} 7", f"{phase} 8"]
        assert [len(each["rows"]) for each in read] == [1, 1]


def test_a_failed_reward_has_its_reason_and_no_number(tmp_path):
    keep(TrajectoryFiles(tmp_path, 0, 1e9), table(1, one(reward=None), one(1, reward=0.0)))
    found = opened(tmp_path)
    (row,) = found.read(found.chosen({"failed": "1"}))
    assert (row["reward"], row["error"]) == (None, "no number")


def test_many_files_become_few_and_nothing_is_lost(tmp_path):
    keep(TrajectoryFiles(tmp_path, 0, 1e9), *(table(step, one(step)) for step in range(70)))
    assert len(list(tmp_path.iterdir())) == 2 + 6
    assert steps_in(tmp_path) == list(range(70))
    assert opened(tmp_path).columns["group"].tolist() == list(range(70))


def test_a_kill_before_small_files_are_removed_doubles_nothing(tmp_path):
    keep(TrajectoryFiles(tmp_path, 0, 1e9), *(table(step, one()) for step in range(31)))
    small = sorted(tmp_path.glob("*.parquet"))
    copies = [shutil.copy(path, tmp_path / f"{path.name}.copy") for path in small]
    keep(TrajectoryFiles(tmp_path, 0, 1e9), table(31, one()))
    for path, copy in zip(small, copies, strict=True):
        shutil.move(copy, path)
    assert steps_in(tmp_path) == list(range(32))
    TrajectoryFiles(tmp_path, 0, 1e9).truncate_after(Resumed(step=31, validated=31, first_open=32))
    assert len(list(tmp_path.iterdir())) == 1


def test_a_resumed_worker_counts_on_where_groups_were_not_done_in_the_order_of_steps(tmp_path):
    steps = [3] + [1] * 31 + [2] * 32  # two files, of which the later one begins with an older step
    keep(TrajectoryFiles(tmp_path, 0, 1e9), *(table(s, one(n)) for n, s in enumerate(steps)))
    keep(TrajectoryFiles(tmp_path, 0, 1e9), table(4, one(64)))
    assert sorted(opened(tmp_path).columns["group"].tolist()) == list(range(65))


def test_a_resumed_run_drops_what_it_writes_again_of_all_workers(tmp_path):
    for rank in range(2):
        keep(TrajectoryFiles(tmp_path, rank, 1e9), *(table(step, one(step)) for step in range(40)))
    keep(TrajectoryFiles(tmp_path, 1, 1e9), table(40, one(), phase="validation"))
    found = opened(tmp_path)
    TrajectoryFiles(tmp_path, 0, 1e9).truncate_after(Resumed(step=20, validated=20, first_open=21))
    assert sorted(steps_in(tmp_path)) == sorted([*range(21), *range(21)])
    keep(TrajectoryFiles(tmp_path, 0, 1e9), table(21, one(99)))
    found.refresh()
    assert found.columns["step"].max() == 21
    assert found.columns["group"][found.columns["step"] == 21].tolist() == [99]


def test_a_resumed_run_drops_what_it_writes_again_and_keeps_what_has_trained(tmp_path):
    """Groups that were planned for other steps than they trained in, and a validation cut short."""
    files = TrajectoryFiles(tmp_path, 0, 1e9)
    keep(files, table(2, one(1)), table(2, one(2)), table(3, one(3)), table(3, one(4)))
    keep(files, *(table(step, one(9), phase="validation") for step in (0, 2)))
    files.truncate_after(Resumed(step=2, validated=1, first_open=2, used=(3,)))
    columns = opened(tmp_path).columns
    assert [*zip(columns["step"], columns["group"], strict=True)] == [(0, 9), (2, 1), (3, 3)]


def test_a_file_that_a_failing_machine_left_torn_does_not_prevent_the_resume(tmp_path, caplog):
    keep(TrajectoryFiles(tmp_path, 0, 1e9), table(1, one()), table(2, one()))
    torn = files_of(tmp_path)[1]
    torn.write_bytes(torn.read_bytes()[:100])
    TrajectoryFiles(tmp_path, 0, 1e9).truncate_after(Resumed(step=5, validated=5, first_open=9))
    assert steps_in(tmp_path) == [1]
    assert f"{torn} cannot be read and is dropped" in caplog.text


def test_a_limit_drops_the_oldest_trajectories_first(tmp_path):
    """``logging.trajectories_gib`` is all workers' together; this is one worker's part of it."""
    files = TrajectoryFiles(tmp_path, 0, 100_000)
    keep(files, *(table(step, one(ids=range(step, step + 2000))) for step in range(60)))
    steps = steps_in(tmp_path)
    assert steps == list(range(steps[0], 60))
    assert 5 < len(steps) < 60
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 100_000


def test_a_folder_that_cannot_be_written_ends_the_run_with_a_remedy(tmp_path):
    folder = tmp_path / "trajectories"
    files = TrajectoryFiles(folder, 0, 1e9)
    folder.rmdir()
    with pytest.raises(RunError, match=r"cannot write .*set logging\.trajectories_gib=0"):
        for step in range(1000):
            files.append(table(step, one()))
            time.sleep(0.01)


def test_calls_that_end_at_about_the_same_time_share_a_file(tmp_path):
    """A group of 8 rows each; the first is written at once."""
    files = TrajectoryFiles(tmp_path, 0, 1e9, table_of)
    for group in range(64):
        trajectories = [one(group, index) for index in range(8)]
        files.append((1 + group // 32, "train", trajectories, collate_tokens(trajectories)))
    files.wait()
    assert len(files_of(tmp_path)) <= 2
    found = pa.concat_tables(map(pq.read_table, files_of(tmp_path))).to_pydict()
    assert found["group"] == [group for group in range(64) for _ in range(8)]
    assert found["step"] == [1] * 256 + [2] * 256


def test_a_trajectory_of_several_rows_is_one_with_all_of_them(tmp_path):
    """Also where they are so long that they lie in different row groups."""
    rows = [
        [Segment(token_ids=[5]), Segment(token_ids=[i] * 400_000, logprobs=[-1.0] * 400_000)]
        for i in range(3)
    ]
    long = Trajectory(
        task=task(1, 0),
        rows=rows,
        completions=[completion([1])],
        text="",
        result=RewardResult(reward=1.0),
        messages=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
    )
    keep(TrajectoryFiles(tmp_path, 0, 1e9), table(1, one(), long, one(2)))
    assert pq.ParquetFile(files_of(tmp_path)[0]).num_row_groups > 1
    found = opened(tmp_path)
    assert found.columns["group"].tolist() == [0, 1, 2]
    (read,) = found.read(found.chosen({"group_min": "1", "group_max": "1"}))
    assert [row["ids"] for row in read["rows"]] == [[5] + [i] * 400_000 for i in range(3)]
    assert [message["content"] for message in read["messages"]] == ["a", "b"]


WRITER = """
import sys
import pyarrow as pa
from pathlib import Path
from nemo_like.observe.trajectory_files import SCHEMA, Resumed, TrajectoryFiles
files = TrajectoryFiles(Path(sys.argv[1]), 0, 1e9)
for step in range(10_000):
    files.append(pa.Table.from_pylist([{"step": step, "row": 0}] * 50, schema=SCHEMA))
    files.wait()
    print(step, flush=True)
"""


def test_a_kill_loses_no_step_that_was_over(tmp_path):
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    while (last := int(writer.stdout.readline())) < 80:
        pass
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    last = max([last, *(int(line) for line in writer.stdout.read().split())])
    steps = steps_in(tmp_path)
    assert steps in ([i for i in range(count) for _ in range(50)] for count in (last + 1, last + 2))


def test_the_columns_are_those_that_the_documentation_has():
    page = (ROOT / "docs" / "viewer.md").read_text()
    assert not [name for name in SCHEMA.names if f"`{name}`" not in page]


def test_a_long_run_opens_and_filters_at_once(tmp_path):
    """A tenth of what ``benchmarks/dashboard.py`` makes, in a tenth of its limits, as CPU time."""
    make_run(tmp_path, steps=100, rows=512)
    took = measure(tmp_path)
    assert took["open"][2]["total"] == 100 * 512
    assert 0 < took["filter"][2]["total"] < 100 * 512
    assert len(took["one group"][2]["shown"]) == 8
    assert took["open"][1] < 0.2
    assert took["filter"][1] < 0.03
    assert took["filter and sort"][1] < 0.06
