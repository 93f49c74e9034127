"""Evaluation: estimators by hand, checkpoints of any kind, and the same numbers on any layout."""

import json
import math
import shutil
from dataclasses import asdict
from fractions import Fraction
from itertools import combinations
from pathlib import Path

import pytest
from transformers import MistralConfig, MistralForCausalLM

from nemo_like.algorithms.eval import loop
from nemo_like.algorithms.eval.config import EvalConfig, EvalSection
from nemo_like.algorithms.eval.report import Measured, table
from nemo_like.algorithms.eval.statistics import (
    majority_at,
    mean_of_prompts,
    pass_at,
    share_of_prompts,
)
from nemo_like.compose.load import compose_config
from nemo_like.config.sampling import ValidationConfig
from nemo_like.data.datasets import Row
from nemo_like.errors import UserError
from nemo_like.rewards.protocol import RewardResult
from nemo_like.rollout.trajectory import Sample
from tests.small_runs import ROOT, run_config

SMALL = ("generation.backend=hf", "generation.max_new_tokens=32", "data.num_validation_rows=8")


def evaluate(folder, *overrides, small=SMALL):
    """Run to the end; returns eval.json and the samples."""
    config = compose_config(ROOT / "configs", "eval", [*small, f"run.dir={folder}", *overrides])
    run_config(config)
    samples = [json.loads(line) for line in (folder / "samples.jsonl").open()]
    return json.loads((folder / "eval.json").read_text()), samples


def refusal(*overrides):
    with pytest.raises(UserError) as error:
        compose_config(ROOT / "configs", "eval", overrides)
    return str(error.value)


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (4, 1, 2, 0.5),
        (8, 3, 4, 0.928571),
        (5, 0, 5, 0),
        (5, 1, 5, 1),
        (4, 3, 2, 1),
        (4, 1, 1, 0.25),
    ],
)
def test_pass_at_k_is_that_of_its_paper(n, c, k, expected):
    assert float(pass_at(n, c, k)) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 6, 7])
def test_majority_at_k_is_its_mean_over_all_subsets(k):
    """Three answers, a tie between two of them, one completion without an answer."""
    votes = [("4", True)] * 2 + [("5", False)] * 2 + [("04", True), ("", False), ("7", False)]
    total, subsets = Fraction(0), list(combinations(votes, k))
    for subset in subsets:
        answers = [answer for answer, _ in subset if answer]
        most = max((answers.count(answer) for answer in answers), default=0)
        winners = [dict(votes)[answer] for answer in set(answers) if answers.count(answer) == most]
        total += Fraction(sum(winners), max(1, len(winners)))
    assert majority_at(votes, k) == total / len(subsets)


def test_majority_by_hand():
    votes = [("4", True), ("4", True), ("5", False)]
    assert majority_at(votes, 1) == Fraction(2, 3)
    assert majority_at(votes, 2) == Fraction(2, 3)  # (4,4) wins; (4,5) is drawn by lot, twice
    assert majority_at(votes, 3) == 1
    assert majority_at([("", False), ("", False)], 2) == 0
    assert majority_at([("4", True), ("4", False)], 2) == Fraction(1, 2)


def test_majority_of_many_completions_takes_no_time():
    votes = [(str(i % 40), i % 40 == 0) for i in range(80)]
    assert 0 < majority_at(votes, 40) < 1


def test_the_interval_is_over_prompts():
    """Means 0, 1/2 and 1: deviation 1/2, standard error 1/2 / sqrt(3)."""
    found = mean_of_prompts([[0, 0], [0, 1], [1, 1]])
    assert found.mean == 0.5
    assert found.high - found.mean == pytest.approx(1.959964 * 0.5 / math.sqrt(3), abs=1e-6)
    assert found.mean - found.low == pytest.approx(found.high - found.mean)
    more = mean_of_prompts([[0, 0] * 50, [0, 1] * 50, [1, 1] * 50])
    assert more == found, "copies of completions add no certainty"
    assert mean_of_prompts([[0, 1]]).low is None
    assert mean_of_prompts([[0.7], [0.7]]).low is None, "no spread is not certainty"


