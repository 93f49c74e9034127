"""Training from what an earlier run sampled."""

import asyncio
import os
from dataclasses import replace
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nemo_like.compose.load import compose_config
from nemo_like.errors import RunError, UserError
from nemo_like.generation.protocol import (
    EngineConfig,
    FinishReason,
    GenerationRequest,
    SamplingParams,
)
from nemo_like.generation.replay import ReplayEngine
from nemo_like.observe.trajectory_files import Resumed, TrajectoryFiles
from tests.small_runs import ROOT, records, run
from tests.test_trajectory_files import keep, one, table


def engine_of(folder):
    config = EngineConfig(
        model_path="", dtype="float32", seed=0, max_model_len=99, engine_kwargs={"folder": folder}
    )
    engine = ReplayEngine(config)
    engine._receiver = SimpleNamespace(tensors=lambda version, adapters_only: ())

    async def started():
        await engine.start()
        await engine.load_weights(5)

    asyncio.run(started())
    return engine


def asked(engine, request_id, prompt=(7, 8)):
    request = GenerationRequest(
        request_id=request_id,
        prompt_ids=list(prompt),
        sampling=SamplingParams(max_new_tokens=16),
        seed=0,
    )
    return asyncio.run(engine.generate(request))


def test_each_request_gets_its_recorded_tokens_whatever_the_step_in_which_it_comes(tmp_path):
    files = TrajectoryFiles(tmp_path / "trajectories", 0, 1 << 20)
    keep(files, table(1, one(group=3, index=1, ids=(4, 5))), table(2, one(group=4, ids=(9,))))
    keep(files, table(2, one(group=3, index=1, ids=(6,)), phase="validation"))
    keep(files, table(3, replace(one(group=6), end="length")))
    keep(files, table(4, one(group=3, index=1, ids=(8,)), phase="validation"))
    engine = engine_of(str(tmp_path))
    found = asked(engine, "train-8-3-1")
    assert (found.token_ids, found.logprobs) == ([4, 5], [-0.5, -0.5])
    assert (found.finish_reason, found.weight_version) == (FinishReason.stop, 5)
    assert asked(engine, "train-1-4-0").token_ids == [9]
    for step, token in ((2, 6), (4, 8)):
        assert asked(engine, f"validation-{step}-3-1").token_ids == [token]
    assert asked(engine, "train-1-6-0").finish_reason is FinishReason.length
    for request_id, prompt in (("train-1-5-0", (7, 8)), ("train-1-4-0", (7, 9))):
        with pytest.raises(RunError, match=r"No single-turn completion \d of group \d is recorded"):
            asked(engine, request_id, prompt)


def test_each_part_of_each_workers_file_is_read_once_however_steps_alternate_between_them(tmp_path):
    """Three steps of six workers with a file each: a part is one step's, and groups take turns."""
    folder = tmp_path / "trajectories"
    folder.mkdir()
    for worker in range(6):
        groups = [6 * step + worker for step in range(3)]
        given = [one(group=n, index=i, ids=(n, i)) for n in groups for i in range(2)]
        name = f"00000000-{worker:04d}-0000000-0000000.parquet"
        pq.write_table(table(1, *given), folder / name, row_group_size=2)
    engine = engine_of(str(tmp_path))
    for step in range(3):
        for index in range(2):
            for group in range(6 * step, 6 * step + 6):
                found = asked(engine, f"train-{step}-{group}-{index}")
                assert found.token_ids == [group, index]
    assert engine._rows_of.cache_info().misses == 18


def test_conversations_are_refused():
    """Their later turns are not recorded as requests."""
    words = ["generation.backend=replay", "generation.engine_kwargs={folder: /recorded}"]
    with pytest.raises(UserError, match="backend=replay gives single completions alone"):
        compose_config(ROOT / "configs", "grpo", [*words, "environment.name=guess"])


def test_a_folder_without_trajectories_is_refused(tmp_path):
    with pytest.raises(UserError, match="has no trajectories; set generation"):
        engine_of(str(tmp_path))


def damaged(path, how):
    table = pq.read_table(path)
    if how == "cut":
        os.truncate(path, 300)
    elif how == "column":
        pq.write_table(table.drop(["generation_logprobs"]), path)
    elif how == "pipe":
        path.unlink()
        os.mkfifo(path)
    else:
        rows = table.to_pylist()
        rows[0]["generation_logprobs"].pop()
        pq.write_table(pa.Table.from_pylist(rows, table.schema), path)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("cut", r"parquet in trajectories is damaged \(.*copy the run again"),
        ("column", "damaged .it has no column generation_logprobs"),
        ("pipe", "is a pipe, not a file; put"),
        ("row", "has 2 tokens and 1 logprobs in the recorded run"),
    ],
)
def test_a_damaged_recording_is_refused_in_one_sentence(tmp_path, how, message):
    keep(
        TrajectoryFiles(tmp_path / "trajectories", 0, 1 << 20),
        table(1, one(group=3, index=1, ids=(4, 5))),
    )
    (file,) = (tmp_path / "trajectories").glob("*.parquet")
    damaged(file, how)
    with pytest.raises((UserError, RunError), match=message):
        asked(engine_of(str(tmp_path)), "train-1-3-1")


def test_other_files_in_the_folder_are_the_users_and_are_left_alone(tmp_path):
    folder = tmp_path / "trajectories"
    files = TrajectoryFiles(folder, 0, 1 << 20)
    keep(files, table(1, one(group=3, ids=(4, 5))))
    pq.write_table(table(1, one(group=9)), folder / "mine.parquet")
    assert asked(engine_of(str(tmp_path)), "train-1-3-0").token_ids == [4, 5]
    files.truncate_after(Resumed(step=0, validated=0, first_open=0))
    assert [path.name for path in folder.glob("*.parquet")] == ["mine.parquet"]


@pytest.mark.usefixtures("local_ray")
def test_a_replayed_run_has_the_numbers_of_the_recorded_one(tmp_path, straight):
    options = ["grpo.max_steps=4", "validation.every_steps=2", "mismatch.max_mean_abs=1e-12"]
    folder = f"generation.engine_kwargs={{folder: {straight}}}"
    found = run(tmp_path, *options, "generation.backend=replay", folder)
    expected = records(straight)
    for step in (1, 2, 3):
        for name in ("train/loss", "train/grad_norm", "rollout/reward", "mismatch/mean_abs"):
            assert found[step][name] == expected[step][name], (step, name)
