"""Pipes, sockets and devices in the place of files are refused; nobody opens them.

None is listed or needed where it stands, so that reading on would succeed.
"""

import os
import shutil
import socket

import pytest

from nemo_like.compose.load import compose_config
from nemo_like.config.data import PromptsConfig
from nemo_like.config.run import CheckpointConfig
from nemo_like.data.datasets import load_rows
from nemo_like.errors import UserError
from nemo_like.run.checkpoint import Checkpoints, DriverState
from tests.small_runs import ROOT

KINDS = ["a pipe", "a socket", "a device"]


def make_special(path, kind):
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    else:
        with socket.socket(socket.AF_UNIX) as server:
            os.chdir(path.parent)  # A socket's whole path may have 107 bytes.
            server.bind(path.name)


def check(*options):
    compose_config(ROOT / "configs", "grpo", options)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_come_of_regular_files_only(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "rows.jsonl"
    make_special(path, kind)
    told = rf"^data\.train={path} is {kind}, not a file; write its content to a file\.$"
    with pytest.raises(UserError, match=told):
        config = PromptsConfig(train=str(path))
        load_rows(config.train_parts, config, 0, 0)
    with pytest.raises(UserError, match=told):
        check(f"data.train={path}", "environment.reward=math")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["model-2.safetensors", "additional_chat_templates/x.jinja"])
def test_models_have_regular_files_only(tmp_path, tiny_model, monkeypatch, name, kind):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "model"
    shutil.copytree(tiny_model(), folder)
    (folder / name).parent.mkdir(exist_ok=True)
    check(f"policy.model={folder}", "logging.sinks=[]")
    make_special(folder / name, kind)
    told = rf"^policy\.model={folder}: {name} is {kind}, not a file; put a file in its place\.$"
    with pytest.raises(UserError, match=told):
        check(f"policy.model={folder}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["driver.json", "policy/__1_0.distcp"])
def test_checkpoints_have_regular_files_only(tmp_path, monkeypatch, name, kind):
    monkeypatch.chdir(tmp_path)
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    state = DriverState(step=1, loader={}, metric=None, totals={}, weight_versions={})
    folder = checkpoints.save(state, lambda aside: (aside / "policy").mkdir())
    assert checkpoints.latest() == (folder, state)
    (folder / name).unlink(missing_ok=True)
    make_special(folder / name, kind)
    with pytest.raises(UserError, match=rf"^Checkpoint {folder}: {name} is {kind}, not a file; "):
        checkpoints.latest()


def test_a_run_folder_and_a_reward_have_regular_files_only(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_special(tmp_path / "run.log", "a pipe")
    with pytest.raises(UserError, match=rf"^run\.dir={tmp_path}: run\.log is a pipe, not a file; "):
        check(f"run.dir={tmp_path}")
    make_special(tmp_path / "mine.py", "a pipe")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x"}')
    told = (
        "^environment.reward=mine.py:f: mine.py is a pipe, not a file; write its content to a file"
    )
    with pytest.raises(UserError, match=told):
        check("data.train=rows.jsonl", "environment.reward=mine.py:f")