def test_the_interval_of_a_share_is_wilsons_and_has_a_width_where_all_or_none_pass():
    """Numbers of Wilson's interval for n trials; one prompt more or less certain by its means."""
    for passed, low, high in ((10, 0.722467, 1.0), (0, 0.0, 0.277533), (8, 0.490162, 0.943318)):
        found = share_of_prompts([[1.0]] * passed + [[0.0]] * (10 - passed))
        assert (found.low, found.high) == pytest.approx((low, high), abs=1e-6)
        assert found.low <= found.mean == passed / 10 <= found.high
    spread, less = share_of_prompts([[0, 0], [1, 1]]), share_of_prompts([[0, 0, 1], [0, 1, 1]])
    assert spread.mean == less.mean
    assert less.high - less.low < spread.high - spread.low
    assert share_of_prompts([[0, 1], [0, 1]]).low is None
    assert share_of_prompts([[1]]).low is None


def sample(prompt, index, reward, answer="", num_tokens=3, truncated=False):
    score = RewardResult(reward=reward, answer=answer, error=None if reward is not None else "no")
    return Sample(
        prompt=prompt,
        index=index,
        text="t",
        result=score,
        num_tokens=num_tokens,
        truncated=truncated,
    )


def measured(**changes):
    config = EvalConfig(
        validation=ValidationConfig(num_generations_per_prompt=2), eval=EvalSection(**changes)
    )
    rows = [
        Row(index=i, messages=({"role": "user", "content": "q"},), fields={"kind": kind})
        for i, kind in enumerate("aab")
    ]
    return Measured(config, rows)


def test_a_failed_reward_is_left_out_and_counted():
    """Prompt 0: 1, 0; prompt 1: 0.5 and a failure; prompt 2: two failures."""
    found = measured(pass_at=[1, 2], category_field="kind")
    records = list(
        found.add(
            [
                sample(0, 0, 1.0),
                sample(0, 1, 0.0, num_tokens=9, truncated=True),
                sample(1, 0, 0.5, num_tokens=4),
                sample(1, 1, None, num_tokens=5),
                sample(2, 0, None, num_tokens=6),
                sample(2, 1, None),
            ]
        )
    )
    report = found.report()
    assert [record["reward"] for record in records] == [1.0, 0.0, 0.5, None, None, None]
    assert (report["num_prompts"], report["num_completions"], report["num_failed"]) == (3, 6, 3)
    assert report["reward"]["mean"] == 0.5
    assert report["reward"]["num_prompts"] == 2
    assert report["accuracy"]["mean"] == 0.25
    assert report["pass_at"]["1"] == report["accuracy"]
    assert report["pass_at"]["2"]["mean"] == 1.0
    assert report["pass_at"]["2"]["num_prompts"] == 1, "the other has one scored completion"
    assert list(report["categories"]) == ["a"], "all of b failed"
    assert report["categories"]["a"]["reward"]["mean"] == 0.5
    assert report["completion_tokens"] == {"mean": 5.0, "median": 4.5, "min": 3, "max": 9}
    assert report["truncated_share"] == 1 / 6
    assert "all pass@2" in table(report)
    assert "the reward failed on 3" in table(report)


def test_a_majority_needs_answers():
    found = measured(majority_at=[2])
    list(found.add([sample(0, 0, 1.0, answer=None), sample(0, 1, 1.0, answer=None)]))
    with pytest.raises(UserError, match=r"eval.majority_at=\[2\] needs answers .*'answer'"):
        found.report()
    list(found.add([sample(1, 0, 1.0, answer="3"), sample(1, 1, 1.0, answer="3")]))
    assert found.report()["majority_at"]["2"]["mean"] == 0.5
    found = measured(majority_at=[1, 3])
    votes = ((1.0, "3"), (1.0, "3"), (0.0, "4"))
    list(found.add([sample(0, i, reward, answer) for i, (reward, answer) in enumerate(votes)]))
    shares = {k: one["mean"] for k, one in found.report()["majority_at"].items()}
    assert shares == {"1": pytest.approx(2 / 3), "3": 1.0}


