"""Several rewards: their sum, each by itself, and advantages of each."""

import asyncio

import pytest
import torch

from nemo_like.algorithms.grpo.loop import add_advantages
from nemo_like.batch import keys
from nemo_like.compose.load import check
from nemo_like.data.datasets import Row
from nemo_like.distributed.remote_batch import RemoteBatch
from nemo_like.errors import UserError
from nemo_like.generation.protocol import Completion, FinishReason
from nemo_like.losses.advantages import group_advantages, whiten
from nemo_like.rewards.find import reward_spec
from nemo_like.rewards.function import to_result
from nemo_like.rewards.protocol import RewardResult
from nemo_like.rewards.several import combined
from nemo_like.rewards.start import start_pool
from nemo_like.rollout.trajectory import RolloutTask, collate_rows, single_turn
from tests.small_runs import small_config

FUNCTIONS = """
def right(completion, answer, **_):
    return {"reward": float(answer in completion), "answer": completion, "seen": 1.0}

def brief(prompt, completion):
    return -len(completion) / 100

async def slow(prompt, completion):
    return 1.0

def fails(prompt, completion):
    return None
"""


@pytest.fixture
def functions(tmp_path):
    path = tmp_path / "rewards.py"
    path.write_text(FUNCTIONS)
    return path


def parts_of(path, **weights):
    return {name: {"function": f"{path}:{name}", "weight": one} for name, one in weights.items()}


def typed(parts):
    """As on a command line."""
    inner = (
        f"{name}: {{function: '{part['function']}', weight: {part['weight']}}}"
        for name, part in parts.items()
    )
    return f"environment.rewards={{{', '.join(inner)}}}"


def test_the_reward_is_the_weighted_sum_and_each_is_a_metric(functions):
    function = combined(parts_of(functions, right=2.0, brief=0.5))
    assert function.required_fields == {"answer"}
    assert not function.is_async
    found = function("q", "4 it is", {"answer": "4", "other": 1})
    assert found == {
        "reward": pytest.approx(2.0 - 0.5 * 0.07),
        "reward_right": 1.0,
        "right/seen": 1.0,
        "answer": "4 it is",
        "reward_brief": -0.07,
    }


def test_one_that_is_async_makes_all_so_and_one_that_fails_costs_the_row(functions):
    function = combined(parts_of(functions, slow=1.0, brief=1.0))
    assert function.is_async
    assert asyncio.run(function("q", "abc", {}))["reward"] == pytest.approx(0.97)
    with pytest.raises(UserError, match="fails: returned None"):
        combined(parts_of(functions, fails=1.0))("q", "abc", {})


