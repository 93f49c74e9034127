"""What a step asks engines for, and how their answers become rows; no engine and no Ray."""

import asyncio
import hashlib
import json
import pickle
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nemo_like.batch import keys
from nemo_like.data.datasets import Row
from nemo_like.data.loader import GroupFeed, PromptLoader
from nemo_like.errors import RunError
from nemo_like.generation.protocol import Completion, FinishReason, SamplingParams
from nemo_like.generation.worker import Generation
from nemo_like.observe.metrics import merge, values
from nemo_like.observe.sinks import JsonlFile
from nemo_like.rewards.function import to_result
from nemo_like.rewards.protocol import RewardResult
from nemo_like.rollout.failures import FILE, RewardFailures
from nemo_like.rollout.rounds import rollout_metrics
from nemo_like.rollout.sources import RolloutSource
from nemo_like.rollout.trajectory import (
    RolloutTask,
    collate_rows,
    collate_tokens,
    first_rows,
    seed_of,
    single_turn,
)
from nemo_like.rollout.worker import RolloutResult, RolloutWorker, _metrics
from tests.small_runs import records, small_config


def rows_of(tasks):
    """Columns of completions of eight tokens that were scored with 1 and 0 in turn."""
    count = len(tasks)
    return {
        keys.REWARDS: torch.arange(count).double() % 2,
        keys.SAMPLE_MASK: torch.ones(count, dtype=torch.bool),
        keys.NUM_LOSS_TOKENS: torch.full((count,), 8),
        keys.TRUNCATED: torch.zeros(count, dtype=torch.bool),
        keys.GROUP_IDS: torch.tensor([task.group for task in tasks], dtype=torch.int64),
        keys.SIBLINGS: torch.tensor([task.index for task in tasks], dtype=torch.int64),
        keys.SEEDS: torch.tensor([task.seed for task in tasks], dtype=torch.int64),
    }


def result_of(tasks, rank=0):
    return RolloutResult(
        tokens="a reference",
        lengths=torch.full((len(tasks),), 10),
        rows=rows_of(tasks),
        metrics={},
        errors={},
        dropped_metrics={},
        rank=rank,
        seconds=1.0 + rank,
    )


class Replicas:
    """The handle of generation, and its group: remembers every task and answers it at once."""

    def __init__(self, num):
        self.world_size, self.group, self.rounds = num, self, []
        self.sampling = []
        self.rounds_before_sleep = []

    def sleep(self):
        self.rounds_before_sleep.append(len(self.rounds))

    timeout_s = 0.0

    def waiting(self, *_, **__):
        return self

    def scatter(self, _, requests):
        self.rounds.append([task for request in requests for task in request.tasks])
        self.sampling.append(requests[0].sampling)
        return [result_of(one.tasks, rank) for rank, one in enumerate(requests)]


CONFIG = small_config("never-made", "grpo.num_generations_per_prompt=2", "run.seed=3")


def source_of(num_replicas=2, config=CONFIG):
    replicas = Replicas(num_replicas)
    loader = PromptLoader(range(100), fingerprint="", seed=0, shuffle=False)
    source = RolloutSource(
        config,
        generation=replicas,  # pyright: ignore
        sync=SimpleNamespace(is_due=False, give_to_policy=replicas.sleep),  # pyright: ignore
        feed=GroupFeed(loader),  # pyright: ignore
        validation_rows=range(4),  # pyright: ignore
        stop_token_ids=(2,),
        failures=RewardFailures(CONFIG.environment, Path("never-made"), -1),
        span=lambda _: nullcontext(),
        show=lambda step, samples: None,
    )
    return source, replicas


def seeds(batch):
    return batch.rows[keys.SEEDS].tolist()


def test_a_seed_depends_on_every_part_of_a_trajectorys_place():
    digest = hashlib.blake2b(b"0/train/2/3", digest_size=8).digest()
    first = seed_of(0, "train", 2, 3)
    assert first == int.from_bytes(digest, "big") // 2  # other seeds would be other runs
    others = [(9, "train", 2, 3), (0, "validation", 2, 3), (0, "train", 9, 3), (0, "train", 2, 9)]
    assert len({first, *(seed_of(*other) for other in others)}) == 5


def test_each_step_draws_with_seeds_of_its_own_however_many_replicas_there_are():
    source, _ = source_of()
    steps = [seeds(source.next_batch(step)[0]) for step in (1, 2)]
    assert len({*steps[0], *steps[1]}) == 16
    assert {seed_of(CONFIG.run.seed, "train", 0, index) for index in (0, 1)} < {*steps[0]}
    again, _ = source_of(num_replicas=1)
    assert sorted(seeds(again.next_batch(1)[0])) == sorted(steps[0])


