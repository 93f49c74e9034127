"""Pipes, sockets and devices in the place of files are refused; nobody opens them.

None is listed or needed where it stands, so that reading on would succeed.
"""

import errno
import json
import os
import shutil
import socket
from pathlib import Path

import pytest

import nemo_like as nl
from nemo_like.cli import main
from nemo_like.compose.load import compose_config
from nemo_like.config.data import PromptsConfig
from nemo_like.config.policy import PolicyConfig
from nemo_like.config.run import CheckpointConfig, RunSection
from nemo_like.data.datasets import load_rows
from nemo_like.errors import UserError
from nemo_like.planning.placement import check_model_fits
from nemo_like.run.checkpoint import Checkpoints, DriverState
from tests.small_runs import ROOT

LONG = "x" * 300
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


@pytest.mark.parametrize(
    "typed",
    [
        *(f"{key}={LONG}" for key in ("policy.model", "data.train", "run.dir")),
        f"environment.reward={LONG}.py:f",
    ],
)
def test_a_path_that_no_file_can_have_is_one_sentence(typed):
    told = r"^x+(\.py|/driver\.json)? cannot be read: File name too long; correct the path, or its"
    with pytest.raises(UserError, match=told):
        check("environment.reward=math", typed) if "reward" not in typed else check(typed)


@pytest.mark.parametrize("key", ["policy.model", "data.train", "run.dir", "environment.reward"])
def test_a_folder_without_permission_is_one_sentence(tmp_path, monkeypatch, key):
    path, real = tmp_path / "closed" / "reward.py", Path.stat

    def stat(self, **options):
        if self.is_relative_to(path.parent):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))
        return real(self, **options)

    monkeypatch.setattr(Path, "stat", stat)  # root may read everything
    name = ":f" * (key == "environment.reward")
    with pytest.raises(UserError, match=rf"^{path.parent}.* cannot be read: Permission denied; "):
        check(f"{key}={path}{name}")


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("~nobody_here/x", "A path begins with ~ and a name that no user of this machine has; "),
        ("d1/**.jsonl", r"data\.train=d1/\*\*\.jsonl is not a pattern, since \*\* must stand "),
    ],
)
def test_paths_that_python_does_not_take_are_refused(source, told):
    with pytest.raises(UserError, match=f"^{told}"):
        check(f'data.train="{source}"', "environment.reward=math")


@pytest.mark.parametrize("text", ["{", "{}", '{"splits": []}', '{"splits": 3}', "[]"])
def test_a_broken_list_of_splits_is_one_sentence(tmp_path, text):
    (tmp_path / "dataset_dict.json").write_text(text)
    with pytest.raises(UserError, match=r"dataset_dict\.json (does not list|is not a JSON|cannot)"):
        check(f"data.train={tmp_path}", "environment.reward=math")


def test_a_model_without_heads_is_one_sentence(tmp_path):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 0, "vocab_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    with pytest.raises(UserError, match=r"num_attention_heads=0 must be at least 1; repair it\."):
        check_model_fits(PolicyConfig(), 1, tmp_path)


def test_the_path_of_a_configuration_and_of_a_python_run_is_looked_at_likewise(capsys):
    for words in (["plan", f"{LONG}.yaml"], ["grpo", f"{LONG}.yaml"], ["grpo", "-cn", LONG]):
        with pytest.raises(SystemExit):
            main(words)
        assert "cannot be read: File name too long" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["grpo", "~nobody_here/x.yaml"])
    assert "A path begins with ~ and a name that no user" in capsys.readouterr().err
    with pytest.raises(UserError, match="cannot be read: File name too long"):
        nl.train(nl.GRPOConfig(run=RunSection(dir=LONG)))
