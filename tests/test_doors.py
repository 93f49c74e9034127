"""What users add from outside the package: these tests touch no file of it."""

import json
import os
import subprocess
import sys

import pytest
import torch

import nemo_like as nl
from nemo_like.algorithms.grpo.config import GRPOConfig
from nemo_like.algorithms.session import launch
from nemo_like.compose import registry
from nemo_like.compose.load import compose_config
from nemo_like.config.losses import LossConfig
from nemo_like.doors import Door
from nemo_like.errors import UserError
from tests.small_runs import ROOT, SMALL, records, run

RAFT = ROOT / "examples/custom_algorithm/raft.py"
SPO = ROOT / "examples/custom_loss/spo.py"
OUTSIDE = """
import json
from pathlib import Path

import torch

from nemo_like.config.generation import EngineKind
from nemo_like.generation.hf_engine import HFEngine

HERE = Path(__file__).parent


def advantage(rewards, groups, valid, config):
    return torch.full((len(rewards),), 3.0)


def objective(ratio, logprobs, advantages, config):
    return advantages + 0 * logprobs, advantages > 0


class Engine(HFEngine):
    async def generate(self, request):
        completion = await super().generate(request)
        with (HERE / "engine.jsonl").open("a") as file:
            file.write(json.dumps(completion.token_ids) + "\\n")
        return completion


KIND = EngineKind(engine=Engine, transports=("broadcast",))


class Sink:
    def __init__(self, folder, config, last_step):
        self.path = folder / "sink.jsonl"
        self.start = [config.grpo.max_steps, last_step]

    def log(self, step, values):
        with self.path.open("a") as file:
            file.write(json.dumps([step, values["train/loss"], *self.start]) + "\\n")

    def close(self):
        pass
"""


@pytest.fixture
def outside(tmp_path):
    path = tmp_path / "outside.py"
    path.write_text(OUTSIDE)
    return path


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_loss_advantage_engine_and_logger_come_from_one_file_of_the_user(
    local_ray, outside, tmp_path
):
    found = run(
        tmp_path / "run",
        f"loss.objective={outside}:objective",
        f"advantage.function={outside}:advantage",
        f"generation.backend={outside}:KIND",
        f"logging.sinks=[{outside}:Sink]",
        "refit.transport=broadcast",
        "loss.importance=none",
        "grpo.max_steps=2",
        "validation.every_steps=0",
    )
    assert [found[step]["train/loss"] for step in (1, 2)] == [3.0, 3.0]
    assert lines(tmp_path / "run/sink.jsonl") == [[1, 3.0, 2, None], [2, 3.0, 2, None]]
    assert len(lines(tmp_path / "engine.jsonl")) == 2 * 4 * 4


def test_the_example_of_a_loss_has_no_gradient_at_the_end_of_its_range():
    ratio = torch.tensor([1.0, 1.2, 1.4, 0.8], requires_grad=True)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    objective = Door("nemo_like.none").load("some.key", f"{SPO}:objective")
    terms, left = objective(ratio, ratio.log(), advantages, LossConfig(clip_high=0.2))
    assert terms.tolist() == pytest.approx([-1.0, -1.1, 1.8, 0.9])
    assert left[[0, 2]].tolist() == [False, True]  # the others are at its ends
    terms.sum().backward()
    assert ratio.grad.tolist() == pytest.approx([-1.0, 0.0, 3.0, 0.0], abs=1e-6)


def test_the_example_of_a_loss_trains(local_ray, tmp_path):
    found = run(
        tmp_path,
        f"loss.objective={SPO}:objective",
        "grpo.max_steps=1",
        "grpo.num_epochs_per_batch=3",
        "validation.every_steps=0",
    )
    assert found[1]["train/max_log_ratio"] > 1e-4
    assert 0 <= found[1]["train/clip_share"] < 1


def test_the_example_of_an_algorithm_trains_on_the_best_completions(local_ray, tmp_path):
    algorithm = registry.find(f"{RAFT}:ALGORITHM")
    registry.register(algorithm)
    small = [one.replace("grpo.", "raft.") for one in SMALL]
    keys = ["generation.backend=hf", "raft.max_steps=2", "raft.num_kept=1"]
    config = compose_config(
        ROOT / "configs", "raft", [*small, *keys, f"run.dir={tmp_path / 'run'}"]
    )
    launch(algorithm, config)
    found = records(tmp_path / "run")
    for step in (1, 2):
        assert found[step]["train/num_tokens"] <= 4 * config.generation.max_new_tokens
        assert found[step]["mismatch/mean_abs"] < 1e-3
    assert (tmp_path / "run/final/config.json").exists()


