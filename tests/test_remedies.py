"""What reports and alarms recommend can be pasted into a shell, and the run takes it."""

import ast
import json
import re
import subprocess

import pytest

from nemo_like.cli import main
from nemo_like.compose import registry
from nemo_like.compose.load import compose_config
from nemo_like.config.typed import flat
from nemo_like.observe.alarms import NODES
from nemo_like.run.folder import save_config
from nemo_like.viewer.report import report
from nemo_like.viewer.runs import find_runs
from tests.small_runs import ROOT
from tests.test_alarms import FAULTS, faulty

SETTING = re.compile(
    r"""'(?:[a-z]\w*\.)+\w+=[^']*'(?:"'"'[^']*')*"""  # quoted, also with quotes inside
    r"""|\b(?:[a-z]\w*\.)+\w+=(?:\[[^\s\]]*\]|[^\s,;()[]*[^\s,;().[])"""
)
TIMES = ("step", "time", "time/step_s", "time/train_s", "time/driver_s", "time/checkpoint_s")
SLURM = """cluster.slurm.extra=["--partition=gpu","--comment='a b'"]"""


def typed(text, folder):
    """The settings in ``text`` as bash hands them to a command."""
    words = "".join(f" {one}" for one in SETTING.findall(text))
    shell = ["bash", "-c", f"printf '%s\\0'{words}"]
    folder.mkdir(exist_ok=True)
    done = subprocess.run(shell, check=True, capture_output=True, text=True, cwd=folder)
    return done.stdout.split("\0")[:-1]


def composed(name, *overrides):
    return compose_config(ROOT / "configs", name, overrides)


def run_with(folder, config, fault):
    """A run with that fault, whose validations, checkpoints and driver are slow too."""
    folder.mkdir()
    save_config(folder, config, continued=False)
    (folder / NODES).write_text(json.dumps({"generation-3": "gpu17"}))
    times = {"time/validation_s": 2.0, "time/checkpoint_s": 2.0, "time/driver_s": 1.0}
    rows = [row | times for row in faulty(fault)]
    if not hasattr(config, "generation"):
        rows = [
            {key: one for key, one in row.items() if key in TIMES or key.startswith("train/")}
            | {"train/memory_gib": row["rollout/memory_gib"]}
            for row in rows
        ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in rows))
    return find_runs([str(folder)])[0]


TRAINED = [name for name in registry.names() if name != "eval"]


@pytest.mark.parametrize("name", TRAINED)
def test_settings_that_a_report_recommends_are_pasted_and_taken(name, tmp_path):
    own = {"validation.every_steps": "1", "checkpoint.every_steps": "1", "run.dir": "runs/x"}
    own |= {"teacher.model": "embedded"} if name.endswith("distillation") else {}
    own = {key: f"{key}={value}" for key, value in own.items()} | {"cluster.slurm.extra": SLURM}
    config = composed(name, *own.values())
    faults = [*FAULTS] if name == "grpo" else [*FAULTS][1:]  # the first is GRPO's own
    runs = [run_with(tmp_path / one, config, one) for one in faults]
    found = [line for run in runs for line in [*report([run])][-1][1]]
    settings = {
        one.partition("=")[0]: one for one in typed(" ".join(found), tmp_path / "elsewhere")
    }
    assert settings.keys() >= {"run.resume", "cluster.slurm.extra", "checkpoint.every_steps"}
    now = flat(composed(name, *(own | settings).values()).model_dump(mode="json"))
    same = {key for key in settings if now[key] == runs[0].config[key]}
    assert same <= {"environment.reward"}  # which an alarm only names


def test_an_option_of_slurm_joins_those_that_the_run_has(tmp_path, capsys):
    config = composed("grpo", SLURM)
    for fault, option in (("slow_steps", "--exclusive"), ("straggler", "--exclude=gpu17")):
        run = run_with(tmp_path / fault, config, fault)
        run.records()
        (alarm,) = run.alarms
        (word,) = [one for one in typed(alarm.text, tmp_path) if one.startswith("cluster.")]
        main(["slurm", "render", "grpo", "cluster.gpus_per_node=8", word])
        script = capsys.readouterr().out
        lines = ["--partition=gpu", "--comment='a b'", option]
        assert [one for one in lines if f"#SBATCH {one}\n" not in script] == []


def test_settings_in_other_messages_are_taken():
    """Those of sinks, logs, reports and pages; placeholders in braces are not settings."""
    files = [
        *(ROOT / "nemo_like" / "observe").glob("*.py"),
        *(ROOT / "nemo_like/viewer").glob("*.py"),
    ]
    found = set()
    for path in files:
        tree = ast.parse(path.read_text())
        documented = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and isinstance(node.body[0], ast.Expr)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= set(SETTING.findall(node.value)) if id(node) not in documented else set()
    assert {"logging.sinks=[wandb]", "run.resume=true"} <= found
    needs = {"run.resume": "run.dir=runs/x", "policy.lora.refit": "policy.lora.rank=4"}
    for one in found:
        more = needs.get(one.partition("=")[0])
        composed("grpo", one, *([more] if more else []))
