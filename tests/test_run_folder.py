"""A run's folder continues the run that it is of, and no other."""

import json
import os
import shlex
import shutil
import signal
from pathlib import Path

import pytest
import yaml

from nemo_like.algorithms.grpo.config import GRPOConfig
from nemo_like.algorithms.session import next_command
from nemo_like.algorithms.sft.config import SFTConfig
from nemo_like.cli import main
from nemo_like.compose.load import compose_config
from nemo_like.config.data import PromptsConfig
from nemo_like.config.optimizer import LoraConfig, OptimizerConfig
from nemo_like.config.policy import PolicyConfig
from nemo_like.config.run import RunSection
from nemo_like.config.sampling import SamplingRunConfig
from nemo_like.errors import RunError, StoppedError, UserError, exit_code
from nemo_like.run.continued import note_start
from nemo_like.run.ending import end_on_error, listen
from nemo_like.run.folder import note_end, save_config
from nemo_like.run.run import Run
from nemo_like.viewer.runs import find_runs
from tests.small_runs import run_config, small_config

CONFIGS = Path(__file__).parent.parent / "configs"
ROWS = CONFIGS.parent / "examples/custom_reward/rows.jsonl"


def test_a_folder_is_continued_by_the_algorithm_that_began_it(tmp_path):
    save_config(tmp_path, GRPOConfig(), continued=False)
    save_config(tmp_path, GRPOConfig(), continued=True)
    other = SFTConfig(run=RunSection(dir="x"))
    with pytest.raises(UserError, match=r"run\.dir=x is .* of another kind: .* no section sft; "):
        save_config(tmp_path, other, continued=True)


@pytest.mark.parametrize(
    ("policy", "key"),
    [
        (PolicyConfig(model="other"), "policy.model=other"),
        (PolicyConfig(optimizer=OptimizerConfig(kind="sgd")), "policy.optimizer.kind"),
        (PolicyConfig(optimizer=OptimizerConfig(moments="int8")), "policy.optimizer.moments=int8"),
        (PolicyConfig(lora=LoraConfig(rank=8)), "policy.lora.rank=8"),
        (PolicyConfig(lora=LoraConfig(alpha=64)), "policy.lora.alpha=64"),
    ],
)
def test_a_run_goes_on_with_the_model_adapters_and_optimizer_of_its_checkpoints(
    policy, key, tmp_path
):
    save_config(tmp_path, GRPOConfig(), continued=False)
    before = (tmp_path / "config.yaml").read_text()
    with pytest.raises(UserError, match=f"{key}.* is not that of the run to continue, "):
        save_config(tmp_path, GRPOConfig(policy=policy), continued=True)
    assert (tmp_path / "config.yaml").read_text() == before


def test_a_value_that_the_checkpoint_keeps_stays_in_the_configuration(tmp_path, caplog):
    save_config(tmp_path, GRPOConfig(), continued=False)
    before = (tmp_path / "config.yaml").read_text()
    changed = GRPOConfig(policy=PolicyConfig(optimizer=OptimizerConfig(lr=0.5)))
    for _ in range(2):
        caplog.clear()
        save_config(tmp_path, changed, continued=True)
        assert "policy.optimizer.lr was" in caplog.text
        assert "the checkpoint's value is kept" in caplog.text
    assert (tmp_path / "config.yaml").read_text() == before


def test_an_entry_that_a_continued_run_lacks_is_told(tmp_path, caplog):
    switches = PromptsConfig(template_switches={"enable_thinking": False})
    save_config(tmp_path, GRPOConfig(data=switches), continued=False)
    save_config(tmp_path, GRPOConfig(), continued=True)
    assert "data.template_switches.enable_thinking was False and is now None" in caplog.text


@pytest.mark.parametrize("content", ["", "run: {", "- a", "\ud800"])
def test_a_damaged_configuration_is_named(tmp_path, content):
    (tmp_path / "config.yaml").write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(UserError, match=r"config\.yaml is damaged, .*; restore it, or remove it"):
        save_config(tmp_path, GRPOConfig(), continued=True)
    (tmp_path / "config.yaml").unlink()
    save_config(tmp_path, GRPOConfig(), continued=True)


