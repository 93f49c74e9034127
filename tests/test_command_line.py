"""What a user types, in processes of its own: real vLLM, wrong inputs, killed workers."""

import atexit
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from nemo_like.errors import StoppedError, UserError
from nemo_like.run.ending import StopRequest, end_on_error
from nemo_like.viewer.trajectories import Trajectories
from tests.small_runs import ROOT, SMALL, SMALL_ON_A_FILE, last_of, prompts_of, records
from tests.warm_process import WarmProcess

SCRIPT = str(ROOT / "examples" / "run_grpo.py")
TRACEBACK = "Traceback (most recent call last)"
REWARDS = """
def right(prompt, completion, answer): return 1.0
syntax = 1
def raises(prompt, completion): raise ValueError("no answer key")
def no_arguments(): return 1.0
"""


def command(*overrides):
    return [sys.executable, SCRIPT, *last_of(overrides)]


@cache
def temporary(tmp_path):
    """A TMPDIR for the runs of one test, which must leave nothing there; short, for sockets."""
    folder = Path(tempfile.gettempdir(), f"t{os.urandom(4).hex()}")
    folder.mkdir()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return str(folder)


def environment(**extra):
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return env | {"OMP_NUM_THREADS": "1"} | extra


def run(tmp_path, *overrides, timeout_s=240, **env):
    """Run to the end in ``tmp_path``; afterwards none of its processes may be alive."""
    process = subprocess.Popen(
        command(*overrides),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(NEMO_LIKE_TEST=str(tmp_path), TMPDIR=temporary(tmp_path), **env),
    )
    output, _ = process.communicate(timeout=timeout_s)
    assert_nothing_left(tmp_path)
    return process.returncode, output


COUNTS = """
import itertools
import sys
from pathlib import Path

from omegaconf import OmegaConf

from nemo_like.algorithms.grpo.config import GRPOConfig
from nemo_like.cli import train
from nemo_like.config.run import Algorithm

opened = []
checks = itertools.count(1)


def note(event, about):
    if event == "open" and sys._getframe(1).f_globals["__name__"].endswith("file_config_source"):
        opened.append(Path(about[0]).name)


class Counted(GRPOConfig):
    def rules(self, here, run):
        print(opened.count("grpo.yaml"), run.run.seed)
        yield "enough."


sys.addaudithook(note)
OmegaConf.register_new_resolver("check", lambda: next(checks))
train(Algorithm(name="grpo", config=Counted, run="nowhere:run"))
"""


