import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
import threading

import pytest

import nemo_like as nl
from tests.not_here import cannot_test
from tests.small_runs import ROOT

SMALL = {
    "generation.backend": "hf",
    "generation.max_new_tokens": 8,
    "grpo.num_prompts_per_step": 4,
    "grpo.num_generations_per_prompt": 4,
    "cluster.call_timeout_s": 120,
    "logging.sinks": [],
}
ROWS = [{"prompt": f"Say {i}", "wanted": i} for i in range(12)]


def overrides(folder, **changes):
    return (
        SMALL | {"run.dir": folder / "run"} | {k.replace("__", "."): v for k, v in changes.items()}
    )


def test_ten_lines_train(local_ray, tmp_path):
    """In twenty steps they learn to answer briefly; see ``test_grpo.py``."""
    lines = (ROOT / "examples/custom_reward/rows.jsonl").read_text().splitlines()
    half = 20

    def brief(prompt, completion, **fields):
        return 1 / (1 + len(completion) / half)

    run = nl.grpo(
        model="embedded",
        train=[json.loads(line) for line in lines],
        reward=brief,
        overrides=overrides(
            tmp_path,
            grpo__max_steps=2,
        ),
    )
    assert [0 < record["rollout/reward"] <= 1 for record in run.metrics] == [True, True]
    assert run.metrics[1]["train/grad_norm"] > 0
    assert run.summary["steps"] == 2
    assert json.loads((run.model_dir / "config.json").read_text())["model_type"] == "llama"


def test_a_run_goes_on_with_the_same_inputs_and_without_python_functions(local_ray, tmp_path):
    """Rows and function are files of the run, which the command line can name."""
    first = nl.grpo(
        train=ROWS,
        reward=lambda completion, prompt, wanted: wanted,
        overrides=overrides(tmp_path, grpo__max_steps=1),
    )
    written = nl.grpo(
        train=next((first.dir / "inputs").glob("train_*.jsonl")),
        reward=f"{next((first.dir / 'inputs').glob('reward_*.py'))}:reward",
        overrides=overrides(tmp_path, grpo__max_steps=2, run__resume=True),
    )
    assert [record["step"] for record in written.metrics] == [1, 2]
    assert written.metrics[0] == first.metrics[0]
    assert written.metrics[1]["rollout/reward"] != 0


def test_a_row_whose_reward_raises_is_left_out_and_the_run_goes_on(local_ray, tmp_path):
    def only_even(prompt, completion, wanted):
        if wanted % 2:
            raise ValueError("odd")
        return wanted

    run = nl.grpo(train=ROWS, reward=only_even, overrides=overrides(tmp_path, grpo__max_steps=3))
    assert [record["rollout/num_failed"] for record in run.metrics] == [8, 4, 12]
    assert "ValueError: odd" in (run.dir / "run.log").read_text()


def test_a_reward_that_always_raises_ends_the_run_with_its_own_words(local_ray, tmp_path):
    def never(prompt, completion, **fields):
        raise ValueError("not today")

    with pytest.raises(nl.RunError, match="ValueError: not today"):
        nl.grpo(train=ROWS, reward=never, overrides=overrides(tmp_path, grpo__max_steps=1))


def test_a_dataset_trains_like_its_rows(local_ray, tmp_path):
    import datasets

    rows = [{"prompt": f"Say {i}", "completion": str(i)} for i in range(12)]
    keys = {"sft.max_steps": 2, "sft.num_rows_per_step": 4, "logging.sinks": []}
    losses = []
    for name, kind in (("list", list), ("dataset", datasets.Dataset.from_list)):
        folder = {"run.dir": tmp_path / name}
        run = nl.sft(train=kind(rows[:8]), validation=kind(rows[8:]), overrides=keys | folder)
        losses.append([record.get("train/loss") for record in run.metrics])
    assert losses[0] == losses[1]
    assert None not in losses[0][1:]


def test_a_typed_configuration_runs(local_ray, tmp_path):
    config = nl.SFTConfig(sft={"max_steps": 1, "num_rows_per_step": 2})  # type: ignore[arg-type]
    config = config.replace(
        run=config.run.replace(dir=str(tmp_path / "run")),
        logging=config.logging.replace(sinks=[]),
    )
    run = nl.train(config, train=[{"text": "one"}, {"text": "two"}])
    assert [record["step"] for record in run.metrics] == [1]
    with pytest.raises(nl.UserError, match="already holds a run"):
        nl.train(config, train=[{"text": "other"}])
    assert len(list((run.dir / "inputs").iterdir())) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"overrides": {"grpo.max_step": 3}}, "did you mean grpo.max_steps"),
        ({"overrides": {"grpo.max_steps": 0}}, "grpo.max_steps=0 must be at least 1"),
        ({"train": [{"prompt": "a"}]}, "environment.reward=reasoning_gym scores"),
        ({"train": ["text"]}, "row 0 is a str, not a dictionary"),
        ({"train": [{"prompt": {1, 2}}]}, "row 0 cannot be written as JSON"),
        ({"train": ROWS, "reward": threading.Lock().__enter__}, "reward cannot be pickled"),
        ({"config_name": "sft"}, "nl.grpo cannot run this configuration"),
    ],
)
def test_wrong_input_is_an_exception_and_leaves_no_folder(arguments, message, tmp_path):
    own = {"run.dir": tmp_path / "run"} | arguments.pop("overrides", {})
    with pytest.raises(nl.UserError, match=message):
        nl.grpo(**arguments, overrides=own)
    assert not (tmp_path / "run").exists()


