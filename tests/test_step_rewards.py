"""Rewards of steps: which completion earned what, and which tokens train by it."""

import asyncio

import pytest
import torch

from nemo_like.algorithms.checks import check_seeds
from nemo_like.algorithms.grpo.loop import add_advantages
from nemo_like.batch import keys
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.compose.load import check
from nemo_like.errors import RunError, UserError
from nemo_like.losses.advantages import advantages_of_turns, of_trained
from nemo_like.losses.value import TokenAdvantages
from nemo_like.rewards.frames import Frames, read_result, result_frame
from nemo_like.rewards.function import to_result
from nemo_like.rollout.trajectory import collate_rows, collate_tokens, single_turn
from tests.chat_templates import QWEN, STRIPS_THINK, build_chat
from tests.small_runs import small_config
from tests.test_trajectories import Scripted, recorder_of, talk, user

SEVERAL = ("environment.name=guess", "advantage.baseline=mean", "advantage.credit=step")
TO_COME = TokenAdvantages(gamma=1.0, lam=1.0, kl_coef=0.0, kl_estimator="k1")


def trajectory_of(chat, rewards, answers=("one", "two"), index=0):
    """A conversation; ``rewards`` makes what its harness returns of the ids of its answers."""
    recorder = recorder_of(chat, Scripted(chat, *answers))
    asyncio.run(talk(recorder, "Hi", *("more" for _ in answers[1:])))
    payload = result_frame("r", to_result(rewards([turn.id for turn in recorder._turns])))
    [sent] = Frames(1 << 20).feed(payload)
    found = recorder.trajectory(read_result(sent)[1])
    object.__setattr__(found.task, "index", index)
    return found


def batch_of(*trajectories):
    tokens = collate_tokens(trajectories, 4)
    rows = collate_rows(trajectories, (), 4)
    return TensorBatch(lengths=tokens.lengths, tokens=tokens.tokens, rows=rows)


def by_turn(batch, column):
    """What the trained tokens of each turn have; all of a turn have the same."""
    found = {}
    at = batch.tokens[keys.LOSS_MASK].nonzero(as_tuple=True)[0].tolist()
    for token in at:
        place = (batch.row_of_token[token].item(), batch.tokens[keys.TURNS][token].item())
        found.setdefault(place, set()).add(round(column[token].item(), 5))
    assert all(len(one) == 1 for one in found.values())
    return {place: one.pop() for place, one in found.items()}


@pytest.fixture
def chat(tmp_path):
    return build_chat(tmp_path, QWEN)


def test_each_step_earns_at_its_last_token_and_the_total_is_the_reward(chat):
    found = trajectory_of(chat, lambda ids: {"steps": {ids[0]: -0.25, ids[1]: 1.0}, "seen": 2})
    assert (found.result.reward, found.result.metrics) == (0.75, {"seen": 2.0})
    batch = batch_of(found)
    assert batch.rows[keys.STEP_REWARDS].nan_to_num(-9).tolist() == [[-0.25, 1.0, -9, -9]]
    advantages = TO_COME(batch)[0][keys.ADVANTAGES]
    assert by_turn(batch, advantages) == {(0, 0): 0.75, (0, 1): 1.0}
    at = batch.tokens[keys.LOSS_MASK].nonzero(as_tuple=True)[0]
    rewards = TO_COME._rewards(batch, at, torch.zeros_like(at))
    last = [(batch.tokens[keys.TURNS][at] == turn).nonzero()[-1].item() for turn in (0, 1)]
    assert rewards[at[last]].tolist() == [-0.25, 1.0]
    assert rewards.count_nonzero() == 2


def test_one_number_is_the_last_steps_and_a_final_one_is_added_to_it(chat):
    found = trajectory_of(chat, lambda ids: 0.5)
    assert found.step_rewards == [None, 0.5]
    found = trajectory_of(chat, lambda ids: {"steps": {ids[0]: 1.0}, "reward": 2.0})
    assert (found.step_rewards, found.result.reward) == ([1.0, 2.0], 3.0)
    found = trajectory_of(chat, lambda ids: {"steps": {ids[1]: 1.0}, "reward": 2.0})
    assert (found.step_rewards, found.result.reward) == ([None, 3.0], 3.0)


def test_a_reward_for_an_answer_that_was_never_given_is_refused_by_its_id(chat):
    found = trajectory_of(chat, lambda ids: {"steps": {ids[0]: 1.0, "cmpl-x": 1.0}})
    assert found.result.reward is None
    assert found.result.error == "a reward names an answer that was never given\ncmpl-x"
    assert batch_of(found).rows[keys.SAMPLE_MASK].tolist() == [False]
    with pytest.raises(UserError, match="without 'reward'"):
        trajectory_of(chat, lambda ids: {"steps": {}})
    with pytest.raises(UserError, match=r"the reward of an answer is nan(?s:.*)\na$"):
        to_result({"steps": {"a": float("nan")}})


