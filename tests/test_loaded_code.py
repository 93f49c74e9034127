"""Nothing that is loaded runs code: checkpoints of others, and every loader in the package."""

import ast
import grp
import io
import json
import os
import pickle
import pwd
import re
import shutil
import stat
from pathlib import Path

import pytest
import torch

import nemo_like
from nemo_like.compose.load import compose_config
from nemo_like.errors import UserError
from nemo_like.run.continued import is_private, open_checkpoint, others_who_write
from tests import loaded_code
from tests.engine_cases import CASES
from tests.small_runs import ROOT, run, run_config

PACKAGE = Path(nemo_like.__file__).parent


# Checkpoints


@pytest.fixture(scope="module")
def checkpoint(pool, four_layers, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "policy"
    pool.run(2, f"{CASES}:save_then_go_on", four_layers(), {}, str(folder))
    return folder


def test_these_tests_could_fail(tmp_path):
    """Their files do run code where pickles are trusted."""
    loaded_code.with_pickled_index(tmp_path, tmp_path / "first")
    pickle.loads((tmp_path / ".metadata").read_bytes())
    torch.load(io.BytesIO(loaded_code.saved(tmp_path / "second")), weights_only=False)
    assert {"first", "second"} < {path.name for path in tmp_path.iterdir()}


def test_a_checkpoint_has_no_pickle_but_torchs_tensors(checkpoint):
    files = sorted(path.name for path in checkpoint.iterdir())
    assert files == ["__0_0.distcp", "__1_0.distcp", "index.json"]
    index = json.loads((checkpoint / "index.json").read_text())
    assert {"num_steps", "schedule_step", "loss_scale/factor"} <= index["values"].keys()
    for place in index["values"].values():
        data = (checkpoint / place["file"]).read_bytes()[place["start"] :][: place["length"]]
        json.loads(data)


@pytest.mark.parametrize("attack", loaded_code.ATTACKS, ids=lambda one: one.__name__)
def test_code_in_a_checkpoint_does_not_run_when_a_run_goes_on(
    attack, checkpoint, pool, four_layers, tmp_path
):
    folder, marker = shutil.copytree(checkpoint, tmp_path / "policy"), tmp_path / "marker"
    file = attack(folder, marker)
    for said in pool.run(2, f"{CASES}:refusal", four_layers(), {}, str(folder)):
        assert said.startswith(f"Checkpoint file {file} "), said
        assert "\n" not in said
        assert "weights_only" not in said
    assert not marker.exists()


@pytest.mark.parametrize("attack", loaded_code.OF_WEIGHTS, ids=lambda one: one.__name__)
def test_code_in_a_checkpoint_does_not_run_when_its_weights_are_loaded(
    attack, checkpoint, pool, four_layers, tmp_path
):
    folder, marker = shutil.copytree(checkpoint, tmp_path / "policy"), tmp_path / "marker"
    file = attack(folder, marker)
    (said,) = pool.run(1, f"{CASES}:refusal", four_layers(), {}, str(folder), True)
    assert said.startswith(f"Checkpoint file {file} "), said
    assert not marker.exists()


def test_a_pickle_beside_what_is_loaded_is_not_read(checkpoint, pool, four_layers, tmp_path):
    """Weights alone are wanted here, and only the optimizer's are pickles."""
    folder, marker = shutil.copytree(checkpoint, tmp_path / "policy"), tmp_path / "marker"
    for attack in (loaded_code.with_pickled_value, loaded_code.with_pickled_moments):
        attack(folder, marker)
    assert pool.run(1, f"{CASES}:refusal", four_layers(), {}, str(folder), True) == [""]
    assert not marker.exists()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("format",), 2),
        (("format",), None),
        (("values",), []),
        (("values", "num_steps", "file"), "/etc/passwd"),
        (("values", "num_steps", "start"), -1),
        (("values", "num_steps", "length"), "8"),
        (("tensors", 0, "dtype"), "load"),
        (("tensors", 0, "dtype"), "nn"),
        (("tensors", 0, "chunks", 0, "file"), ".."),
        (("tensors", 0, "shape"), [True, 1.0]),
        (("tensors", 0, "chunks"), []),
        (("tensors", 0, "chunks", 0, "shape"), [1]),
    ],
)
def test_a_list_of_tensors_that_is_not_ours_is_refused(
    path, value, checkpoint, pool, four_layers, tmp_path
):
    folder = shutil.copytree(checkpoint, tmp_path / "policy")
    index = part = json.loads((folder / "index.json").read_text())
    for key in path[:-1]:
        part = part[key if key in part or not isinstance(part, dict) else next(iter(part))]
    part[path[-1]] = value
    (folder / "index.json").write_text(json.dumps(index))
    (said,) = pool.run(1, f"{CASES}:refusal", four_layers(), {}, str(folder))
    assert said.startswith(f"Checkpoint file {folder / 'index.json'} does not hold what this"), said


