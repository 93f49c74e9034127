"""SFT, DPO and reward models learn, continue after a stop, and give what they promise."""

import json
import random
import re
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_like.algorithms import texts
from nemo_like.batch import keys
from nemo_like.compose.load import compose_config
from nemo_like.distributed.remote_batch import RemoteBatch
from nemo_like.errors import UserError
from nemo_like.observe.metrics import Metric, Reduce
from tests.small_runs import ROOT, SEEDS, records, run_config

pytestmark = pytest.mark.usefixtures("local_ray")

GENERATED = ("data.num_train_rows=640", "data.num_validation_rows=128")
FEW = "data.num_validation_rows=16"
SMALL = (
    "logging.sinks=[]",
    "cluster.call_timeout_s=120",
    "validation.every_steps=100",
)


def run(name, folder, *overrides):
    config = compose_config(ROOT / "configs", name, [*SMALL, f"run.dir={folder}", *overrides])
    run_config(config)
    return records(folder)


def even_is_better(folder):
    """Two files of pairs: of two answers to a sum the even one is chosen. No sum is in both."""
    draw = random.Random(0)
    sums = draw.sample([(a, b) for a in range(40) for b in range(40)], 704)
    for name, part in (("train", sums[:640]), ("validation", sums[640:])):
        rows = []
        for a, b in part:
            even = 2 * draw.randrange(5, 50)
            odd = 2 * draw.randrange(5, 50) + 1
            rows.append({"prompt": f"{a} + {b} =", "chosen": str(even), "rejected": str(odd)})
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return [f"data.{name}={folder}/{name}.jsonl" for name in ("train", "validation")]


@pytest.mark.parametrize("seed", SEEDS)
def test_sft_learns(seed, tmp_path):
    steps = run("sft", tmp_path, f"run.seed={seed}", "sft.max_steps=20", *GENERATED)
    assert steps[20]["validation/loss"] < 0.82 * steps[0]["validation/loss"]


@pytest.mark.parametrize("seed", SEEDS)
def test_dpo_learns(seed, tmp_path):
    files = even_is_better(tmp_path)
    steps = run("dpo", tmp_path / "run", f"run.seed={seed}", "dpo.max_steps=20", *files)
    assert steps[0]["validation/loss"] == pytest.approx(0.693147, abs=1e-5)
    assert steps[20]["validation/accuracy"] > 0.9
    assert steps[20]["validation/reward_margin"] > 0.5


@pytest.mark.parametrize("seed", SEEDS)
def test_a_reward_model_learns(seed, tmp_path):
    files = even_is_better(tmp_path)
    steps = run("rm", tmp_path / "run", f"run.seed={seed}", "reward_model.max_steps=40", *files)
    assert steps[0]["validation/loss"] == pytest.approx(0.693147, abs=1e-5)
    assert steps[40]["validation/accuracy"] > 0.9
    assert steps[40]["validation/loss"] < 0.5


NUMBERS = ("train/loss", "train/grad_norm", "validation/loss")


def assert_same(actual, expected, tolerance=0.0):
    assert actual.keys() == expected.keys()
    for step, record in expected.items():
        for name in NUMBERS:
            if name in record:
                close = pytest.approx(record[name], rel=tolerance, abs=tolerance)
                assert actual[step][name] == close, (step, name)


def test_a_stopped_run_goes_on_as_if_it_had_not_been(tmp_path):
    options = ("checkpoint.every_steps=2", "data.num_train_rows=80", FEW, "sft.num_epochs=2")
    straight = run("sft", tmp_path / "straight", *options)
    # Neither start-up nor validations and checkpoints are the driver's or a step's.
    assert all(one["time/driver_s"] >= 0 for step, one in straight.items() if step)
    assert not any("time/workers_s" in one for step, one in straight.items() if step)
    assert list(straight) == list(range(7))  # 3 steps a pass, the last one of 16 rows
    run("sft", tmp_path / "stopped", *options[:3], "sft.max_steps=4", "checkpoint.export=false")
    options += ("run.resume=true",)
    # It would end with rows left over, or run out of rows.
    with pytest.raises(
        UserError,
        match=r"makes 4 steps, .* left make 1: .*sft\.num_rows_per_step.* and leave num_epochs out",
    ):
        run("sft", tmp_path / "stopped", *options, "sft.num_rows_per_step=64")
    resumed = run("sft", tmp_path / "stopped", *options)
    assert_same({step: resumed[step] for step in straight}, straight)