def test_a_single_job_is_composed_and_checked_once(tmp_path):
    (tmp_path / "count.py").write_text(COUNTS)
    done = subprocess.run(
        [sys.executable, "count.py", "run.seed='${check:}'"],
        cwd=tmp_path,
        env=environment(PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "1 1\n", done.stderr
    assert done.stderr == "Error: enough.\n"


class Warm(NamedTuple):
    """What a run's driver is a fork of, and the environment that makes its workers forks too."""

    drivers: WarmProcess
    workers: dict[str, str]


@pytest.fixture(scope="module")
def warm(local_ray, fork_server):
    """Drivers have what the command imports once it accepts the configuration, and no more.

    After Ray's start in this process, which sets RAY_AUTH_MODE, that its import reads.
    """
    drivers = WarmProcess("nemo_like.algorithms.grpo")
    yield Warm(drivers, fork_server.for_workers)
    drivers.close()


def start_in_fork(warm, tmp_path, *overrides, **env):
    """The id of a process as that of ``run``, without the six seconds of importing torch."""
    output = str(tmp_path / "output.txt")
    env = environment(NEMO_LIKE_TEST=str(tmp_path), TMPDIR=temporary(tmp_path), **env)
    target = "tests.typed_command:run_script"
    return warm.drivers.start(target, SCRIPT, last_of(overrides), str(tmp_path), env, output)


def end_of_fork(warm, tmp_path, pid, timeout_s=240.0):
    """Its exit code and output; afterwards none of its processes may be alive."""
    code = warm.drivers.wait(pid, timeout_s)
    assert_nothing_left(tmp_path)
    return code, (tmp_path / "output.txt").read_text()


def run_in_fork(warm, tmp_path, *overrides, **env):
    return end_of_fork(warm, tmp_path, start_in_fork(warm, tmp_path, *overrides, **env))


def assert_nothing_left(tmp_path, within_s=60.0):
    deadline, folder = time.monotonic() + within_s, Path(temporary(tmp_path))
    while (processes_of(tmp_path) or [*folder.iterdir()]) and time.monotonic() < deadline:
        time.sleep(0.2)
    left = [" ".join(p.cmdline())[:200] for p in processes_of(tmp_path) if p.is_running()]
    assert not left, left
    assert not [*folder.rglob("*")]


def processes_of(tmp_path):
    """Processes that inherited this test's mark in their environment, or, as forks, its folder.

    Not Ray's agents, which after an unexpected end of their raylet take up to a minute to end.
    """
    found = []
    for process in psutil.process_iter():
        try:
            marks = process.environ().get("NEMO_LIKE_TEST"), process.cwd()
            marked = str(tmp_path) in marks and not process.name().endswith("Agent")
            if marked and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.full
def test_a_tied_model_in_bfloat16_passes_its_own_checks_on_vllm(warm, tmp_path, tiny_model):
    code, output = run_in_fork(
        warm,
        tmp_path,
        *SMALL,
        f"policy.model={tiny_model('llama', True)}",
        "policy.dtype=bfloat16",
        "run.dir=run",
        "grpo.max_steps=5",
        "validation.every_steps=0",
        "policy.optimizer.lr=1e-3",
    )
    assert code == 0, output
    steps = records(tmp_path / "run")
    assert all(steps[step]["mismatch/mean_abs"] < 2e-2 for step in range(1, 6))
    # The siblings of a group share their prompt, but for its last block.
    assert all(steps[step]["rollout/cached_prompt_share"] > 0.3 for step in range(1, 6))


@pytest.mark.full
def test_a_sweep_of_the_users_own_config_runs_every_job_in_a_folder_of_its_own(warm, tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "defaults: [grpo, _self_]\ngrpo: {max_steps: 1}\ngeneration: {backend: hf}\n"
    )
    code, output = run_in_fork(
        warm,
        tmp_path,
        "--multirun",
        "--config-dir=.",
        "--config-name=mine",
        *SMALL,
        "run.seed=0,1",
        "validation.every_steps=0",
        **warm.workers,
    )
    assert code == 0, output
    folders = [*(tmp_path / "runs").glob("grpo-*/seed=?")]
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in folders]
    assert sorted(summary["seed"] for summary in summaries) == [0, 1]
    assert all(summary["steps"] == 1 for summary in summaries)
    assert all(summary["generation_backend"] == "hf" for summary in summaries)


def test_hydras_own_modes_work(tmp_path):
    code, output = run(tmp_path, "--cfg", "job", "policy.optimizer.lr=0.5")
    assert code == 0
    assert "lr: 0.5" in output
    code, output = run(tmp_path, "--cfg", "hydra", "hydra.verbose=true")
    assert code == 0
    assert "verbose: true" in output
    code, output = run(tmp_path, "--help")
    assert code == 0
    assert "num_prompts_per_step" in output
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def inputs(tmp_path, tiny_model):
    """Files that are wrong in one way each."""

    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "broken.py").write_text("def reward(:\n")
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "x"}\n{oops\n')
    (tmp_path / "other.jsonl").write_text('{"question": "x"}\n')
    (tmp_path / "good.jsonl").write_text('{"prompt": "x", "answer": "1"}\n' * 8)
    (tmp_path / "plain.jsonl").write_text('{"prompt": "x"}\n')
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "x" * 3000}) + "\n")
    (tmp_path / "trap.yaml").write_text("defaults: [grpo, _self_]\nrun:\n  dir: 007\n")
    (tmp_path / "file").write_text("")
    (tmp_path / "no_config").mkdir()
    (tmp_path / "broken_model").mkdir()
    (tmp_path / "broken_model" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "broken_model" / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    for name, kind in (("unknown_kind", "lama"), ("wrong_kind", "clip_text_model")):
        shutil.copytree(tmp_path / "broken_model", tmp_path / name)
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": kind}))
    shutil.copytree(tiny_model(), tmp_path / "no_template")
    (tmp_path / "no_template" / "chat_template.jinja").unlink()
    finished = tmp_path / "finished" / "checkpoints" / "step_3"
    finished.mkdir(parents=True)
    (finished / "files.json").write_text('{"policy/model.distcp": [10, 5], "driver.json": [2, 5]}')
    return tmp_path


# What is typed -> what must be in the one sentence that comes back. All end before Ray starts.
WRONG_INPUTS = [
    ("polcy.lr=1", "polcy.lr is not a key of the configuration; did you mean policy.optimizer.lr?"),
    ("+grpo.steps=1", "grpo.steps is not a key of the configuration"),
    ("policy.optimizer.lr=fast", "policy.optimizer.lr=fast must be a number"),
    ("policy.dtype=fp8", "policy.dtype=fp8 must be one of float32, bfloat16"),
    ("model=llama", "model=llama is not a choice; use one of embedded, smollm2"),
    ("grpo.max_steps=1,2", "needs --multirun"),
    ("grpo.num_generations_per_prompt=1", "must be at least 2"),
    ("policy.micro_batch_tokens=10", "policy.micro_batch_tokens=10 cannot hold"),
    ("loss.kl_estimator=k1", "loss.kl_estimator=k1 would have no effect"),
    ("policy.model=missing/folder/x", "policy.model=missing/folder/x: no such folder"),
    ("policy.model=no_config", "the folder has no config.json"),
    ("policy.model=unknown_kind", "unknown_kind has model_type=lama in its config.json, which"),
    ("policy.model=wrong_kind", "wrong_kind has model_type=clip_text_model in its config.json"),
    ("policy.model=no_template", "its tokenizer has no chat template"),
    ("data.train=missing.jsonl environment.reward=math", "data.train=missing.jsonl: no such file"),
    ("data.train=empty.jsonl environment.reward=math", "data.train=empty.jsonl is empty"),
    ("data.train=bad.jsonl environment.reward=math", "data.train=bad.jsonl, line 2: not JSON"),
    ("data.train=other.jsonl environment.reward=math", "a row needs either 'prompt' or 'messages'"),
    ("data.train=good.jsonl", "set environment.reward to math or to your file.py:function"),
    ("data.tasks={chain_sums: {}}", "chain_sums"),
    ("data.tasks={chain_sum: {min_term: 2}}", "min_term"),
    ("data.train=good.jsonl environment.reward=missing.py:reward", "there is no file missing.py"),
    ("data.train=good.jsonl environment.reward=broken.py:reward", "broken.py"),
    ("data.train=good.jsonl environment.reward=rewards.py:rewrd", "rewrd"),
    ("data.train=good.jsonl environment.reward=rewards.py:no_arguments", "no_arguments"),
    (
        "data.train=plain.jsonl environment.reward=math",
        "needs the field 'answer', and row 0 of data.train does not have it",
    ),
    ("generation.tensor_parallel_size=3 cluster.cpu_workers_per_node=4", "does not divide"),
    ("cluster.num_generation_workers=1", "needs at least two workers"),
    ("checkpoint.metric=accuracy", "checkpoint.metric=accuracy is not a metric of this run"),
    ("run.dir=file/below", "run.dir=file/below cannot be written"),
    ("run.dir=/proc/nemo-like", "run.dir=/proc/nemo-like cannot be written"),
    ("run.dir=finished", "run.dir=finished already holds a run"),
    ("run.dir=finished run.resume=true", "step_3 is damaged: policy/model.distcp is missing"),
    ("run.resume=true", "run.resume=true needs run.dir"),
    ("--config-dir=. --config-name=trap", 'put it in quotes: "007"'),
    (
        "cluster.cpu_workers_per_node=8 policy.parallel.tensor_parallel_size=8",
        "tensor_parallel_size=8 does not divide the model's num_attention_heads=4; use 1, 2 or 4",
    ),
    (
        "cluster.cpu_workers_per_node=4 policy.parallel.pipeline_parallel_size=4",
        "pipeline",
    ),
    (
        "cluster.cpu_workers_per_node=2 policy.parallel.ddp.compression=powersgd",
        "compression=powersgd would have no effect: FSDP",
    ),
    (
        "generation.max_new_tokens=5000",
        "generation.max_new_tokens=5000 does not fit the model's context",
    ),
    ("--config-name=missing", "--config-name=missing: there is no missing.yaml"),
]


def assert_one_sentence(code, output, sentence):
    assert code == 2, output
    errors = [line for line in output.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1, output
    assert sentence in errors[0]
    assert TRACEBACK not in output
    assert "Starting: ray" not in output


def arguments(typed):
    return [typed] if "{" in typed else typed.split(" ")


@pytest.mark.parametrize(
    ("typed", "sentence"), WRONG_INPUTS, ids=[typed for typed, _ in WRONG_INPUTS]
)
def test_a_wrong_input_gets_one_clear_sentence(warm, inputs, typed, sentence):
    assert_one_sentence(*run_in_fork(warm, inputs, *arguments(typed)), sentence)


# Refused by Hydra, by the schema, with the model and with the data.
@pytest.mark.parametrize(
    "typed",
    [
        "--config-name=missing",
        "policy.optimizer.lr=fast",
        "policy.model=no_config",
        pytest.param("data.train=bad.jsonl environment.reward=math", marks=pytest.mark.full),
    ],
)
def test_a_wrong_input_gets_its_sentence_in_a_new_process_too(inputs, typed):
    assert_one_sentence(*run(inputs, *arguments(typed)), dict(WRONG_INPUTS)[typed])


def test_a_wrong_key_is_refused_in_under_two_seconds(tmp_path):
    """Of a processor's time, which is that on the clock where nobody else wants it."""
    run(tmp_path, "polcy.lr=1")  # so that byte code is compiled
    start = cpu_s_of_children()
    run(tmp_path, "polcy.lr=1")
    assert cpu_s_of_children() - start < 2.0


def cpu_s_of_children():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# What only the tokenizer can tell, which is imported while Ray and the workers start.
TOKENIZER_ERRORS = [
    ("policy.model=broken_model", "broken_model"),
    ("data.train=long.jsonl environment.reward=rewards.py:raises", "the prompt of row 0 has"),
]


@pytest.mark.parametrize(("typed", "sentence"), TOKENIZER_ERRORS)
def test_what_the_tokenizer_refuses_is_refused_before_models_load(
    inputs, monkeypatch, typed, sentence
):
    from nemo_like.compose.load import compose_config

    monkeypatch.chdir(inputs)
    config = compose_config(ROOT / "configs", "grpo", arguments(typed))
    with pytest.raises(UserError, match=re.escape(sentence)):
        prompts_of(config)


# What is told once Ray and the workers' processes have begun to start.
LATE_ERRORS = [
    pytest.param(
        ["policy.model=broken_model"],
        2,
        "broken_model could not be loaded",
        marks=pytest.mark.full,
    ),
    pytest.param(
        ["cluster.gpus_per_node=8", "grpo.num_prompts_per_step=8"],
        2,
        "wants 1 node(s) with 8 CPUs and 8 GPUs each",
        marks=pytest.mark.full,  # the refusal itself is in test_cluster.py
    ),
    pytest.param(
        ["generation.engine_kwargs.enforce_eagr=true"],
        2,
        "enforce_eagr",
        marks=pytest.mark.full,  # the refusal itself is in test_engines.py
    ),
    (
        ["data.train=good.jsonl", "environment.reward=rewards.py:raises", "generation.backend=hf"],
        1,
        "rewards.py:raises failed on all 16 completions of step 1; first: ValueError: no answer",
    ),
]


@pytest.fixture(scope="module")
def silent(warm, tmp_path_factory):
    """A run whose RAY_ADDRESS says nothing; it waits for ten seconds, in which tests go on."""
    folder = tmp_path_factory.mktemp("silent")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        began = time.time()
        yield address, began, folder, start_in_fork(warm, folder, RAY_ADDRESS=address)


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize(
    ("overrides", "code", "sentence"), LATE_ERRORS, ids=["tokenizer", "gpus", "vllm", "reward"]
)
def test_a_late_error_is_one_sentence_too_and_leaves_nothing_running(
    warm, inputs, overrides, code, sentence
):
    actual, output = run_in_fork(warm, inputs, *SMALL_ON_A_FILE, *overrides, **warm.workers)
    assert actual == code, output
    assert sentence in output
    assert TRACEBACK not in output


def test_a_ray_address_that_accepts_and_says_nothing_ends_the_run(warm, silent):
    address, began, folder, pid = silent
    code, output = end_of_fork(warm, folder, pid)
    assert code == 2
    told = f"Error: RAY_ADDRESS={address}: no Ray answers there (connected, and silent for 10 s); "
    assert told in output
    assert (folder / "output.txt").stat().st_mtime - began < 120


def start_run(warm, tmp_path, *overrides, **env):
    options = ("run.dir=run", "checkpoint.every_steps=2", "generation.backend=hf")
    endless = ("grpo.max_steps=500", *overrides)
    return start_in_fork(warm, tmp_path, *SMALL, *options, *endless, **env)


def wait_for_step(tmp_path, step, timeout_s=240.0):
    deadline = time.monotonic() + timeout_s
    path = tmp_path / "run" / "checkpoints" / f"step_{step}"
    while not path.exists():
        assert time.monotonic() < deadline, (tmp_path / "output.txt").read_text()
        time.sleep(0.1)


def test_a_killed_driver_leaves_nothing_running_and_the_run_resumes_exactly(
    warm, tmp_path, straight
):
    """The run that resumes ends when its policy worker is killed, whom it names."""
    driver = start_run(warm, tmp_path, **warm.workers)
    wait_for_step(tmp_path, 2)
    os.kill(driver, signal.SIGKILL)
    end_of_fork(warm, tmp_path, driver)
    driver = start_run(warm, tmp_path, "run.resume=true", **warm.workers)
    wait_for_step(tmp_path, 6)
    (worker,) = [p for p in processes_of(tmp_path) if "PolicyWorker" in " ".join(p.cmdline())]
    worker.kill()
    code, output = end_of_fork(warm, tmp_path, driver, timeout_s=120.0)
    resumed, expected = records(tmp_path / "run"), records(straight)
    assert list(resumed)[:7] == list(expected) == list(range(7))
    for step in range(1, 7):
        for name in ("train/loss", "train/grad_norm", "rollout/reward", "mismatch/mean_abs"):
            assert resumed[step][name] == expected[step][name], (step, name)
    assert code == 1, output
    assert "policy rank 0 on " in output
    assert re.search(r"died (in|before) ", output)
    assert TRACEBACK not in output


@pytest.mark.full  # that one is killed is above, and that one with lag goes on in test_lag.py
def test_a_run_with_lag_whose_driver_is_killed_samples_and_trains_each_group_once(warm, tmp_path):
    """What was sampled ahead is lost with it, and sampled again; its end has nothing under way."""
    lag = ("rollout.max_lag=2", "rollout.order=ready", "validation.every_steps=500")
    lag += ("cluster.cpu_workers_per_node=2", "cluster.num_generation_workers=1")
    driver = start_run(warm, tmp_path, *lag, **warm.workers)
    wait_for_step(tmp_path, 2)
    os.kill(driver, signal.SIGKILL)
    end_of_fork(warm, tmp_path, driver)
    saved = [path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*")]
    steps = max(int(name.removeprefix("step_")) for name in saved) + 2
    ending = ("run.resume=true", f"grpo.max_steps={steps}", "checkpoint.export=false")
    driver = start_run(warm, tmp_path, *lag, *ending, **warm.workers)
    code, output = end_of_fork(warm, tmp_path, driver)
    assert code == 0, output
    found = Trajectories(tmp_path / "run" / "trajectories")
    found.refresh()
    columns = found.columns
    train = columns["phase"] == found.words["phase"].index("train")
    kept = zip(columns["group"][train].tolist(), columns["index"][train].tolist(), strict=True)
    assert sorted(kept) == [(group, index) for group in range(4 * steps) for index in range(4)]


def test_a_closed_terminal_ends_a_run_in_order_except_under_nohup(capsys):
    def close_terminal():
        os.kill(os.getpid(), signal.SIGHUP)
        sys.stderr.write("went on")

    before = signal.getsignal(signal.SIGHUP)
    with pytest.raises(SystemExit) as ended:
        end_on_error(close_terminal)
    assert ended.value.code == 130
    assert capsys.readouterr().err == "Interrupted.\n"
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        end_on_error(close_terminal)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert capsys.readouterr().err == "went on"


HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGALRM)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "Interrupted.\n"),
        (StoppedError("Saved."), 75, "Saved.\n"),
        (UserError("no"), 2, "Error: no\n"),
        (OSError(28, "No space left on device"), 1, "Error: a file cannot be written: No space"),
    ],
    ids=str,
)
def test_a_process_that_goes_on_after_an_end_has_its_handlers_again(
    capsys, monkeypatch, error, code, said
):
    def fails():
        raise error

    def masked():
        try:
            raise error
        finally:
            raise UnboundLocalError("what was cut short failed itself")

    monkeypatch.setattr(sys, "ps1", "> ", raising=False)
    before = [signal.getsignal(number) for number in HANDLED]
    with pytest.raises(SystemExit) as ended:
        end_on_error(fails)
    assert ended.value.code == code
    assert capsys.readouterr().err.startswith(said)
    assert [signal.getsignal(number) for number in HANDLED] == before
    if isinstance(error, Exception):
        with pytest.raises(UnboundLocalError):
            end_on_error(masked)
    else:
        with pytest.raises(SystemExit) as ended:
            end_on_error(masked)
        assert ended.value.code == code