def test_a_job_that_is_queued_again_and_again_without_progress_ends(tmp_path, caplog, monkeypatch):
    in_vain = f"The run in {tmp_path} has been started 2 times after step 10 without saving"
    for step in (0, 0, 10, 10):
        note_start(tmp_path, step)
    assert not caplog.text
    note_start(tmp_path, 10)  # by hand: who resumes knows why
    assert in_vain in caplog.text
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    with pytest.raises(RunError, match="has been started 3 times after step 10 without"):
        note_start(tmp_path, 10)
    note_start(tmp_path, 20)
    note_start(tmp_path, 20)
    note_end(tmp_path)
    note_start(tmp_path, 20)
    (tmp_path / "starts.json").write_text('{"step": 20, "cou')
    note_start(tmp_path, 20)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RunError("the disk is full"), "The run ended here: the disk is full\n"),
        (StoppedError("Stopped on request after step 3."), "ended here: Stopped on request after"),
        (KeyboardInterrupt(), "The run ended here: Interrupted.\n"),
        (KeyError("a"), "KeyError: 'a'"),
    ],
)
def test_the_log_says_what_ended_a_run_and_how_to_go_on(tmp_path, capsys, error, said):
    folder = tmp_path / "a run" / "lr=1e-4,seed=0"  # as of a sweep
    config = small_config(tmp_path)
    config = config.replace(run=config.run.replace(dir=str(folder)))
    with pytest.raises(type(error)), Run(config, "grpo"):
        raise error
    log = (folder / "run.log").read_text()
    assert said in log
    command = f"nemo-like grpo '{folder}/config.yaml' 'run.dir=\"{folder}\"' run.resume=true\n"
    assert f"To continue from its latest checkpoint, if it has one: {command}" in log
    assert ("Traceback" in log) == isinstance(error, KeyError)
    assert (" ERROR " in log) == isinstance(error, Exception)  # not where one asked for the end
    assert "ended here" not in capsys.readouterr().err
    main([*shlex.split(command)[1:], "--cfg=job"])
    assert yaml.safe_load(capsys.readouterr().out)["run"]["dir"] == str(folder)
    summary = json.loads((folder / "summary.json").read_text())
    assert f"The run ended here: {summary['error']}" in log
    assert summary["next"] == command.strip()
    assert summary["exit_code"] == exit_code(error)
    run = find_runs([str(folder)])[0]
    assert run.state() == f"no step yet, ended with exit code {exit_code(error)}"
    assert run.outcome() == [f"It ended with: {summary['error']}", f"Next: {command.strip()}"]
    with Run(config, "grpo") as again:
        assert run.state() == "no step yet"
        again.finish()
    assert run.state() == "no step yet, finished"


