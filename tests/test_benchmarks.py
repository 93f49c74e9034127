import argparse
import ast
import importlib
import json
import math
import os
import re
import signal
import sys
import time
from datetime import datetime
from pathlib import Path

import psutil
import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # scripts, which are no package

import conversations
import grpo
import grpo_verl
import mismatch
import offload
import starts
import workloads
from grpo_table import accuracies, floor_times, medians, steps_of, table
from recommendations import CASES, NOT_MEASURED
from workloads import WORKLOADS, coin, count_parameters, make_rows, prepare, read_rows, reward

from nemo_like.compose import registry
from nemo_like.config.section import keys_of
from nemo_like.observe.phase_trace import PhaseTrace
from tests.test_alarms import SETTINGS, faulty, find_alarms

ROOT = Path(__file__).parents[1]
TINY = WORKLOADS["tiny"]


@pytest.mark.parametrize(
    ("completion", "answer", "right"),
    [
        ("2 + 3 = 5.", "5", True),
        ("The answer is 1,234", "1234", True),
        ("It is 12,3456", "6", False),
        ("= -7", "-7", True),
        ("= \N{MINUS SIGN}7", "-7", True),
        ("9-16", "16", True),
        ("= 7", "-7", False),
        ("5.0", "5", True),
        ("5, or maybe 6", "5", False),
        ("3,4", "4", True),
        ("no idea", "0", False),
        ("", "0", False),
    ],
)
def test_the_last_number_of_a_completion_is_its_answer(completion, answer, right):
    assert reward("", completion, answer) == float(right)


def test_the_coin_has_two_sides_and_depends_on_the_text_alone():
    sides = [coin("", str(i), answer="1") for i in range(100)]
    assert sides == [coin("x", str(i)) for i in range(100)]
    assert 30 < sum(sides) < 70
    assert coin("", "\ud800") in (0.0, 1.0)


def test_prompts_are_the_same_each_time_and_others_for_another_seed(tmp_path):
    first = prepare(TINY, tmp_path / "a", steps=6, seed=0)
    again = prepare(TINY, tmp_path / "b", steps=6, seed=0)
    assert first.prompts.read_text() == again.prompts.read_text()
    rows = read_rows(first.prompts)
    assert len(rows) == 6 * TINY.num_prompts
    assert set(rows[0]) == {"prompt", "answer"}
    assert reward(rows[0]["prompt"], f"It is {rows[0]['answer']}.", rows[0]["answer"]) == 1
    other = read_rows(prepare(TINY, tmp_path / "a", steps=6, seed=1).prompts)
    assert not {row["prompt"] for row in rows} & {row["prompt"] for row in other}


def test_held_out_prompts_are_not_trained_on():
    rows = list(make_rows(TINY, 10, 0, set()))
    held_out = {rows[0]["prompt"], rows[4]["prompt"]}
    assert list(make_rows(TINY, 8, 0, held_out)) == rows[1:4] + rows[5:]


def test_parameters_are_counted_in_the_files(tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("qwen2", **workloads.SHAPES["tiny"])
    )
    model.save_pretrained(tmp_path)
    # q and o 64x64, k and v 64x32, three biases; gate, up, down; two norms
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 64 + 2 * 32 + 3 * 64 * 96 + 2 * 64
    assert count_parameters(tmp_path) == 512 * 64 + 2 * layer + 64


def record_of_ours() -> dict:
    """Steps of 2.0 s, but for the first (9 s); validation takes 5 s after the last."""
    records = [{"step": 0, "time": 100.0, "validation/reward": 0.25, "time/validation_s": 5.0}]
    ends = [109.0, 111.0, 113.0, 115.0, 117.0, 119.0, 126.0]
    for step, end in enumerate(ends, start=1):
        records.append(
            {
                "step": step,
                "time": end,
                "time/step_s": 1.9,
                "time/rollout_s": 1.0,
                "time/refit_s": 0.25,
                "time/train_s": 0.5,
                "rollout/reward": step / 10,
                "rollout/num_tokens": 100.0 * step,
            }
        )
    records[-1] |= {"validation/reward": 0.75, "time/validation_s": 5.0}
    return record("ours", records)


def record_of_trl() -> dict:
    records: list[dict] = [
        {
            "step": step,
            "wall_s": wall_s,
            "reward": 0.5,
            "tokens": 450.0,
            "generation_s": 1.5,
            "refit_s": 0.5,
        }
        for step, wall_s in enumerate([30.0, 9.0, 9.0, 4.0, 6.0, 4.0, 50.0], start=1)
    ]
    return record("trl", [*records, {"accuracy_before": 0.2, "accuracy_after": 0.8}])