def test_rewards_have_the_interval_of_a_mean_and_accuracy_that_of_a_share():
    found = measured(pass_at=[1])
    rewards = [[3.0, 3.0], [-1.0, 1.0], [1.0]]
    for prompt, own in enumerate(rewards):
        list(found.add([sample(prompt, i, reward, "same") for i, reward in enumerate(own)]))
    report = found.report()
    assert report["reward"] == asdict(mean_of_prompts(rewards))
    accuracy = share_of_prompts([[1, 1], [0, 1], [1]])
    assert report["accuracy"] == report["pass_at"]["1"] == asdict(accuracy)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["eval.pass_at=[2]"], "eval.pass_at=[2]: 2 must be between 1 and"),
        (["eval.majority_at=[0]"], "eval.majority_at=[0]: 0 must be between 1 and"),
        (
            ["validation.temperature=0", "validation.num_generations_per_prompt=2"],
            "would sample the same completion again",
        ),
        (["validation.temperature=0", "validation.top_k=5"], "validation.temperature=0 is greedy"),
        (["model=smollm2"], "also says how to train, and an evaluation trains nothing; set policy"),
        (["policy.optimizer.lr=1.0"], "an evaluation trains nothing"),
        (["mismatch.max_mean_abs=1"], "only the engine computes logprobs"),
        (["validation.every_steps=1"], "an evaluation measures once"),
        (["generation.temperature=0.5"], "samples as the section validation says"),
        (["data.train=rows.jsonl"], "set data.validation"),
        (["policy.model=/no/such"], "no such folder"),
    ],
    ids=str,
)
def test_what_cannot_be_measured_is_refused(overrides, message):
    assert message in refusal(*overrides)


@pytest.fixture(scope="module")
def exported(straight, tmp_path_factory):
    """An evaluation of a finished run's final/."""
    return evaluate(tmp_path_factory.mktemp("eval"), f"policy.model={straight / 'final'}")


def test_an_evaluation_repeats_the_validation_of_training(straight, exported):
    """Same rows, seeds, temperature, prompts and reward: the same completions."""
    report, samples = exported
    summary = json.loads((straight / "summary.json").read_text())
    assert report["reward"]["mean"] == pytest.approx(summary["val_reward_end"], abs=1e-12)
    assert report["accuracy"]["mean"] == pytest.approx(summary["val_accuracy_end"], abs=1e-12)
    assert len(samples) == 8
    assert all(one["prompt"] and one["completion"] for one in samples)


def test_an_evaluation_that_was_ended_starts_over_in_its_folder(exported, straight, tmp_path):
    folder = tmp_path / "eval"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    (folder / "samples.jsonl").write_text('{"id": 0}\n')
    report, samples = evaluate(folder, f"policy.model={straight / 'final'}")
    assert (report, samples) == exported
    assert "already holds a run" in refusal(f"run.dir={folder}")


def test_a_checkpoint_is_evaluated_as_it_is(straight, exported, tmp_path):
    """Two workers: another layout changes no completion."""
    checkpoint = straight / "checkpoints" / "step_6"
    report, samples = evaluate(
        tmp_path,
        f"policy.model={checkpoint}",
        "cluster.cpu_workers_per_node=2",
        "eval.category_field=task",
    )
    for one in samples:
        assert one.pop("category") == "chain_sum"
    assert samples == [{k: v for k, v in one.items() if k != "category"} for one in exported[1]]
    assert report["reward"] == exported[0]["reward"]
    assert report["categories"]["chain_sum"]["reward"] == report["reward"]


def test_a_checkpoint_with_adapters_is_evaluated_with_its_own(tmp_path):
    """With another alpha they would weigh more, and nothing else would tell."""
    checkpoint = tmp_path / "checkpoints" / "step_2"
    checkpoint.mkdir(parents=True)
    (checkpoint / "driver.json").touch()
    lora = "{rank: 4, alpha: 16.0, targets: []}"
    (tmp_path / "config.yaml").write_text(f"policy: {{model: embedded, lora: {lora}}}")
    model = f"policy.model={checkpoint}"
    assert "policy.lora.rank=0 is not that of the checkpoint" in refusal(model)
    said = refusal(model, "policy.lora.rank=4", "policy.lora.alpha=64")
    assert "policy.lora.alpha=64.0 is not that of the checkpoint" in said
    assert said.endswith("set it to 16.0.")