@pytest.mark.parametrize(
    ("name", "overrides", "words"),
    [
        (
            "grpo",
            [f"data.train={ROWS}", f"data.validation={ROWS}", "environment.reward=math"],
            ["eval", "policy.model=a/final", "data.validation=", "environment.reward=math"],
        ),
        (
            "grpo",
            [
                *("environment.name=tools", "environment.options.tools=[calculate, python]"),
                *("data.tasks={gcd: {}}", "data.num_train_rows=99", "validation.temperature=0"),
                *("environment.rewards.right={function: math, weight: 2.5}", "loss.kl_coef=0.1"),
                "data.system_prompt='Think: a, b'",
            ],
            [
                *("eval", "policy.model=a/final", "data.tasks={gcd:{}}"),
                *('data.system_prompt="Think: a, b"', "environment.name=tools"),
                "environment.options={tools:[calculate,python]}",
                "environment.rewards={right:{function:math,weight:2.5}}",
                "validation.temperature=0",
            ],
        ),
        (
            "grpo",
            [
                *("environment.reward=judge", "environment.judge.url=http://a:1/v1"),
                *("environment.judge.model=m", "generation.max_new_tokens=99"),
                "environment.judge.verdicts={A: 1.0, B: 0.0}",
            ],
            [
                *("eval", "policy.model=a/final", "generation.max_new_tokens=99"),
                "environment.reward=judge",
                *("environment.judge.url=http://a:1/v1", "environment.judge.model=m"),
                "environment.judge.verdicts={A:1.0,B:0.0}",
            ],
        ),
        (
            "grpo",
            [
                *("generation.max_new_tokens=512", "validation.max_new_tokens=1024", "run.seed=7"),
                *(f"data.validation={ROWS}", "data.tasks={gcd: {}}", "policy.optimizer.lr=1e-5"),
                "environment.reward=math",
            ],
            [
                *("eval", "policy.model=a/final", "run.seed=7", "data.validation="),
                *("environment.reward=math", "validation.max_new_tokens=1024"),
            ],
        ),
        (
            "grpo",
            [
                f"data.train={ROWS}",
                "data.columns={prompt: q, answer: a}",
                "environment.reward=math",
            ],
            ["eval", "policy.model=a/final", "environment.reward=math"],
        ),
        (
            "grpo",
            [
                f"data.validation={{m: {{path: {ROWS}}}, gym: {{path: reasoning_gym}}}}",
                *("data.tasks={gcd: {}}", "data.num_validation_rows=9"),
                *("environment.name=guess", "environment.options={most digits: 3}"),
                *("validation.temperature=0", "validation.num_generations_per_prompt=2"),
            ],
            [
                *(
                    "eval",
                    "policy.model=a/final",
                    "data.validation={m:{path:",
                    "data.tasks={gcd:{}",
                ),
                *("data.num_validation_rows=9", "environment.name=guess"),
                *("environment.options={most digits:3}", "validation.temperature=0"),
            ],
        ),
        (
            "grpo",
            [
                *("generation.backend=replay", "generation.engine_kwargs={folder: /a}"),
                "policy.trust_remote_code=true",
            ],
            ["eval", "policy.model=a/final", "policy.trust_remote_code=true"],
        ),
        ("ppo", ["policy.dtype=bfloat16"], ["eval", "policy.model=a/final", "policy.dtype=bf"]),
        ("sft", ["cluster.gpus_per_node=4"], ["eval", "policy.model=a/final", "cluster.gpus_per_"]),
        ("rm", [], ["grpo", "environment.reward=reward_model", "environment.reward_model=a/final"]),
    ],
)
def test_the_next_command_is_one_that_can_be_typed(name, overrides, words):
    config = compose_config(CONFIGS, name, overrides)
    program, command, *typed = shlex.split(next_command(config, "a/final"))
    assert program == "nemo-like"
    for word, begin in zip([command, *typed], words, strict=True):
        assert word.startswith(begin)
    found = compose_config(CONFIGS, command, typed)
    if isinstance(config, SamplingRunConfig) and isinstance(found, SamplingRunConfig):
        assert found.environment == config.environment


def test_a_run_that_was_refused_for_its_rows_does_not_hold_its_folder(tmp_path, local_ray):
    """The same command, typed again with other rows, starts where nothing is lost."""
    rows, folder = tmp_path / "rows.jsonl", tmp_path / "run"
    options = [f"run.dir={folder}", f"data.train={rows}", "logging.sinks=[]"]
    for text, fault in (('{"prompt": "x"}', "a row needs 'messages'"), ("x", "line 1: not JSON")):
        rows.write_text(text)
        with pytest.raises(UserError, match=fault):
            run_config(compose_config(CONFIGS, "sft", options))
        assert (folder / "metrics.jsonl").is_file()
    compose_config(CONFIGS, "sft", options)
    (folder / "checkpoints" / "step_1").mkdir(parents=True)
    with pytest.raises(UserError, match="already holds a run"):
        compose_config(CONFIGS, "sft", options)
    shutil.rmtree(folder / "checkpoints")
    (folder / "metrics.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(UserError, match=r"already holds a run; continue it with run\.resume=true"):
        compose_config(CONFIGS, "sft", options)


def test_a_stop_that_comes_before_the_run_is_remembered(tmp_path, capsys):
    overrides = [f"run.dir={tmp_path}/run", "logging.sinks=[]"]
    config = compose_config(CONFIGS, "sft", overrides)

    def run():
        os.kill(os.getpid(), signal.SIGUSR1)
        with Run(config, "sft") as run:
            run.start_phase("data")

    before = signal.getsignal(signal.SIGUSR1)
    try:
        listen()
        with pytest.raises(SystemExit) as ended:
            end_on_error(run)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert ended.value.code == 75
    assert "Stopped on request before the first step" in capsys.readouterr().err