def attacked(straight, target, attack):
    """A copy of a run whose checkpoint has code in it, and checksums that fit."""
    shutil.copytree(straight, target)
    checkpoint = target / "checkpoints" / "step_6"
    file = attack(checkpoint / "policy", target.parent / "marker")
    loaded_code.renew_checksums(checkpoint)
    open_checkpoint(checkpoint)
    return checkpoint, file


@pytest.mark.parametrize("attack", [loaded_code.with_pickled_index, loaded_code.with_pickled_value])
def test_a_run_does_not_go_on_from_a_checkpoint_with_code(attack, straight, tmp_path, local_ray):
    _, file = attacked(straight, tmp_path / "run", attack)
    with pytest.raises(UserError) as refused:
        run(tmp_path / "run", "run.resume=true", "grpo.max_steps=7", "validation.every_steps=2")
    assert f"Checkpoint file {file} " in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "marker").exists()


def test_an_evaluation_does_not_run_the_code_of_another_runs_checkpoint(
    straight, tmp_path, local_ray
):
    checkpoint, file = attacked(straight, tmp_path / "run", loaded_code.with_pickled_weights)
    overrides = ("generation.backend=hf", "data.num_validation_rows=4", f"run.dir={tmp_path}/eval")
    config = compose_config(ROOT / "configs", "eval", [f"policy.model={checkpoint}", *overrides])
    with pytest.raises(UserError, match=re.escape(f"Checkpoint file {file} ")):
        run_config(config)
    assert not (tmp_path / "marker").exists()


def test_model_folders_with_pickled_weights_do_not_run_them(pool, four_layers, tmp_path):
    folder, marker = shutil.copytree(four_layers(), tmp_path / "model"), tmp_path / "marker"
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(loaded_code.saved(marker))
    (said,) = pool.run(1, f"{CASES}:refusal", str(folder), {})
    assert said.startswith(f"The weights of the model {folder} cannot be loaded: ")
    assert not marker.exists()


ME, OTHER = 1000, 1001


@pytest.mark.parametrize(
    ("mode", "owner", "expected"),
    [
        (0o40755, ME, None),
        (0o40755, 0, None),  # root could anyway
        (0o100600, OTHER, "its owner, user 1001"),
        (0o40775, ME, "its group"),
        (0o40777, ME, "everyone"),
        (0o40777, OTHER, "its owner, user 1001"),
        (0o40757, 0, "everyone"),
    ],
)
def test_who_else_may_write_to_a_checkpoint(mode, owner, expected):
    assert others_who_write(mode, owner, ME, private=False) == expected
    if expected == "its group":
        assert others_who_write(mode, owner, ME, private=True) is None
    else:
        assert others_who_write(mode, owner, ME, private=True) == expected


@pytest.mark.parametrize(
    ("name", "gid", "members", "expected"),
    [
        ("ann", ME, [], True),
        ("ann", ME, ["ann"], True),
        ("ann", ME, ["ann", "bob"], False),
        ("users", ME, [], False),  # others may have it for their first group
        ("ann", 2000, [], False),
    ],
)
def test_a_group_of_one_user_is_told_from_a_shared_one(name, gid, members, expected):
    user = pwd.struct_passwd(("ann", "x", ME, ME, "", "/home/ann", "/bin/sh"))
    assert is_private(grp.struct_group((name, "x", gid, members)), user) == expected