@pytest.mark.parametrize("error", [KeyboardInterrupt(), StoppedError("Saved.")], ids=str)
def test_nothing_interrupts_a_process_that_a_signal_has_ended(error):
    def fails():
        raise error

    with pytest.raises(SystemExit):
        end_on_error(fails)
    assert {signal.getsignal(number) for number in HANDLED} == {signal.SIG_IGN}


GOES_ON = f"""
import atexit, os, runpy, signal, sys

def late():
    for number in (2, 15, 1, 10):
        os.kill(os.getpid(), number)
    print("still here", flush=True)

atexit.register(late)
handled = {tuple(int(number) for number in HANDLED)}
before = [signal.getsignal(number) for number in handled]
try:
    runpy.run_path({SCRIPT!r}, run_name="__main__")
except SystemExit as end:
    print(end.code, [signal.getsignal(number) for number in handled] == before)
    raise
"""


def test_a_command_leaves_handlers_as_they_were_and_its_exit_cannot_be_interrupted(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", GOES_ON, "run.dirr=x"],
        cwd=tmp_path,
        env=environment(PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (done.returncode, done.stdout) == (2, "2 True\nstill here\n"), done.stderr


INTERRUPTED = """
import os, runpy, signal, sys

class Finder:
    def find_spec(name, path=None, target=None):
        if name == sys.argv[2]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder)
exec(sys.argv[1])
"""
SHELL = "from nemo_like.cli import main; main(['plan'])"


@pytest.mark.parametrize("module", ["hydra", "nemo_like.compose.load"])
@pytest.mark.parametrize("start", [f"runpy.run_path({SCRIPT!r}, run_name='__main__')", SHELL])
def test_ctrl_c_while_a_command_imports_ends_it_without_a_word(tmp_path, start, module):
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, start, module],
        cwd=tmp_path,
        env=environment(PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ctrl_c_saves_the_step_in_progress(warm, tmp_path):
    driver = start_run(warm, tmp_path, **warm.workers)
    wait_for_step(tmp_path, 2)
    os.kill(driver, signal.SIGINT)
    code, output = end_of_fork(warm, tmp_path, driver, timeout_s=120.0)
    assert code == 75, output
    assert "which is saved; Ctrl-C again ends the run at once." in output
    last = max(
        int(path.name.removeprefix("step_"))
        for path in (tmp_path / "run" / "checkpoints").glob("step_*")
    )
    assert f"Stopped on request after step {last} of 500, which is saved in " in output
    assert not processes_of(tmp_path)


def test_a_second_ctrl_c_and_one_before_the_first_step_interrupt():
    request = StopRequest()
    with pytest.raises(KeyboardInterrupt):
        request(signal.SIGINT, None)
    request.within_steps()
    request(signal.SIGINT, None)
    with pytest.raises(StoppedError, match="in the middle"):
        request.obey("in the middle")
    with pytest.raises(KeyboardInterrupt):
        request(signal.SIGINT, None)
    request = StopRequest()
    request.within_steps()
    request.when_done()
    with pytest.raises(KeyboardInterrupt):
        request(signal.SIGINT, None)


def test_an_interrupt_ends_in_order_however_often_it_comes(warm, tmp_path):
    driver = start_run(warm, tmp_path, **warm.workers)
    wait_for_step(tmp_path, 2)
    for number in [signal.SIGHUP, *[signal.SIGTERM, signal.SIGINT] * 4]:
        os.kill(driver, number)
        time.sleep(0.3)
    code, output = end_of_fork(warm, tmp_path, driver, timeout_s=120.0)
    assert code == 130, output
    assert "Interrupted; workers are ended, finished checkpoints are kept." in output
    assert TRACEBACK not in output