def record_of_floor() -> dict:
    measured = {
        "num_parameters": 10**9,
        "prompt_tokens": 4000,
        "copy_bytes_per_s": 2e12,
        "logprobs": {"seconds": [0.7, 0.8, 5.0], "tokens": [440, 445, 450]},
        "tokens": {"seconds": [0.6, 0.6, 0.7], "tokens": [440, 445, 450]},
        "bare": {"seconds": [0.5, 0.5, 0.5], "tokens": [440, 445, 450]},
    }
    return record("floor", [measured])


def record(contender: str, records: list[dict]) -> dict:
    return {"contender": contender, "workload": {"name": "tiny"}, "gpu": "G", "records": records}


def test_a_step_of_ours_lasts_from_record_to_record_without_validation():
    steps = steps_of(record_of_ours())
    assert [step["wall_s"] for step in steps] == [9.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1.9]
    assert accuracies(record_of_ours()) == (0.25, 0.75)


def test_medians_are_of_steps_four_to_the_last_but_one():
    ours = medians(record_of_ours())
    assert ours == {
        "wall_s": 2.0,
        "tokens": 500.0,
        "rollout_s": 1.0,
        "refit_s": 0.25,
        "train_s": 0.5,
        "rest_s": 0.25,
        "num_steps": 3,
        "mean_s": pytest.approx((2.0 + 2.0 + 1.9) / 3),
    }
    trl = medians(record_of_trl())
    assert (trl["wall_s"], trl["rollout_s"], trl["rest_s"]) == (4.0, 1.5, 2.0)


def test_the_floor_is_generation_and_half_of_peak_and_one_copy():
    floor = floor_times(record_of_floor())
    assert floor["generation_s"] == 0.8
    assert floor["train_s"] == pytest.approx(6e9 * 4445 / 494.5e12)
    assert floor["refit_s"] == pytest.approx(2e9 / 2e12)
    assert floor["sum_s"] == pytest.approx(0.8 + 0.053934 + 0.001, abs=1e-6)


def test_the_table_has_the_ratios_of_what_is_there():
    records = [record("trl", []), record_of_floor(), record_of_trl(), record_of_ours()]
    lines = table(TINY, [*records, record("ours", [])])
    ratios = {line.split("  ")[0].strip(): line.split()[-1] for line in lines if " / " in line}
    assert ratios == {"ours / trl": "0.50", "ours / floor": "2.34", "rollout / floor": "1.25"}
    assert "  held-out reward 0.200 -> 0.800" in lines
    mean = f"{'  mean of 3 after the fourth':42}{20.0:8.3f} s"  # of 6, 4 and 50
    assert lines[lines.index(mean) - 1].startswith("trl: step (median of 3)")
    assert len(table(TINY, [])) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "ours,openrlhf"], "no contender openrlhf"),
        (["--steps", "4"], "the first three and the last are not measured"),
        (["policy.compile"], "policy.compile is no override"),
    ],
)
def test_wrong_arguments_are_refused_with_a_sentence(words, message, capsys):
    with pytest.raises(SystemExit):
        grpo.parse_arguments(["--workload", "tiny", "--out", "x.jsonl", *words])
    assert message in capsys.readouterr().err


