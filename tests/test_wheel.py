"""The wheel, installed where nothing of the checkout is: what users get from ``pip install``."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml

from tests.small_runs import ROOT

PARTS = ("nemo_like", "configs", "slurm", "setup.py", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """``installed(*arguments)`` runs the console script of the wheel, from an empty folder."""
    folder = tmp_path_factory.mktemp("wheel")
    source, environment = folder / "source", folder / "venv"
    source.mkdir()
    for part in PARTS:  # a build leaves its files beside them
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, source / part)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    alone = ["--no-deps", "--no-index"]
    build = ["wheel", *alone, "--no-build-isolation", "--wheel-dir", folder, source]
    subprocess.run([*pip, *build], check=True)
    (wheel,) = folder.glob("*.whl")
    shutil.rmtree(source)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    site = next(environment.glob("lib/*/site-packages"))
    # What the wheel needs, but not what this interpreter has of nemo-like itself.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    into = ["--python", environment / "bin/python", "install", *alone, wheel]
    subprocess.run([*pip, *into], check=True)
    assert (site / "nemo_like/recipes/grpo.yaml").is_file()
    here = folder / "elsewhere"
    here.mkdir()
    left_out = ("PYTHONPATH", "RAY_ADDRESS")
    env = {name: value for name, value in os.environ.items() if name not in left_out}

    def run(*arguments, code=0):
        command = [environment / "bin/nemo-like", *arguments]
        done = subprocess.run(command, cwd=here, env=env, capture_output=True, text=True)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout if code == 0 else done.stderr

    run.folder, run.site = here, site
    return run


def test_the_wheel_trains_from_any_folder(installed):
    installed(
        "sft",
        "sft.max_steps=2",
        "sft.num_rows_per_step=4",
        "data.num_train_rows=8",
        "validation.every_steps=0",
        "logging.sinks=[]",
        "run.dir=run",
    )
    lines = (installed.folder / "run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    assert (installed.folder / "run/final/model.safetensors").is_file()
    assert installed("show", "run").startswith("run: step 2 of 2, finished\n")
    page = Path("nemo_like/viewer/page")
    for name in ("index.html", "app.js", "uPlot.iife.min.js", "uPlot.LICENSE"):
        assert (installed.site / page / name).read_bytes() == (ROOT / page / name).read_bytes()


def test_the_wheel_has_every_configuration(installed):
    for path in sorted((ROOT / "configs").rglob("*.yaml")):
        packaged = installed.site / "nemo_like/recipes" / path.relative_to(ROOT / "configs")
        assert packaged.read_bytes() == path.read_bytes()
    composed = yaml.safe_load(installed("grpo", "--config-name=recipes/dapo", "--cfg", "job"))
    assert composed["grpo"]["dynamic_sampling"] is True
    assert "did you mean grpo.max_steps" in installed("grpo", "grpo.max_step=1", code=2)


def test_the_wheel_plans_and_launches(installed):
    planned = installed("plan", "grpo")
    assert planned.startswith("Cluster     1 node(s) x 1 CPU worker(s)")
    assert "peak: " in planned
    script = installed("slurm", "render", "grpo", "run.dir=run2", "grpo.max_steps=7")
    assert "command=(nemo-like grpo run.dir=run2 grpo.max_steps=7)" in script
    ray = Path(script.split()[-1])
    assert ray == installed.site / "nemo_like/recipes/slurm/ray.sbatch"
    assert ray.read_bytes() == (ROOT / "slurm/ray.sbatch").read_bytes()
    manifest = installed(
        "ray-config", "--kind=raycluster", "--memory=8Gi", "--image=image:1", "--volume=claim:/data"
    )
    assert yaml.safe_load(manifest)["kind"] == "RayCluster"


def test_the_wheel_says_what_matters_in_a_bug_report(installed):
    said = dict(line.split(maxsplit=1) for line in installed("--version").splitlines())
    assert said["nemo-like"] == "0.1.0"
    assert {"python", "torch", "ray", "transformers", "pydantic"} <= said.keys()
    assert "| `grpo.max_steps` |" in installed("keys")
    assert "| `learning_rate` | `policy.optimizer.lr` |" in installed("names")