def test_a_configuration_of_no_known_algorithm_is_one_sentence():
    class Mine(GRPOConfig):
        pass

    with pytest.raises(UserError, match="Mine is the configuration of no algorithm that is known"):
        nl.train(Mine())


def typed(*arguments, **env):
    command = [sys.executable, "-c", "from nemo_like.cli import main; main()", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | env)
    return done.returncode, done.stdout + done.stderr


def test_the_keys_of_a_script_are_in_its_help_and_are_checked():
    done = subprocess.run(
        [sys.executable, RAFT, "--help"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert "raft.num_kept=2" in done.stdout
    code, said = typed(f"{RAFT}:ALGORITHM", "raft.num_keep=3")
    assert (code, "did you mean raft.num_kept" in said) == (2, True)
    code, said = typed(f"{RAFT}:ALGORITHM", "raft.num_kept=8")
    assert (code, "num_kept=8 must be below" in said) == (2, True)


def test_an_installed_package_adds_a_command_and_an_engine(outside, tmp_path):
    (tmp_path / "raft.py").write_text(RAFT.read_text())
    folder = tmp_path / "outside-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(
        "[nemo_like.algorithms]\nraft = raft:ALGORITHM\n"
        "[nemo_like.engines]\nshouting = outside:KIND\n"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    code, said = typed("raft", "generation.backend=shouting", "--cfg", "job", PYTHONPATH=path)
    assert code == 0, said
    assert "num_kept: 2" in said
    code, said = typed("raft", "generation.backend=shoutin", PYTHONPATH=path)
    assert (code, "did you mean shouting?" in said) == (2, True)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "refit.transport=ipc, which fits the bundles, does not reach an engine"),
        (["cluster.gpus_per_node=2"], "; set GPUs apart .* with cluster.num_generation_workers"),
        (["refit.transport=broadcast", "generation.tensor_parallel_size=2"], "does not have it"),
        (["refit.transport=broadcast", "generation.engine_kwargs={a: 1}"], "does not have it"),
        (
            ["refit.transport=broadcast", "policy.lora.rank=4", "policy.lora.refit=adapters"],
            r"rank=4 is more than .*KIND computes with \(at most 0\)",
        ),
    ],
)
def test_what_an_engine_cannot_do_is_refused_by_what_it_says(outside, overrides, message):
    with pytest.raises(UserError, match=message):
        compose_config(ROOT / "configs", "grpo", [f"generation.backend={outside}:KIND", *overrides])


def test_what_a_refused_transport_says_to_set_is_accepted(outside):
    (outside.parent / "mapped.py").write_text(
        "from dataclasses import replace\nfrom outside import KIND\n"
        "KIND = replace(KIND, transports=('ipc',))\n"
    )
    kinds = {"broadcast": outside, "ipc": outside.parent / "mapped.py"}
    for takes, given, told, remedy in (
        ("broadcast", [], "set it to broadcast", "refit.transport=broadcast"),
        ("ipc", ["refit.transport=broadcast"], "set it to ipc", "refit.transport=ipc"),
        (
            *("broadcast", ["cluster.gpus_per_node=2"], "cluster.num_generation_workers"),
            "cluster.num_generation_workers=1",
        ),
        (
            *("ipc", ["cluster.cpu_workers_per_node=2", "cluster.num_generation_workers=1"]),
            *("set cluster.num_generation_workers=null", "cluster.num_generation_workers=null"),
        ),
    ):
        words = [f"generation.backend={kinds[takes]}:KIND", *given]
        with pytest.raises(UserError, match=f"{told}\\.$"):
            compose_config(ROOT / "configs", "grpo", words)
        key = remedy.partition("=")[0]
        words = [one for one in words if not one.startswith(key)]
        compose_config(ROOT / "configs", "grpo", [*words, remedy])


def test_what_cannot_be_loaded_is_refused_in_one_sentence(outside):
    door = Door("nemo_like.none", {"ours": "json:loads"})
    for spec, reason in {
        "our": "did you mean ours?",
        f"{outside}:objectiv": "did you mean objective?",
        f"{outside}:HERE": "is a PosixPath, not a function",
        "json.load_": "has no 'load_'; did you mean load",
        "absent_module:f": "no module absent_module",
    }.items():
        with pytest.raises(UserError, match=f"^some.key={spec}") as caught:
            door.load("some.key", spec)
        assert reason in str(caught.value), spec
    assert door.load("some.key", "ours") is json.loads is door.load("some.key", "json:loads")


def test_a_file_that_has_changed_is_read_again(tmp_path):
    door, path = Door("nemo_like.none"), tmp_path / "changing.py"
    for number in (1, 2):
        path.write_text(f"def f():\n    return {number}\n")
        os.utime(path, ns=(number, number))
        first, second = (door.load("some.key", f"{path}:f") for _ in range(2))
        assert first() == number
        assert first is second