def test_training_and_validations_sample_by_settings_of_their_own():
    own = [
        "generation={temperature: 0.7, max_new_tokens: 9, stop: [end]}",
        "validation={temperature: 0.2, top_p: 0.9, top_k: 4}",
    ]
    for most in (9, 20):
        validation = own if most == 9 else [*own, f"validation.max_new_tokens={most}"]
        source, replicas = source_of(config=small_config("never-made", *validation))
        source.next_batch(1)
        source.validate(1)
        ends = {"stop": ("end",), "stop_token_ids": (2,)}
        assert replicas.sampling == [
            SamplingParams(temperature=0.7, max_new_tokens=9, **ends),
            SamplingParams(temperature=0.2, top_p=0.9, top_k=4, max_new_tokens=most, **ends),
        ]


def test_what_a_step_has_sampled_is_used_up():
    source, _ = source_of()
    source.next_batch(1)
    feed = source._feed
    num_drawn = feed.loader.num_drawn
    assert (feed.first_open, feed.used) == (num_drawn, ())
    assert feed.state() == feed.loader.state() | {"first": num_drawn, "num_drawn": num_drawn}


def test_engines_that_sleep_or_are_being_refitted_hold_no_version():
    group = SimpleNamespace(call=lambda *_: None, submit=lambda *_: None)
    generation = Generation(group)  # pyright: ignore
    generation.weight_version = 3
    generation.submit_load(4, adapters_only=False)
    assert generation.weight_version is None
    generation.weight_version = 4
    generation.sleep()
    assert generation.weight_version is None


def test_validations_draw_with_the_same_seeds_at_every_step_and_no_training_step_does():
    source, replicas = source_of()
    for step in (1, 7):
        source.validate(step)
    trained = seeds(source.next_batch(1)[0])
    drawn = [{task.seed for task in tasks} for tasks in replicas.rounds]
    assert drawn[0] == drawn[1]
    assert not drawn[0] & set(trained)