def test_rows_of_equal_text_pass_the_checks_of_ranks(tmp_path):
    for name, count in (("train", 8), ("validation", 2)):
        row = {"prompt": f"Say {name}", "completion": "hi"}
        (tmp_path / f"{name}.jsonl").write_text(f"{json.dumps(row)}\n" * count)
    files = [f"data.{name}={tmp_path}/{name}.jsonl" for name in ("train", "validation")]
    checked = ("policy.debug.checks=true", "cluster.cpu_workers_per_node=2", "sft.max_steps=1")
    steps = run("sft", tmp_path / "run", *checked, *files, "sft.num_rows_per_step=8")
    assert steps[1]["train/loss"] > 0


def test_held_out_rows_come_to_a_model_in_parts_with_the_counts_of_all(monkeypatch):
    monkeypatch.setattr(texts, "_ROWS_PER_CALL", 4)
    tokens = torch.tensor([1, 2, 3, 4, 5, 6, 0, 8, 9, 10])  # a pair does not train
    rows = {keys.NUM_LOSS_TOKENS: tokens, keys.SAMPLE_MASK: torch.ones(10, dtype=torch.bool)}
    called = []

    def evaluate(batch, loss, counts, *, rows_per_unit):
        called.append(batch.rows[keys.NUM_LOSS_TOKENS].tolist())
        share = len(batch) / counts.sequences
        return {"train/loss": Metric(share, reduce=Reduce.sum), "of": Metric(counts.tokens)}

    session = SimpleNamespace(run=SimpleNamespace(span=lambda _: nullcontext()))
    live: Any = SimpleNamespace(
        held_out=RemoteBatch(lengths=tokens + 1, rows=rows),
        policy=SimpleNamespace(evaluate=evaluate),
        rows_per_unit=2,
        session=session,
        loss=object(),
    )
    found = texts.Texts.validate(live, 1)
    assert called == [[1, 2, 3, 4], [5, 6, 9, 10]]
    assert (found["validation/loss"].value, found["validation/of"].value) == (1.0, 40)


def test_two_ranks_change_nothing(tmp_path):
    rows = ("data.num_train_rows=96", FEW)
    options = ("dpo.max_steps=3", "loss.kind=ipo", "loss.sft_coef=0.1", *rows)
    one = run("dpo", tmp_path / "one", *options)
    two = run(
        "dpo",
        tmp_path / "two",
        *options,
        "cluster.cpu_workers_per_node=2",
        "cluster.cpus_per_worker=0.5",
        "policy.batching=shared",
        "policy.micro_batch_tokens=256",
    )
    assert_same(two, one, tolerance=1e-5)


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("sft", ["data.validation=/no/such.jsonl"], "data.validation=/no/such.jsonl: no such file"),
        ("sft", ["data.max_length=1"], "data.max_length=1 must be at least 2"),
        ("sft", ["data.max_length=9000"], "data.max_length=9000 is above the 512 tokens"),
        ("sft", ["sft.num_epochs=2", "sft.max_steps=3"], "sft.num_epochs=2 would have no effect"),
        ("sft", ["cluster.num_generation_workers=1"], "this run samples no completions"),
        ("dpo", ["dpo.num_pairs_per_step=0"], "dpo.num_pairs_per_step=0 must be at least 1"),
        ("dpo", ["loss.beta=0"], "loss.beta=0 must be"),
        (
            "rm",
            ["cluster.cpu_workers_per_node=2", "policy.parallel.tensor_parallel_size=2"],
            "tensor_parallel_size=2 does not go with a scalar head",
        ),
        ("rm", ["policy.scheduler.warmup_steps=200"], "warmup_steps=200 must be below"),
    ],
)
def test_wrong_input_ends_with_one_sentence(name, overrides, message, tmp_path):
    with pytest.raises(UserError, match=re.escape(message)):
        run(name, tmp_path, *overrides)