def test_rewards_of_later_rows_reach_the_tokens_of_earlier_ones(tmp_path):
    """The template drops thinking, so that the second turn trains in a row of its own."""
    chat = build_chat(tmp_path, STRIPS_THINK)
    answers = ("<think>a</think>one", "<think>b</think>two")
    rewards = {0: -0.25, 1: 1.0}
    found = trajectory_of(
        chat, lambda ids: {"steps": {ids[n]: one for n, one in rewards.items()}}, answers
    )
    batch = batch_of(found)
    assert len(batch) == 2
    advantages = TO_COME(batch)[0][keys.ADVANTAGES]
    assert by_turn(batch, advantages) == {(0, 0): 0.75, (1, 1): 1.0}


def test_a_trajectory_of_two_rows_has_one_seed_and_two_of_one_seed_are_refused(tmp_path):
    chat = build_chat(tmp_path, STRIPS_THINK)
    first, second = (
        trajectory_of(chat, lambda ids: 1.0, ("<think>a</think>one", "<think>b</think>two"), n)
        for n in range(2)
    )
    for index, one in enumerate((first, second)):
        object.__setattr__(one.task, "seed", index)
    batch = batch_of(first, second)
    assert len(batch) == 4
    check_seeds(batch)  # pyright: ignore
    with pytest.raises(RunError, match="3 completions have only 2 distinct seeds"):
        check_seeds(batch_of(first, second, first))  # pyright: ignore


def test_credit_by_step_is_what_the_paper_says(chat):
    """By hand: rewards -.25, 1, 0 of one group; their mean is .25, their deviation .6614."""
    first = trajectory_of(chat, lambda ids: {"steps": {ids[0]: -0.25, ids[1]: 1.0}})
    second = trajectory_of(chat, lambda ids: 0.0, ("one",), index=1)
    batch = batch_of(first, second)
    config = small_config("never", *SEVERAL)
    add_advantages(batch, config)
    made = advantages_of_turns(batch)[0][keys.ADVANTAGES]
    mean, deviation = 0.25, 0.4375**0.5
    step = [(one - mean) / deviation for one in (-0.25, 1.0, 0.0)]
    of_steps_alone = [step[0] + step[1], step[1], step[2]]
    assert of_trained(batch.rows).tolist() == pytest.approx(of_steps_alone, abs=1e-5)
    expected = {(0, 0): step[0] + step[1], (0, 1): step[1], (1, 0): step[2]}
    assert by_turn(batch, made) == pytest.approx(expected, abs=1e-5)
    assert not made[~batch.tokens[keys.LOSS_MASK]].any()


def test_credit_by_step_with_one_reward_each_is_that_of_trajectories(chat):
    made = {}
    for credit in ("step", "trajectory"):
        found = [trajectory_of(chat, lambda ids, n=n: float(n), index=n) for n in range(3)]
        batch = batch_of(*found)
        add_advantages(batch, small_config("never", *SEVERAL, f"advantage.credit={credit}"))
        if credit == "step":
            made[credit] = advantages_of_turns(batch)[0][keys.ADVANTAGES]
        else:
            made[credit] = batch.rows[keys.ADVANTAGES][batch.row_of_token]
    mask = batch.tokens[keys.LOSS_MASK]
    assert torch.allclose(made["step"][mask], made["trajectory"][mask])


@pytest.mark.parametrize(
    ("keys_", "message"),
    [
        (("advantage.baseline=leave_one_out",), "leaves out one of them; set advantage.baseline"),
        (("loss.kl_coef=0.1", "loss.kl_in=reward"), "uses step rewards only"),
        (("advantage.overlong_buffer_tokens=5",), "=5 is about one completion .* may have 8; set"),
        (("environment.name=single_turn",), "a trajectory of one completion is one step"),
        (("environment.max_turns=1",), "step; set environment.name and max_turns"),
    ],
)
def test_credit_by_step_is_refused_where_it_has_no_meaning(keys_, message):
    with pytest.raises(UserError, match=message):
        check(small_config("never", *SEVERAL, *keys_))


def test_a_single_turn_has_no_steps(chat):
    found = trajectory_of(chat, lambda ids: 1.0, ("one",))
    result = to_result({"steps": {"a": 1.0}, "reward": 1.0})
    [completion] = found.completions
    assert single_turn(found.task, completion, "one", result).result.reward is None


def test_an_answer_of_nothing_earns_with_the_one_before_it(chat):
    recorder = recorder_of(chat, Scripted(chat, "one", []))

    async def calls():
        messages = await talk(recorder, "Hi")
        return await recorder.complete([*messages, user("more")])

    empty = asyncio.run(calls())
    found = recorder.trajectory(to_result({"steps": {empty.id: 1.0}}))
    assert found.step_rewards == [1.0]