def test_a_reward_with_the_wrong_arguments_ends_the_run_before_ray_starts(tmp_path):
    with pytest.raises(nl.UserError, match=r"takes \(text\); write def reward"):
        nl.grpo(train=ROWS, reward=lambda text: 1.0, overrides={"run.dir": tmp_path / "run"})
    assert not [one for one in sys.path if "inputs" in one]


def test_importing_the_package_imports_nothing_large(tmp_path):
    code = (
        "import sys, nemo_like as nl; assert 'grpo' in dir(nl); "
        "print({'torch', 'ray', 'pydantic', 'hydra'} & set(sys.modules)); nl.grpo; nl.GRPOConfig; "
        "print({'torch', 'ray'} & set(sys.modules))"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert said.stdout.split() == ["set()", "set()"]
    with pytest.raises(AttributeError, match="no attribute 'gpro'"):
        nl.gpro  # noqa: B018


CELLS = (
    """
import json, logging, os, signal, sys, threading, time
import psutil
import nemo_like as nl

numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM, signal.SIGHUP]
rows = [{"prompt": f"Say {i}", "wanted": i} for i in range(12)]
offset = 0.0


def reward(prompt, completion, wanted):
    return offset + len(completion)


def facts():
    \"\"\"What a run must leave as it was; killed processes may take a moment to go.\"\"\"
    psutil.wait_procs(psutil.Process().children(recursive=True), timeout=10)
    return (
        {one.name for one in threading.enumerate()},
        {one.pid for one in psutil.Process().children(recursive=True)},
        {number: signal.getsignal(number) for number in numbers},
        logging.getLogger().handlers[:],
        logging.getLogger().level,
        [one for one in sys.path if "inputs" in one],
    )


def run(steps, folder):
    keys = SMALL | {"grpo.max_steps": steps, "run.dir": folder}
    return nl.grpo(train=rows, reward=reward, overrides=keys).metrics[-1]["rollout/reward"]


before = facts()
""",
    "first = run(1, 'first')\nassert facts() == before, (facts(), before)",
    """
def interrupt_start():
    while "ray.init" not in {one.name for one in threading.enumerate()}:
        time.sleep(0.01)
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt_start).start()
try:
    run(1, "start")
except KeyboardInterrupt:
    print("early")
""",
    """
offset = 100.0

def interrupt():
    while not os.path.exists("long/metrics.jsonl") or not os.path.getsize("long/metrics.jsonl"):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)  # as the kernel's own interrupt does

threading.Thread(target=interrupt).start()
try:
    run(10_000, "long")
except KeyboardInterrupt:
    print("interrupted")
assert facts() == before, (facts(), before)
with open("long/metrics.jsonl") as lines:
    assert json.loads(lines.readline())["rollout/reward"] > first + 50
""",
    """
keys = {"run.dir": "wrong", "grpo.max_steps": 0}
try:
    nl.grpo(train=rows, reward=reward, overrides=keys)
except nl.UserError:
    print("refused")
assert facts() == before and not os.path.exists("wrong")
""",
)
EXECUTE = """
import sys, nbclient, nbformat
cells = [nbformat.v4.new_code_cell(one) for one in sys.argv[1:]]
notebook = nbclient.execute(nbformat.v4.new_notebook(cells=cells), timeout=500)
for cell in notebook.cells:
    print(*(one["text"] for one in cell["outputs"] if one.get("name") == "stdout"))
"""


@pytest.fixture(scope="module")
def notebook_python(tmp_path_factory):
    """A Python with our packages and a kernel, which is installed for it if it is missing."""
    if importlib.util.find_spec("nbclient") and importlib.util.find_spec("ipykernel"):
        return sys.executable
    folder = tmp_path_factory.mktemp("notebook")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin/python"
    site = next(folder.glob("lib/*/site-packages"))
    (site / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")
    pip = [sys.executable, "-m", "pip", "--quiet", "--python", python]
    install = [*pip, "install", "nbclient", "ipykernel"]
    if subprocess.run(install, check=False, timeout=200).returncode != 0:
        missing = "nbclient and ipykernel, which can be neither found nor installed"
        cannot_test(f"notebooks need {missing}", "NEMO_LIKE_REQUIRE_NOTEBOOK")
    return str(python)


def test_a_notebook_runs_again_and_interrupts_and_nothing_stays(
    notebook_python, fork_server, tmp_path
):
    first, *others = CELLS
    cells = [f"SMALL = {SMALL!r}\n{first}", *others]
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    ended = subprocess.run(
        [notebook_python, "-c", EXECUTE, *cells],
        cwd=tmp_path,
        env=env | fork_server.for_workers,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.split() == ["early", "interrupted", "refused"]