def test_prompts_sampled_in_place_of_others_have_numbers_and_seeds_of_their_own():
    source, replicas = source_of()

    def odd(batch):
        return batch.rows[keys.GROUP_IDS] % 2 == 1

    batch, metrics = source.next_batch(1, odd)
    first, second, third = replicas.rounds
    assert [len(tasks) // 2 for tasks in replicas.rounds] == [4, 2, 2]  # 4, then what is missing
    assert {task.group for task in second} == {4, 5}
    assert [task.row for task in third[::2]] == [6, 7]
    assert len({task.seed for tasks in replicas.rounds for task in tasks}) == 16
    assert sorted(set(batch.rows[keys.GROUP_IDS].tolist())) == [1, 3, 5, 7]
    assert values(metrics)["rollout/kept_share"] == 0.5
    assert len(first) == 8
    assert replicas.rounds_before_sleep == [3]  # shared memory goes to the policy once, at the end


def test_more_failed_rewards_than_are_allowed_stop_a_run(tmp_path):
    """``environment.max_failed_share``."""
    rows = {
        keys.GROUP_IDS: torch.arange(4),
        keys.SIBLINGS: torch.zeros(4),
        keys.SAMPLE_MASK: torch.tensor([True, False, False, True]),
    }
    results = [SimpleNamespace(errors={"no judge": 2}, dropped_metrics={})]
    RewardFailures(CONFIG.environment, tmp_path, -1).check(1, "train", rows, results)
    environment = CONFIG.environment.replace(max_failed_share=0.4)
    with pytest.raises(RunError, match=r"2 of 4 completions of step 1, more than .*0\.4.*no judge"):
        RewardFailures(environment, tmp_path, -1).check(1, "train", rows, results)


def test_a_round_whose_rewards_all_fail_is_a_part_of_its_step(tmp_path):
    """Four groups, one of which is sampled once more: 2 of 10 completions have no reward."""
    source, replicas = source_of(num_replicas=1)
    source._failures = RewardFailures(CONFIG.environment, tmp_path, -1)
    scatter = replicas.scatter

    def failing(method, requests):
        results = scatter(method, requests)
        if len(replicas.rounds) == 2:
            results[0].rows[keys.SAMPLE_MASK][:] = False
            results[0].errors["late"] = 2
        return results

    replicas.scatter = failing
    source.next_batch(1, lambda batch: batch.rows[keys.GROUP_IDS] > 0)
    (record,) = map(json.loads, (tmp_path / FILE).read_text().splitlines())
    assert (record["failed"], record["of"], record["reasons"]) == (2, 10, {"late": 2})


def test_failures_of_an_evaluation_are_those_of_a_validation(tmp_path):
    source, replicas = source_of(num_replicas=1)
    source._failures = RewardFailures(CONFIG.environment, tmp_path, -1)
    scatter = replicas.scatter

    def failing(method, requests):
        results = scatter(method, requests)
        results[0].rows[keys.SAMPLE_MASK][:1] = False
        results[0].errors["late"] = 1
        return results

    replicas.scatter = failing
    source.sample(1, [0, 1], 0, CONFIG.validation)  # pyright: ignore
    (record,) = map(json.loads, (tmp_path / FILE).read_text().splitlines())
    assert (record["phase"], record["reasons"]) == ("validation", {"late": 1})


def test_an_evaluation_is_refused_as_a_whole_for_its_failures(tmp_path):
    """A part of it may well have a single row, whose reward fails."""
    rows = {keys.GROUP_IDS: torch.arange(4), keys.SIBLINGS: torch.zeros(4)}

    def checked(*parts, most=1.0):
        environment = CONFIG.environment.replace(max_failed_share=most)
        failures = RewardFailures(environment, tmp_path, -1)
        for step, failed in enumerate(parts, start=1):
            mask = {keys.SAMPLE_MASK: torch.arange(4) >= failed}
            errors = {"no judge": failed} if failed else {}
            results = [SimpleNamespace(errors=errors, dropped_metrics={})]
            failures.check(step, "validation", rows | mask, results, is_part=True)  # pyright: ignore
        failures.check_parts("the evaluation")

    checked(0, 0)
    checked(0, 4)
    checked(0, 2, most=0.25)
    with pytest.raises(RunError, match="on all 8 completions of the evaluation; first: no judge"):
        checked(4, 4)
    with pytest.raises(RunError, match=r"on 4 of 8 .* most often \(4\): no judge"):
        checked(0, 4, most=0.25)


def test_of_more_groups_than_a_step_takes_the_first_are_kept():
    source, _ = source_of(num_replicas=3)  # three prompts are sampled where one is missing

    def all_but_the_first(batch):
        return batch.rows[keys.GROUP_IDS] > 0

    batch, _ = source.next_batch(1, all_but_the_first)
    assert sorted(set(batch.rows[keys.GROUP_IDS].tolist())) == [1, 2, 3, 4]


def test_rewards_have_their_spread_and_the_slowest_replica_is_named():
    _, metrics = source_of(num_replicas=3)[0].next_batch(1, lambda one: one.rows[keys.REWARDS] < 2)
    found = values(metrics)
    assert (found["rollout/slowest_rank"], found["rollout/slowest_over_median"]) == (2, 1.5)
    names = ("reward", "reward_std", "reward_min", "reward_max", "completion_tokens_max")
    assert [found[f"rollout/{name}"] for name in names] == [0.5, 0.5, 0, 1, 8]
    _, alone = source_of(num_replicas=1)[0].next_batch(1)
    assert "rollout/slowest_rank" not in alone


def test_a_replica_that_has_one_group_more_is_not_slower():
    """With ``rollout.overlap`` or ``max_lag`` each group is a call of its own."""
    batch, _ = source_of(num_replicas=1)[0].next_batch(1)
    results = [SimpleNamespace(rank=r, seconds=s, metrics={}) for r, s in ((0, 2), (0, 4), (1, 4))]
    found = values(rollout_metrics("rollout", batch.rows, results))
    assert (found["rollout/slowest_rank"], found["rollout/slowest_over_median"]) == (1, 4 / 3.5)


def trajectory(prompt_ids, token_ids, reward, reason=FinishReason.stop, num_cached=0):
    user = {"role": "user", "content": "q"}
    row = Row(index=0, messages=(user,), fields={}, prompt_ids=tuple(prompt_ids))
    completion = Completion(
        token_ids=token_ids,
        logprobs=[-0.5 - one for one in range(len(token_ids))],
        finish_reason=reason,
        weight_version=4,
        num_cached_tokens=num_cached,
    )
    task = RolloutTask(row=row, group=len(prompt_ids), index=0, seed=11, request_id="a")
    return single_turn(task, completion, "", RewardResult(reward=reward))


def test_every_sampled_token_trains_with_its_own_logprob_and_no_token_of_the_prompt():
    rows = [trajectory([7, 8, 9], [3, 4], 1.0), trajectory([6], [5, 1, 2], None)]
    batch = collate_tokens(rows)
    assert batch.lengths.tolist() == [5, 4]
    assert batch.tokens[keys.INPUT_IDS].tolist() == [7, 8, 9, 3, 4, 6, 5, 1, 2]
    assert batch.tokens[keys.LOSS_MASK].tolist() == [False] * 3 + [True] * 2 + [False] + [True] * 3
    expected = [0, 0, 0, -0.5, -1.5, 0, -0.5, -1.5, -2.5]
    assert batch.tokens[keys.GENERATION_LOGPROBS].tolist() == expected


def test_a_completion_without_a_reward_is_masked_and_one_that_was_cut_off_is_marked():
    rows = [trajectory([7], [3, 4], 0.25), trajectory([6, 6], [5], None, FinishReason.length)]
    columns = collate_rows(rows)
    assert columns[keys.REWARDS][0] == 0.25
    assert columns[keys.REWARDS][1].isnan()
    expected = {
        keys.SAMPLE_MASK: [True, False],
        keys.NUM_LOSS_TOKENS: [2, 1],
        keys.TRUNCATED: [False, True],
        keys.GROUP_IDS: [1, 2],
        keys.SIBLINGS: [0, 0],
        keys.SEEDS: [11, 11],
        keys.MEAN_VERSIONS: [4.0, 4.0],
        keys.WEIGHT_VERSIONS: [4, 4],
        keys.NEWEST_VERSIONS: [4, 4],
        keys.NUM_OLDER: [0, 0],
    }
    assert {name: columns[name].tolist() for name in expected} == expected


def test_the_mean_reward_is_over_those_that_have_one_beside_the_count_of_others():
    rows = [trajectory([7] * n, [3], one) for n, one in enumerate((1.0, 1.0, 0.0, None), 1)]
    results = [SimpleNamespace(rank=0, seconds=1.0, metrics={})]
    found = values(rollout_metrics("rollout", collate_rows(rows), results))
    assert found["rollout/reward"] == pytest.approx(0.666667, abs=1e-6)
    assert found["rollout/num_failed"] == 1


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_what_rewards_report_is_averaged_over_the_rows_that_have_it(order):
    """One reports three things, one of them a text, one a single number, and one nothing else."""
    said = ({"reward": 1, "acc": 1, "score": 0.3, "pred": "a"}, {"reward": 0, "acc": 0}, 0.5)
    rows = [replace(trajectory([7], [3], 1.0), result=to_result(said[place])) for place in order]
    together = merge([_metrics(one) for one in rows])
    on_two_workers = merge([_metrics(rows[0]), merge([_metrics(one) for one in rows[1:]])])
    for found in (values(together), values(on_two_workers)):
        assert found["acc"] == 0.5
        assert found["score"] == 0.3
        assert "pred" not in found


def test_a_task_is_sampled_with_its_own_prompt_and_seed_and_ends_at_a_stop_string():
    """Which was sampled in two parts, before a refit and after it."""
    sampled, scored = [], []

    async def sample(request):
        sampled.append(request)
        reason = FinishReason.interrupted if len(sampled) == 1 else FinishReason.length
        return Completion(
            token_ids=[5, 6] if len(sampled) == 1 else [7, 8],
            logprobs=[-1.0] * 2,
            finish_reason=reason,
            weight_version=len(sampled),
        )

    async def score(*arguments):
        scored.append(arguments)
        return RewardResult(reward=0.5)

    worker = RolloutWorker(context=None)  # pyright: ignore
    worker._engine = SimpleNamespace(generate=sample)  # pyright: ignore
    worker._pools = {"": SimpleNamespace(score=score)}  # pyright: ignore
    worker._chat = SimpleNamespace(  # pyright: ignore
        decode=lambda ids, **_: "".join(map(str, ids))
    )
    user = {"role": "user", "content": "q"}
    row = Row(index=0, messages=(user,), fields={"answer": 4}, prompt_ids=(1, 2))
    task = RolloutTask(row=row, group=3, index=1, seed=11, request_id="a")
    found = asyncio.run(worker._run(task, SamplingParams(max_new_tokens=4, stop=("67",))))
    assert (sampled[0].seed, sampled[0].prompt_ids) == (11, [1, 2])
    assert found.text == "567"
    assert found.result.reward == 0.5
    ((prompt, completion, fields),) = scored
    assert (prompt, completion, fields["answer"]) == ("q", "567", 4)


def test_what_is_recorded_says_how_long_a_completion_was_and_how_it_ended(tmp_path):
    rows = [
        trajectory([7], [3, 4], 1.0),
        trajectory([7], [5], None, FinishReason.length),
        trajectory([7], [6], 1.0),
    ]
    rows[:2] = [replace(one, task=replace(one.task, record=True)) for one in rows[:2]]
    worker = RolloutWorker(context=None)  # pyright: ignore
    worker._trajectories = JsonlFile(tmp_path / "trajectories.jsonl")
    worker._record(5, rows)
    records = map(json.loads, (tmp_path / "trajectories.jsonl").open())
    names = ("step", "reward", "finish_reason", "num_tokens", "weight_version")
    found = [tuple(record[name] for name in names) for record in records]
    assert found == [(5, 1.0, "stop", 2, 4), (5, None, "length", 1, 4)]


def test_the_share_of_prompts_that_was_cached_is_that_of_their_tokens():
    rows = [trajectory([7] * 4, [3], 1.0, num_cached=2), trajectory([6], [3], 1.0)]
    assert values(merge(list(map(_metrics, rows))))["cached_prompt_share"] == 2 / 5


def test_a_task_has_its_own_rewards_failures_and_lengths():
    rows = [trajectory([7], [3, 4], 0.5), trajectory([7], [3] * 4, None), trajectory([7], [3], 9.0)]
    for one in rows[:2]:
        object.__setattr__(one.task.row, "part", "sums")
    found = values(merge(list(map(_metrics, rows))))
    names = ("reward", "failed_share", "completion_tokens")
    assert [found[f"sums/{name}"] for name in names] == [0.5, 0.5, 3.0]


def test_prompts_of_equal_text_are_groups_of_their_own():
    source, replicas = source_of()
    loader = PromptLoader(["same"] * 9, fingerprint="", seed=0, shuffle=False)
    source._feed = GroupFeed(loader)  # pyright: ignore
    batch, _ = source.next_batch(1)
    groups = batch.rows[keys.GROUP_IDS].tolist()
    assert {groups.count(one) for one in groups} == {2}
    assert len(set(groups)) == len(replicas.rounds[0]) / 2


def test_a_trajectory_counts_once_in_however_many_rows_it_trains():
    rows = {
        keys.GROUP_IDS: torch.tensor([7, 7, 7, 7, 3, 7]),
        keys.SIBLINGS: torch.tensor([1, 0, 0, 1, 0, 1]),
    }
    first, trajectory = first_rows(rows)
    assert sorted(first.tolist()) == [0, 1, 4]
    pairs = [(rows[keys.GROUP_IDS][i].item(), rows[keys.SIBLINGS][i].item()) for i in range(6)]
    of_first = [pairs[i] for i in first]
    assert [of_first[i] for i in trajectory] == pairs
    tasks = [SimpleNamespace(group=group, index=index, seed=0) for group, index in pairs]
    found = values(rollout_metrics("rollout", rows_of(tasks), []))
    assert found["rollout/num_tokens"] == 6 * 8
    assert found["rollout/completion_tokens_max"] == 3 * 8


@pytest.mark.parametrize("steps", [[0, 1, 1], [1, 0]])
def test_the_records_that_tests_read_hold_each_step_once_and_in_order(tmp_path, steps):
    lines = "".join(f'{{"step": {step}}}\n' for step in steps)
    (tmp_path / "metrics.jsonl").write_text(lines)
    with pytest.raises(AssertionError):
        records(tmp_path)


def test_the_result_of_a_group_travels_small_and_comes_back_as_it_was():
    """A dozen columns of 8 rows; as tensors they take 6 kB, and ten times as long."""
    tasks = [SimpleNamespace(group=0, index=index, seed=index) for index in range(8)]
    columns = {f"{name}{i}": one for name, one in rows_of(tasks).items() for i in range(2)}
    sent = replace(result_of(tasks), rows=columns)
    apart = []
    pickled = pickle.dumps(sent, protocol=5, buffer_callback=apart.append)
    stored = [one.raw().tobytes() for one in apart]  # cannot be written, as in Ray's store
    assert len(pickled) + sum(map(len, stored)) < 3000
    for _ in range(2):
        found = pickle.loads(pickled, buffers=stored)
        for name, column in {**columns, "lengths": sent.lengths}.items():
            again = found.lengths if name == "lengths" else found.rows[name]
            assert torch.equal(again, column)
            assert again.dtype == column.dtype
            again[0] = 1  # which the store does not see