def test_a_checkpoint_that_others_can_write_is_warned_of_once(straight, tmp_path, caplog):
    checkpoint = shutil.copytree(straight / "checkpoints" / "step_6", tmp_path / "step_6")
    for path in (checkpoint, *checkpoint.rglob("*")):
        path.chmod(path.stat().st_mode & ~(stat.S_IWGRP | stat.S_IWOTH))
    open_checkpoint(checkpoint)
    assert "can be written by" not in caplog.text
    for name in ("driver.json", "policy/index.json"):
        (checkpoint / name).chmod(0o664)
    open_checkpoint(checkpoint)
    private = is_private(grp.getgrgid(os.getegid()), pwd.getpwuid(os.geteuid()))
    assert ("can be written by its group" in caplog.text) != private
    caplog.clear()
    for name in ("driver.json", "policy/index.json"):
        (checkpoint / name).chmod(0o666)
    open_checkpoint(checkpoint)
    assert caplog.text.count("can be written by everyone") == 1
    assert f"{checkpoint}/driver.json can be written by everyone" in caplog.text


# Every loader

RUNS_CODE = re.compile(
    r"(.*\.)?(c?pickle|dill|cloudpickle|marshal|shelve|joblib|jsonpickle)\.(loads?|Unpickler|open)"
    r"|torch\.(load|jit\.load|hub\.load|package\..*)|.*\.read_pickle|numpy\.(load|lib\..*load)"
    r"|yaml\.(load|load_all|full_load\w*|unsafe_load\w*)"
    r"|torch\.distributed\.checkpoint\..*\bload\w*|multiprocessing\.connection\.\w+"
    r"|(builtins\.)?(eval|exec)|runpy\..*|.*\.exec_module"
)
OUR_PROCESSES = "what our own process sent over a channel that no other user can open"
ALLOWED = {
    ("doors.py", "spec.loader.exec_module"): "the file that the user named as code",
    ("rewards/code/harness.py", "exec"): "the program of a completion, inside the sandbox",
    ("generation/vllm/processes.py", "cloudpickle.loads"): OUR_PROCESSES,
    ("generation/vllm/worker.py", "pickle.loads"): OUR_PROCESSES,
    ("policy/state/checkpoint_files.py", f"{loaded_code.DCP}.state_dict_loader.load"): (
        "with a reader and a planner of ours, which unpickle nothing"
    ),
    ("policy/state/files.py", f"{loaded_code.DCP}.state_dict_loader.load"): "safetensors alone",
    ("refit/ipc.py", "multiprocessing.connection.Listener"): "a key that only our processes have",
    ("refit/ipc.py", "multiprocessing.connection.Client"): "a key that only our processes have",
}


def calls(path):
    """Dotted names of what a module calls, with imports spelt out."""
    tree = ast.parse(path.read_text())
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {(one.asname or one.name): one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {(one.asname or one.name): f"{node.module}.{one.name}" for one in node.names}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Call, ast.ClassDef)):
            parts = [node.func] if isinstance(node, ast.Call) else node.bases
            for part in parts:
                first, dot, rest = ast.unparse(part).partition(".")
                yield names.get(first, first) + dot + rest, node


def test_every_loader_of_the_package_is_safe_or_listed_with_a_reason():
    found = {
        (str(path.relative_to(PACKAGE)), name)
        for path in sorted(PACKAGE.rglob("*.py"))
        for name, _ in calls(path)
        if RUNS_CODE.fullmatch(name)
    }
    assert found == ALLOWED.keys(), found ^ ALLOWED.keys()


@pytest.mark.parametrize(
    "line",
    [
        "import pickle\npickle.load(file)",
        "from pickle import loads as read\nread(data)",
        "import pickle\nclass Mine(pickle.Unpickler): pass",
        "import torch\ntorch.load(path, weights_only=False)",
        "import numpy as np\nnp.load(path, allow_pickle=True)",
        "import yaml\nyaml.load(text, yaml.Loader)",
        "import torch.distributed.checkpoint as dcp\ndcp.load(state)",
        "import ray.cloudpickle\nray.cloudpickle.loads(data)",
        "from multiprocessing.connection import Client\nClient(address)",
    ],
)
def test_the_search_finds_loaders_under_any_name(line, tmp_path):
    (tmp_path / "one.py").write_text(line)
    assert any(RUNS_CODE.fullmatch(name) for name, _ in calls(tmp_path / "one.py"))
