"""Checkpoints are complete or absent, the right ones are kept, and damage is named."""

import json
import zlib
from types import SimpleNamespace

import pytest

from nemo_like.algorithms.sft.config import SFTConfig
from nemo_like.config.run import CheckpointConfig
from nemo_like.errors import RunError, UserError
from nemo_like.run.checkpoint import Checkpoints, DriverState, Saves


def save(checkpoints, step, metric=None, metric_name="validation/reward"):
    def write_models(folder):
        (folder / "policy").mkdir()
        (folder / "policy" / "shard.bin").write_bytes(bytes(range(256)) * step)

    state = DriverState(
        step=step,
        loader={"position": step},
        metric=metric,
        totals={"wall_s": 1.0},
        weight_versions={"policy": step},
        metric_name=metric_name,
    )
    return checkpoints.save(state, write_models)


def make(tmp_path, **config):
    return Checkpoints(tmp_path, CheckpointConfig(**config))


def test_the_latest_is_the_greatest_complete_number(tmp_path, caplog):
    checkpoints = make(tmp_path, keep_last=5)
    assert checkpoints.latest() is None
    save(checkpoints, 2)
    save(checkpoints, 10)
    (checkpoints.folder / "writing_step_12").mkdir()
    (checkpoints.folder / "step_012").mkdir()  # no name that a run gives
    (checkpoints.folder / "interesting_step_1").mkdir()
    path, state = checkpoints.resume()
    assert path.name == "step_10"
    assert state.loader == {"position": 10}
    assert "writing_step_12 was not finished when the run ended, and was removed" in caplog.text
    left = {path.name for path in checkpoints.folder.iterdir()}
    assert left == {"step_2", "step_10", "step_012", "interesting_step_1"}


@pytest.mark.parametrize(
    ("metrics", "kept"),
    [
        ([0.5, 0.7, 0.6, 0.4], {2, 4}),
        ([0.5, 0.7, 0.7, 0.4], {3, 4}),  # of equal ones the latest is best
        ([None, 0.1, None, None], {2, 4}),  # one without a metric is not better than any
        ([0.9, float("nan"), 0.2, 0.1], {1, 4}),
        ([None, None, None, None], {4}),
    ],
)
def test_the_last_and_the_best_are_kept(tmp_path, metrics, kept):
    checkpoints = make(tmp_path, keep_last=1)
    for step, metric in enumerate(metrics, start=1):
        save(checkpoints, step, metric)
    assert set(checkpoints.steps()) == kept


def test_of_losses_the_least_is_best(tmp_path):
    config = SFTConfig(checkpoint=CheckpointConfig(keep_last=1))
    saves, loader = Saves(config, tmp_path, 0.0), SimpleNamespace(state=dict)
    for step, loss in enumerate((3.0, 1.0, 2.0), start=1):
        saves.save(step, {}, loader, {"validation/loss": loss}, {}, None)  # pyright: ignore
    assert saves.checkpoints.steps() == [2, 3]


def test_values_of_another_metric_are_not_compared(tmp_path):
    """A run may go on with another ``checkpoint.metric``."""
    checkpoints = make(tmp_path, keep_last=1)
    save(checkpoints, 1, 0.9)
    for step, loss in enumerate((0.3, 0.2, 0.4), start=2):
        save(checkpoints, step, -loss, "-train/loss")
    assert checkpoints.steps() == [3, 4]


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "manifest"])
def test_a_damaged_file_is_named_and_nothing_is_loaded(tmp_path, damage):
    checkpoints = make(tmp_path)
    path = save(checkpoints, 3)
    shard = path / "policy" / "shard.bin"
    data = bytearray(shard.read_bytes())
    if damage == "truncate":
        shard.write_bytes(data[:-1])
    elif damage == "flip":
        data[100] ^= 1
        shard.write_bytes(data)
    elif damage == "remove":
        shard.unlink()
    else:
        (path / "files.json").write_text("{")
    with pytest.raises(UserError, match=r"step_3 is damaged: .*Remove .*step_3 to continue"):
        checkpoints.latest()


def test_damage_anywhere_in_a_file_of_several_chunks_is_found(tmp_path):
    """Files are read 16 MiB at a time."""
    checkpoints = make(tmp_path)
    whole = bytes(1 << 24) + b"the second chunk"

    def write_models(folder):
        (folder / "policy").mkdir()
        (folder / "policy" / "shard.bin").write_bytes(whole)

    state = DriverState(step=1, loader={}, metric=None, totals={}, weight_versions={})
    path = checkpoints.save(state, write_models)
    files = json.loads((path / "files.json").read_text())
    assert files["policy/shard.bin"] == [len(whole), zlib.crc32(whole)]
    with (path / "policy" / "shard.bin").open("r+b") as shard:
        shard.seek(5)
        shard.write(b"x")
    with pytest.raises(UserError, match=r"step_1 is damaged: policy/shard\.bin has changed"):
        checkpoints.latest()