def test_a_model_that_trains_with_padded_rows_alone_is_evaluated(tmp_path, tiny_model, local_ray):
    """An evaluation has no key for rows of the policy, as it computes nothing there."""
    source = Path(shutil.copytree(tiny_model(), tmp_path / "model"))
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    ids = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
    vocab = json.loads((source / "config.json").read_text())["vocab_size"]
    config = MistralConfig(vocab_size=vocab, sliding_window=32, **shape, **heads, **ids)
    MistralForCausalLM(config).save_pretrained(source)
    report, _ = evaluate(tmp_path / "eval", f"policy.model={source}")
    assert report["num_prompts"] == 8


def test_another_checkpoint_gives_other_completions(exported, tmp_path, local_ray):
    _, samples = evaluate(tmp_path, "validation.num_generations_per_prompt=2")
    assert [one["index"] for one in samples] == [0, 1] * 8
    assert [one["completion"] for one in samples[::2]] != [one["completion"] for one in exported[1]]


def test_a_checkpoint_out_of_place_or_damaged_says_so(straight, tmp_path, local_ray):
    alone = shutil.copytree(straight / "checkpoints" / "step_6", tmp_path / "x" / "y" / "step_6")
    assert "which names its model, cannot be read" in refusal(f"policy.model={alone}")
    assert "give its final/" in refusal(f"policy.model={straight}")
    (tmp_path / "x" / "config.yaml").write_text("reward_model: {}\npolicy: {model: embedded}\n")
    assert "a checkpoint of a reward model" in refusal(f"policy.model={alone}")
    (tmp_path / "x" / "config.yaml").write_text("policy: {model: embedded}\n")
    (alone / "policy" / "index.json").write_bytes(b"")
    with pytest.raises(UserError, match=r"is damaged: policy/index.json has changed"):
        evaluate(tmp_path / "run", f"policy.model={alone}")
    with pytest.raises(UserError, match="is a checkpoint, not a model; give the folder final/"):
        compose_config(ROOT / "configs", "grpo", [f"policy.model={alone}"])


def test_rows_of_a_file_are_scored_by_their_reward_function(tmp_path, local_ray, monkeypatch):
    rows = [{"prompt": "1+1=", "answer": "2", "kind": k} for k in ("a", "b", "b")]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "mine.py").write_text(
        "def reward(prompt, completion, kind, **fields):\n"
        "    return {'reward': 1.0 if kind == 'a' else 0.5, 'answer': kind}\n"
    )
    options = [
        f"data.validation={tmp_path / 'rows.jsonl'}",
        f"environment.reward={tmp_path / 'mine.py'}:reward",
        "validation.num_generations_per_prompt=2",
        "eval.majority_at=[2]",
    ]
    report, samples = evaluate(
        tmp_path / "run", *options, "eval.category_field=kind", small=SMALL[:2]
    )
    assert report["reward"]["mean"] == pytest.approx(2 / 3)
    assert report["majority_at"]["2"]["mean"] == pytest.approx(1 / 3)
    assert report["categories"]["b"]["reward"]["mean"] == 0.5
    assert [one["answer"] for one in samples] == ["a", "a", "b", "b", "b", "b"]
    (tmp_path / "mine.py").write_text(
        "def reward(prompt, completion, kind, **fields):\n    assert kind == 'a', 'no score'\n"
        "    return 1.0\n"
    )
    monkeypatch.setattr(loop, "PROMPTS_AT_ONCE", 1)
    report, _ = evaluate(tmp_path / "one", *options[:3], small=SMALL[:2])
    assert (report["num_failed"], report["reward"]["num_prompts"]) == (4, 1)
    with pytest.raises(UserError, match=r"row 0 of data.validation has no such field .*answer"):
        evaluate(tmp_path / "other", *options, "eval.category_field=sort", small=SMALL[:2])
