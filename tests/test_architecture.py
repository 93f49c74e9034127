"""The shape of the code base: imports point downwards, and heavy libraries stay in their files."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house import LEAVES, House, figures, is_leaf, table

PACKAGE = Path(__file__).parent.parent / "nemo_like"

# From the bottom up; a package may import its own and lower layers only. (One layer's members may
# import each other in one direction: no two of them do so both ways.)
LAYERS = [
    {"errors", "early", "imports"},
    {"doors"},
    {"config"},
    {"batch", "observe"},
    {"losses"},
    {"distributed", "data", "models", "planning"},
    {"refit"},
    {"policy", "generation"},
    {"rewards"},
    {"environments"},
    {"rollout", "run"},
    {"algorithms"},
    {"compose"},
    {"launch", "viewer"},
    {"cli", "api"},
]
CROSSINGS = {
    ("algorithms/rows.py", "data/columns.py"),
    ("algorithms/sampling.py", "data/mixtures.py"),
    ("algorithms/session.py", "distributed/mps.py"),
    ("distributed/connection.py", "distributed/mps.py"),
    ("compose/files.py", "compose/refusals.py"),
    ("compose/load.py", "compose/refusals.py"),
    ("compose/main.py", "compose/help.py"),
    ("compose/main.py", "compose/refusals.py"),
    ("compose/main.py", "compose/sweep.py"),
    ("compose/overrides.py", "compose/names.py"),
    ("compose/overrides.py", "compose/refusals.py"),
    ("config/paths.py", "config/checkpoints.py"),
    ("config/paths.py", "config/reward_models.py"),
    ("config/slurm.py", "config/slurm_rules.py"),
    ("data/chat.py", "data/answer_spans.py"),
    ("data/datasets.py", "data/columns.py"),
    ("data/datasets.py", "data/json_rows.py"),
    ("data/datasets.py", "data/reasoning_gym.py"),
    ("data/datasets.py", "data/shapes.py"),
    ("data/datasets.py", "data/tables.py"),
    ("distributed/connection.py", "distributed/joining.py"),
    ("distributed/waiting.py", "distributed/failures.py"),
    ("distributed/worker_group.py", "distributed/failures.py"),
    ("generation/vllm/settings.py", "models/adapter_places.py"),
    ("generation/worker.py", "generation/interrupted.py"),
    ("generation/vllm/worker.py", "generation/vllm/lora.py"),
    ("models/resolve.py", "config/checkpoints.py"),
    ("models/resolve.py", "models/smollm2.py"),
    ("planning/offload.py", "planning/memory.py"),
    ("policy/attention.py", "policy/parallel/collectives.py"),
    ("policy/diagnostics.py", "policy/debug/diagnostics.py"),
    ("policy/model.py", "policy/distributions.py"),
    ("policy/model.py", "policy/parallel/collectives.py"),
    ("policy/optim.py", "policy/full_matrix.py"),
    ("policy/optim.py", "policy/moments/flat_adamw.py"),
    ("policy/scoring.py", "policy/lora.py"),
    ("policy/state/files.py", "distributed/failures.py"),
    ("policy/state/loading.py", "policy/lora.py"),
    ("policy/state/loading.py", "policy/parallel/pipeline.py"),
    ("policy/state/loading.py", "policy/parallel/tensor_parallel.py"),
    ("policy/state/state.py", "policy/lora.py"),
    ("policy/trainer.py", "policy/parallel/ddp.py"),
    ("policy/trainer.py", "policy/parallel/pipeline.py"),
    ("policy/worker.py", "policy/state/checks.py"),
    ("policy/worker.py", "policy/warm_up.py"),
    ("policy/worker.py", "refit/broadcast.py"),
    ("refit/buckets.py", "models/adapter_places.py"),
    ("rewards/find.py", "rewards/several.py"),
    ("rewards/process.py", "rewards/concurrent.py"),
    ("rewards/start.py", "rewards/reward_text.py"),
    ("rollout/sources.py", "rollout/ahead.py"),
    ("rollout/weight_sync.py", "refit/broadcast.py"),
    ("rollout/weight_sync.py", "refit/relay.py"),
    ("rollout/worker.py", "environments/protocol.py"),
    ("rollout/worker.py", "generation/interrupted.py"),
    ("rollout/worker.py", "rollout/endpoint.py"),
    ("rollout/worker.py", "rollout/recorder.py"),
    ("run/checkpoint.py", "run/continued.py"),
    ("run/folder.py", "run/continued.py"),
    ("run/outputs.py", "observe/alarms.py"),
    ("run/run.py", "run/continued.py"),
}
"""Where the core imports a leaf. (Leaves that a key or command names are found by their path.)"""
ALWAYS_OPEN = {
    ("run/outputs.py", "observe/alarms.py"),
}
"""Crossings that are not inside a function."""
ONE_PLACE_ONLY = {
    # The engine on our side, and what runs inside its own processes.
    "vllm": {
        f"generation/vllm/{part}.py"
        for part in (
            "completions",
            "engine",
            "loading",
            "lora",
            "processes",
            "scheduler",
            "worker",
        )
    },
}
CONFIG_MUST_NOT_IMPORT = {"torch", "ray", "vllm", "transformers", "numpy"}
MAY_READ_ENVIRONMENT = {
    "run/continued.py",
    "config/model_files.py",
    "environments/program.py",
    "distributed/connection.py",
    "distributed/mps.py",
    "distributed/sweeper.py",
    "distributed/virtual_cluster.py",
    "distributed/worker.py",
    "rewards/judge.py",
    "rewards/pool.py",
    "rewards/sandbox/limits.py",
    "generation/vllm/engine.py",
    "generation/vllm/processes.py",
    "generation/vllm/environment.py",
    "models/smollm2.py",
    "observe/wandb_sink.py",
}
NOT_HERE = ("generation.graph.triton_ops", "rewards.code.harness")
"""Modules that need a GPU, or that run in a process of their own."""
MAX_FILE_LINES = 320
MAX_FUNCTION_LINES = 60

FILES = sorted(PACKAGE.rglob("*.py"))


def name_of(path):
    return str(path.relative_to(PACKAGE))


def area_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def edges():
    for path in FILES:
        if area_of(path) == "__init__":
            continue  # of the package: names that come when they are used
        for module in imports_of(path):
            parts = module.split(".")
            if parts[0] == "nemo_like" and len(parts) > 1 and parts[1] != area_of(path):
                yield path, area_of(path), parts[1]


def test_every_package_has_its_layer():
    areas = {area_of(path) for path in FILES} - {"__init__"}
    assert areas == set().union(*LAYERS)


def test_imports_point_downwards():
    level = {area: i for i, layer in enumerate(LAYERS) for area in layer}
    wrong = [
        f"{name_of(path)} imports nemo_like.{target}"
        for path, area, target in edges()
        if level[target] > level[area]
    ]
    assert not wrong


def test_no_two_packages_import_each_other():
    pairs = {(area, target) for _, area, target in edges()}
    assert not {pair for pair in pairs if pair[::-1] in pairs}


def core_imports_of_leaves(imports):
    return {
        (name, leaf)
        for name, targets in imports.items()
        for leaf in targets
        if is_leaf(leaf) and not is_leaf(name) and name != "__init__.py"
    }


def test_the_core_imports_leaves_at_crossings_only():
    assert core_imports_of_leaves(House(PACKAGE.parent).all_imports) == CROSSINGS


def test_a_crossing_is_taken_when_it_is_needed():
    assert core_imports_of_leaves(House(PACKAGE.parent).imports) == ALWAYS_OPEN


def test_the_table_of_leaves_names_what_exists():
    assert not [leaf for leaf in LEAVES if not (PACKAGE / leaf).exists()]


def test_the_documentation_lists_every_room_and_leaf():
    text = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    core, leaves = text.split("## Core")[1].split("## Leaves")
    rooms = {area_of(path) for path in FILES if len(path.relative_to(PACKAGE).parts) > 1}
    assert not [room for room in rooms if f"`{room}/" not in core and f"{room}/" not in LEAVES]
    assert not [leaf for leaf in LEAVES if f"`{leaf}`" not in leaves.split("\n## ")[0]]


def test_the_house_is_measured():
    house = House(PACKAGE.parent)
    rows = figures(house)
    assert rows["containers between YAML and the loop"].startswith("5: RolloutSetup, Sampling, ")
    assert rows["lines in all"] == f"{sum(len(p.read_text().splitlines()) for p in FILES):,}"
    assert "algorithms/session.py" in house.closure()
    assert "algorithms/ppo/loop.py" not in house.closure()
    assert house.deepest_chain()[-1] == "errors.py"
    assert "| keys | " in table({"here": rows})


@pytest.mark.parametrize("library", ONE_PLACE_ONLY)
def test_a_heavy_library_is_imported_in_one_place(library):
    users = {
        name_of(path)
        for path in FILES
        if any(module.split(".")[0] == library for module in imports_of(path))
    }
    assert users == ONE_PLACE_ONLY[library]


def test_configuration_is_light():
    for path in (PACKAGE / "config").glob("*.py"):
        heavy = {module.split(".")[0] for module in imports_of(path)} & CONFIG_MUST_NOT_IMPORT
        assert not heavy, path


def test_processes_are_started_without_torch():
    """A driver that imported it first would keep its workers waiting for that."""
    code = "import gc, sys, nemo_like.cli, nemo_like.algorithms.session; print(*sys.modules)"
    code += "; assert gc.isenabled()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "ray" in loaded
    assert not loaded & {"torch", "transformers", "vllm", "reasoning_gym", "numpy"}


def cached(tmp_path, code):
    """What a process leaves in its home and in TMPDIR, and where it has caches of compiled code."""
    home, temporary = tmp_path / "home", tmp_path / "tmp"
    home.mkdir()
    temporary.mkdir()
    caches = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    unset = (*caches, "XDG_CACHE_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    code += f"\nimport os; print(*map(os.environ.get, {caches}))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | {"HOME": str(home), "TMPDIR": str(temporary)},
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    return left - {"home", "tmp"}, done.stdout.strip()


def test_every_file_can_be_imported():
    """One that only failures need would otherwise fail when it is needed."""
    names = [name_of(path).removesuffix(".py").replace("/", ".") for path in FILES]
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"
    here = [f"nemo_like.{name}" for name in names if not name.startswith(NOT_HERE)]
    subprocess.run([sys.executable, "-c", code, *here], check=True, timeout=300)


def test_importing_the_package_writes_nothing(tmp_path):
    code = "import nemo_like.cli, nemo_like.algorithms.session"
    assert cached(tmp_path, code) == (set(), "None None")


WORKER = """
from nemo_like.distributed.worker import Host, WorkerContext
context = WorkerContext(
    role="policy", rank=0, world_size=1, address="", node_id="", gpu_ids=(), environment={{}},
    listens_on="", log_dir={log_dir!r},
)
Host(context, lambda: None)
import transformers
transformers.AutoModelForCausalLM
"""


def test_a_workers_compiler_cache_is_the_users(tmp_path):
    left, caches = cached(tmp_path, WORKER.format(log_dir=f"{tmp_path}/home/logs"))
    folder = f"{tmp_path}/home/.cache/nemo_like/inductor"
    assert caches.split() == [folder, f"{folder}/triton"]
    assert "home/.cache/nemo_like/inductor" in left
    assert not [path for path in left if path.startswith("tmp")]


def test_the_environment_is_read_in_few_files():
    users = {name_of(path) for path in FILES if "os.environ" in path.read_text()}
    assert users <= MAY_READ_ENVIRONMENT


def test_files_and_functions_stay_readable():
    for path in FILES:
        text = path.read_text()
        assert len(text.splitlines()) <= MAX_FILE_LINES, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                length = node.end_lineno - node.lineno + 1
                assert length <= MAX_FUNCTION_LINES, (name_of(path), node.name, length)


def test_names_that_hide_a_missing_file_do_not_exist():
    banned = {"utils.py", "helpers.py", "common.py", "misc.py"}
    assert not [path for path in FILES if path.name in banned or path.parent.name == "common"]