@pytest.mark.parametrize(
    "manifest",
    [
        *("[]", "null", "{}", '{"driver.json": 5}', '{"a": [1, 2, 3]}'),
        pytest.param("[" * 200_000, id="deep"),
        '{"driver.json": [Infinity, 1]}',
    ],
)
def test_a_list_of_files_that_lists_none_is_damage(tmp_path, manifest):
    checkpoints = make(tmp_path)
    (save(checkpoints, 3) / "files.json").write_text(manifest)
    with pytest.raises(UserError, match=r"step_3 is damaged: files\.json: .*Remove .*step_3 to"):
        checkpoints.latest()


def rewrite_state(path, text):
    """Another ``driver.json``, which the list of files agrees with."""
    (path / "driver.json").write_text(text)
    files = json.loads((path / "files.json").read_text())
    data = text.encode()
    files["driver.json"] = [len(data), zlib.crc32(data)]
    (path / "files.json").write_text(json.dumps(files))


def test_a_listed_name_that_no_file_can_have_is_damage(tmp_path):
    checkpoints = make(tmp_path)
    path = save(checkpoints, 3)
    listed = json.loads((path / "files.json").read_text()) | {"a" * 5000: [1, 2]}
    (path / "files.json").write_text(json.dumps(listed))
    with pytest.raises(UserError, match=r"step_3 is damaged: a{200} is missing"):
        checkpoints.latest()


def test_a_state_with_other_fields_is_of_another_version(tmp_path):
    checkpoints = make(tmp_path)
    path = save(checkpoints, 3)
    rewrite_state(path, (path / "driver.json").read_text().replace('"totals"', '"sums"'))
    with pytest.raises(UserError, match=r"step_3 is not one of this version: driver\.json: .*sums"):
        checkpoints.latest()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("step", value) for value in (None, "3", -1, 1.5, True)),
        ("loader", None),
        ("metric", "0.5"),
        ("totals", None),
        ("totals", {"wall_s": "1"}),
        ("weight_versions", ["policy"]),
        ("weight_versions", {"policy": "3"}),
        ("metric_name", 5),
        ("unlogged", [1]),
    ],
)
def test_a_state_with_a_value_of_another_kind_is_refused_by_its_name(tmp_path, name, value):
    checkpoints = make(tmp_path)
    path = save(checkpoints, 3)
    rewrite_state(path, json.dumps(json.loads((path / "driver.json").read_text()) | {name: value}))
    with pytest.raises(UserError, match=rf"not one of this version: driver\.json: {name} is "):
        checkpoints.latest()


def test_a_state_that_is_nested_too_deep_is_refused(tmp_path):
    checkpoints = make(tmp_path)
    rewrite_state(save(checkpoints, 3), "[" * 200_000)
    with pytest.raises(UserError, match=r"not one of this version: driver\.json: maximum"):
        checkpoints.latest()


def test_an_old_checkpoint_that_was_damaged_does_not_end_the_run(tmp_path, caplog):
    checkpoints = make(tmp_path, keep_last=1)
    (save(checkpoints, 1, metric=0.9) / "driver.json").write_text("")
    save(checkpoints, 2, metric=0.5)
    assert checkpoints.steps() == [2]
    assert "It counts as one without a metric" in caplog.text


@pytest.mark.parametrize("error", [OSError(28, "No space left"), RunError("No space left.")])
def test_a_failed_write_leaves_earlier_checkpoints_and_no_new_one(tmp_path, error):
    checkpoints = make(tmp_path)
    save(checkpoints, 1)

    def full_disk(folder):
        (folder / "policy").mkdir()
        (folder / "policy" / "shard.bin").write_bytes(b"half")
        raise error

    state = DriverState(step=2, loader={}, metric=None, totals={}, weight_versions={})
    with pytest.raises(
        RunError, match=r"step_2 could not be written \(.* GiB are free .*No space.*; make room"
    ):
        checkpoints.save(state, full_disk)
    # What was written would fill the disk of the run that goes on.
    assert [path.name for path in checkpoints.folder.iterdir()] == ["step_1"]
    assert checkpoints.latest()[1].step == 1


def test_a_step_that_is_saved_twice_is_the_one_that_was_saved_last(tmp_path):
    checkpoints = make(tmp_path)
    save(checkpoints, 3, metric=0.1)
    (checkpoints.folder / "step_3" / "of_the_first").touch()
    path = save(checkpoints, 3, metric=0.2)
    assert checkpoints.latest()[1].metric == 0.2
    assert not (path / "of_the_first").exists()
    assert [each.name for each in checkpoints.folder.iterdir()] == ["step_3"]


def test_state_survives_json_exactly(tmp_path):
    checkpoints = make(tmp_path)
    path = save(checkpoints, 1, metric=0.1 + 0.2)
    assert json.loads((path / "driver.json").read_text())["metric"] == 0.1 + 0.2


def test_a_removal_that_was_cut_short_does_not_stop_later_saves(tmp_path, caplog):
    checkpoints = make(tmp_path, keep_last=1)
    save(checkpoints, 1)
    half_deleted = checkpoints.folder / "deleting_step_1"
    (checkpoints.folder / "step_1").rename(half_deleted)
    (half_deleted / "driver.json").unlink()
    save(checkpoints, 2)
    save(checkpoints, 3)
    assert checkpoints.resume()[1].step == 3
    assert "deleting_step_1 was not finished" in caplog.text
    assert not half_deleted.exists()