def test_a_plain_function_may_return_an_awaitable_and_a_lost_metric_is_told(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(
        "async def late(): return 1.0\n"
        "def waits(prompt, completion): return late()\n"
        "def odd(prompt, completion): return {'reward': 1.0, 'x': float('nan')}\n"
    )
    both = combined(parts_of(path, waits=1.0, odd=2.0))
    found = to_result(asyncio.run(both("q", "a", {})))
    assert found.reward == 3.0
    assert [*found.dropped] == ["odd/x"]


def test_a_pool_scores_by_several(functions):
    config = small_config("never", typed(parts_of(functions, right=1)))
    pool = start_pool(config.environment)
    try:
        result = asyncio.run(pool.score("q", "4", {"answer": "4"}))
    finally:
        pool.shutdown()
    assert (result.reward, result.metrics["reward_right"]) == (1.0, 1.0)
    assert reward_spec(config.environment).startswith("{")


def test_what_a_reward_came_to_is_a_column_that_advantages_read():
    task = RolloutTask(
        row=Row(index=0, messages=({"content": "q"},), fields={}, prompt_ids=(7,)),
        group=0,
        index=0,
        seed=1,
        request_id="r",
    )
    completion = Completion(
        token_ids=[3], logprobs=[-1.0], finish_reason=FinishReason.stop, weight_version=0
    )
    results = [
        RewardResult(reward=2.0, metrics={"reward_right": 1.0, "right/seen": 1.0}),
        RewardResult(reward=None, error="failed"),
    ]
    rows = collate_rows([single_turn(task, completion, "", one) for one in results], ["right"])
    assert rows[f"{keys.REWARD_OF}right"].nan_to_num(-1).tolist() == [1.0, -1.0]
    assert "reward_right" in rows


def batch_of(groups, **parts):
    rows = {
        keys.GROUP_IDS: torch.tensor(groups),
        keys.SIBLINGS: torch.arange(len(groups)),
        keys.SAMPLE_MASK: torch.ones(len(groups), dtype=torch.bool),
        keys.NUM_LOSS_TOKENS: torch.full((len(groups),), 3),
        keys.TRUNCATED: torch.zeros(len(groups), dtype=torch.bool),
    }
    for name, values in parts.items():
        rows[f"{keys.REWARD_OF}{name}"] = torch.tensor(values, dtype=torch.float64)
    rows[keys.REWARDS] = sum(rows[f"{keys.REWARD_OF}{name}"] for name in parts)
    return RemoteBatch(lengths=torch.full((len(groups),), 5), rows=rows)


def test_each_reward_is_normalised_in_its_group_then_added_then_the_step_is(functions):
    """By hand: in a group of two, (1, 0) and (0.01, 0) have the same advantages."""
    several = typed(parts_of(functions, right=1.0, brief=3.0))
    mean = "advantage.baseline=mean"
    config = small_config("never", several, "advantage.each_reward=true", mean)
    batch = batch_of([0, 0, 1, 1], right=[1, 0, 0, 0], brief=[0, 0.01, 0.01, 0])
    add_advantages(batch, config)
    half = 0.5 / torch.tensor([1.0, 0.0]).std().item()
    joined = torch.tensor([half - 3 * half, -half + 3 * half, 3 * half, -3 * half])
    expected = whiten(joined, torch.ones(4, dtype=torch.bool))
    assert torch.allclose(batch.rows[keys.ADVANTAGES], expected, atol=1e-5)
    together = small_config("never", several, mean)
    batch = batch_of([0, 0], right=[1, 0], brief=[0, 0.01])
    add_advantages(batch, together)
    rewards, groups = batch.rows[keys.REWARDS], batch.rows[keys.GROUP_IDS]
    of_sum = group_advantages(rewards, groups, torch.ones(2).bool(), together.advantage)
    assert torch.equal(batch.rows[keys.ADVANTAGES], of_sum)


def test_a_baseline_counts_a_trajectory_once_and_all_of_its_rows_have_its_advantage():
    batch = batch_of([0, 0, 0, 0, 0, 0], total=[1, 1, 1, 0, 0, 0])
    batch.rows[keys.SIBLINGS] = torch.tensor([0, 0, 0, 1, 2, 3])
    config = small_config("never", "advantage.baseline=mean", "advantage.scale=none")
    add_advantages(batch, config)
    assert batch.rows[keys.ADVANTAGES].tolist() == [0.75] * 3 + [-0.25] * 3


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{a b: {function: math}}", "'a b' must be a name of letters, digits and _"),
        ("{a: {functon: math}}", "rewards.a.functon is not a key of the configuration"),
        ("{a: {function: 'none.py:f'}}", "rewards.a.function=none.py:f: there is no file none.py"),
        ("{a: {function: mth}}", "rewards.a.function=mth is not known .did you mean math"),
        ("{a: {function: reward_model}}", "goes alone only"),
        ("{a: {function: math, weight: x}}", "rewards.a.weight=x must be a number"),
    ],
)
def test_a_part_that_cannot_be_used_is_named(value, message):
    with pytest.raises(UserError, match=message):
        check(small_config("never", f"environment.rewards={value}"))