def test_a_contender_that_hangs_is_ended_with_its_children(tmp_path):
    log = tmp_path / "log"
    child = "subprocess.Popen(['sleep', '60'], start_new_session=True)"
    script = f"import subprocess, time; print({child}.pid, flush=True); time.sleep(60)"
    result = grpo.run([sys.executable, "-c", script], log, limit_s=1.0)
    assert result["failed"]
    assert result["returncode"] < 0
    assert result["elapsed_s"] < 10
    child_pid = int(log.read_text())
    deadline = time.monotonic() + 10
    while runs(child_pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not runs(child_pid)


def test_a_run_that_need_not_save_is_ended_in_its_last_step(tmp_path, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(grpo, "set_environment", lambda: None)
    monkeypatch.setattr(grpo, "prepare", lambda *_: None)
    script = """
import pathlib, sys, time
with open(sys.argv[1], "w") as file:
    for step in range(5):
        print(f'{{"step": {step}, "time": 1.0}}', file=file, flush=True)
        time.sleep(0.1)
time.sleep(60)
"""

    def command(_workload, _inputs, _args, folder):
        result = folder / "metrics.jsonl"
        return [sys.executable, "-c", script, str(result)], result

    monkeypatch.setitem(grpo.COMMANDS, "ours", command)
    words = ["--workload", "tiny", "--only", "ours", "--steps", "5", "--work", str(tmp_path)]
    out = tmp_path / "out.jsonl"
    monkeypatch.setattr(sys, "argv", ["grpo.py", *words, "--out", str(out), "--unsaved"])
    with pytest.raises(SystemExit, match=r"^0$"):
        grpo.main()
    record = json.loads(out.read_text())
    assert not record["failed"]
    assert record["elapsed_s"] < 10
    assert [row["step"] for row in record["records"]][:5] == [0, 1, 2, 3, 4]


def runs(pid):
    """A dead process that nobody is there to reap does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_contender_that_fails_is_reported_with_the_end_of_its_output(tmp_path, capsys):
    result = grpo.run([sys.executable, "-c", "raise SystemExit('no GPU')"], tmp_path / "log", 60)
    assert (result["failed"], result["returncode"]) == (True, 1)
    assert "exit code 1" in (shown := capsys.readouterr().out)
    assert "no GPU" in shown


def test_our_command_names_a_reward_that_exists(tmp_path):
    args = grpo.parse_arguments(["--workload", "tiny", "--out", "x", "--steps", "5", "a.b=c"])
    inputs = workloads.Inputs(model=tmp_path, prompts=tmp_path / "p", validation=tmp_path / "v")
    command, metrics = grpo.ours_command(TINY, inputs, args, tmp_path)
    assert command[-1] == "a.b=c"
    assert f"data.validation={tmp_path / 'v'}" in command
    assert metrics == tmp_path / "run" / "metrics.jsonl"
    for workload in WORKLOADS.values():
        assert callable(getattr(workloads, workload.reward))
        assert workload.num_completions % workload.trl_rows == 0


def test_steps_of_verl_are_read_off_its_console():
    line = "(TaskRunner pid=7) step:3 - timing_s/gen:1.5 - timing_s/step:np.float64(4.25) - x:a"
    line += " - timing_s/update_weights:0.25 - response_length/mean:100.0"
    line += " - critic/rewards/mean:0.5"
    found = grpo_verl.step_numbers(f"\x1b[36m{line}\x1b[0m")
    assert found is not None
    assert (found["step"], found["wall_s"], found["generation_s"]) == (3, 4.25, 1.5)
    assert (found["refit_s"], found["mean_tokens"], found["reward"]) == (0.25, 100.0, 0.5)
    assert grpo_verl.step_numbers("(TaskRunner pid=7) steps: 3") is None


def test_steps_of_verl_last_from_end_to_end(tmp_path):
    says = "print(f'step:{i} - timing_s/step:9.0 - response_length/mean:3', flush=True)"
    script = f"import time\nfor i in (1, 2):\n    {says}\n    time.sleep(0.4)"
    out = tmp_path / "out.jsonl"
    assert grpo_verl.run([sys.executable, "-c", script], dict(os.environ), out, 16) == 0
    first, second = (json.loads(line) for line in out.read_text().splitlines())
    assert first["wall_s"] == 9.0
    assert 0.3 < second["wall_s"] < 5
    assert second["tokens"] == 48


def test_verl_is_asked_for_the_workload_as_it_is(tmp_path):
    args = argparse.Namespace(out=tmp_path / "v.jsonl", steps=2, gpu_memory_utilization=0.3)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "1 + 1", "answer": "2"}) + "\n")
    inputs = workloads.Inputs(model=tmp_path, prompts=prompts, validation=None)
    for name, tokens in (("smollm2", 32768), ("qwen7b", 16384)):
        found = grpo_verl.verl_settings(WORKLOADS[name], inputs, args)
        assert f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={tokens}" in found
        checkpoints = "actor_rollout_ref.model.enable_gradient_checkpointing="
        assert checkpoints + str(name == "qwen7b").lower() in found
    assert grpo_verl.compute_score("reward", "it is 2", "2", {"prompt": "1 + 1"}) == 1.0


def test_moments_are_timed_on_the_parameters_of_the_shape():
    shapes = offload.parameter_shapes(28)
    assert sum(math.prod(shape) for shape in shapes) == 7_615_616_512


def test_a_start_has_the_phases_of_all_processes_up_to_the_end_of_its_first_step(tmp_path):
    began = int(time.time())
    traces = {
        name: PhaseTrace(tmp_path / "logs", name) for name in ("driver", "policy-0", "engine")
    }
    traces["driver"].add("ray", began + 1.5, 3.0)
    traces["driver"].add("step", began + 10, 2.0)
    traces["policy-0"].add("train", began + 12, 0.5)
    traces["engine"].add("start", began + 5, 4.0)
    at = datetime.fromtimestamp(began + 8)
    said = f"nothing\nINFO {at:%m-%d %H:%M:%S} [loader.py:9] Loading took 2.9 GiB, 1.2 seconds\n"
    (tmp_path / "logs" / "generation-0.log").write_text(said)
    found = list(starts.phases(tmp_path, began))
    assert [(one["name"], one["begin"], one["end"]) for one in found] == [
        ("ray", 1.5, 4.5),
        ("Loading took 2.9 GiB, 1.2 seconds", None, 8),
        ("start", 5, 9),
        ("step", 10, 12),
    ]
    lines = starts.table({"run": 0, "start": "Start", "phases": found}).splitlines()
    assert lines[1].split() == ["1.50", "4.50", "3.00", "driver", "ray"]


def test_conversations_that_fail_or_hang_cost_their_own_rows_and_hold_up_none():
    found = conversations.measure(300, at_once=60, processes=2, longest_s=0.3)
    assert (found["bad"], found["lost"]) == (3, 3)
    assert (found["lost_though_good"], found["bad_though_kept"]) == (0, 0)
    assert found["ideal_s"] <= found["seconds"] < found["ideal_s"] + 15
    assert conversations.ideal_s([2, 1, 1, 1], 2) == 3


def test_each_recommendation_that_is_measured_is_one_that_a_report_or_an_alarm_gives():
    given = "validation.every_steps=14 (now 1) saves about 2.8 s of 5 s a step, 56%."
    found = re.search(CASES["validation"].says, given).groupdict()
    assert found == {"setting": "validation.every_steps=14", "saves": "2.8"}
    for case in CASES.values():
        if case.alarm:
            typed = dict(one.split("=") for one in case.faults)
            sampled = {"grpo.dynamic_sampling": "grpo.dynamic_sampling" in typed}
            lora = {"policy.lora.refit": typed.get("policy.lora.refit"), "policy.lora.rank": 16}
            (alarm,) = find_alarms(faulty(case.alarm), SETTINGS | sampled | lora)
            assert re.search(case.says, alarm.text), alarm.text


def test_every_setting_that_is_recommended_has_gained_what_it_claimed_or_says_why_not():
    """Keys are those that the code of alarms and reports writes out."""
    alarms = (ROOT / "nemo_like" / "observe" / "alarms.py").read_text()
    keys = set(re.findall(r"((?:[a-z]\w*\.)+[a-z_]+)=", alarms))
    report = (ROOT / "nemo_like" / "viewer" / "report.py").read_text()
    assert re.findall(r"\{(\w+)\}=\{", report) == ["size", "key"]
    keys |= {"grpo.num_prompts_per_step", "validation.every_steps", "checkpoint.every_steps"}
    records = (ROOT / "benchmarks/results/recommendations-cpu.jsonl").read_text().splitlines()
    measured = set()
    for record in map(json.loads, records):
        measured |= {one.partition("=")[0] for one in record["recommended"].split()}
        assert record["gain"] >= record["claimed_gain"] / 2, record
        # What differs is measured before completions are masked.
        after = record["case"] == "mismatch_mask"
        assert record.get("raised", [True, after]) == [True, after], record
    assert measured | NOT_MEASURED.keys() == keys
    assert not measured & NOT_MEASURED.keys()


def test_a_mismatch_by_hand():
    found = mismatch.gap(torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -2.0 - math.log(2)]))
    assert found["tokens"] == 2
    assert found["mean_abs"] == pytest.approx(math.log(2) / 2, abs=1e-6)
    assert found["mean_exp_abs"] == pytest.approx(1.5, abs=1e-6)
    a, b = torch.tensor([[[3.0, 4.0]], [[1.0, 0.0]]]), torch.zeros(2, 1, 2)
    assert mismatch.distances(a, b, torch.tensor([[[10.0, 0.0]], [[2.0, 0.0]]])) == [0.5, 0.5]


def test_scripts_import_what_the_package_has():
    """Also where they import it late, or run on a GPU alone."""
    scripts = [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "examples").rglob("*.py")]
    for script in scripts:
        for node in ast.walk(ast.parse(script.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nemo_like"):
                module = importlib.import_module(node.module)
                for name in node.names:
                    if not hasattr(module, name.name):
                        importlib.import_module(f"{node.module}.{name.name}")


def test_scripts_set_keys_that_exist():
    schemas = [registry.find(name).config for name in registry.names()]
    known = {key for schema in schemas for key, _ in keys_of(schema)}
    sections = {key.partition(".")[0] for key in known}
    scripts = {*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "benchmarks").glob("*.sh")}
    for script in scripts - {ROOT / "benchmarks" / "grpo_verl.py"}:  # those keys are verl's
        for key in re.findall(r"""(?<=["' (])([a-z]+(?:\.[a-z0-9_]+)+)=""", script.read_text()):
            if key.partition(".")[0] in sections:
                assert key in known, f"{script.name}: {key}"
