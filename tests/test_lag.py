"""Sampling ahead of training: the bound on age, the order, and what a killed run goes on with.

Engines are replaced by a clock: a group has finished when its time has come.
"""

import random
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nemo_like.algorithms.checks import check_sampled, check_versions
from nemo_like.algorithms.engine_size import engine_config
from nemo_like.algorithms.grpo.config import GRPOConfig
from nemo_like.algorithms.ppo.config import PPOConfig, PPOSection
from nemo_like.batch import keys
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.config.losses import LossConfig
from nemo_like.data.loader import GroupFeed, PromptLoader
from nemo_like.data.mixtures import MixtureLoader
from nemo_like.errors import RunError, UserError
from nemo_like.generation.interrupted import continued, joined, stopped
from nemo_like.generation.protocol import (
    Completion,
    FinishReason,
    GenerationRequest,
    SamplingParams,
)
from nemo_like.losses.mismatch import MismatchSums
from nemo_like.losses.policy_gradient import ClippedPGLoss
from nemo_like.losses.protocol import Denominators
from nemo_like.models.resolve import resolve_model
from nemo_like.observe.metrics import values
from nemo_like.planning.resources import plan_run
from nemo_like.rewards.protocol import RewardResult
from nemo_like.rollout.failures import RewardFailures
from nemo_like.rollout.rounds import staleness
from nemo_like.rollout.sources import RolloutSource
from nemo_like.rollout.trajectory import collate_rows, collate_tokens, single_turn
from tests.small_runs import SMALL, accept, records, run, small_config
from tests.test_grpo import StopError, run_until
from tests.test_rollout import result_of
from tests.test_trajectory_files import task

CONFIG = small_config("never-made", "grpo.num_generations_per_prompt=2", "run.seed=3")


class Clocked:
    """Replicas that take ``seconds(group)``, and remember when each group began and trained."""

    timeout_s = 0.0

    def waiting(self, *_, **__):
        return self

    def __init__(self, seconds, num=2):
        self.world_size, self.group, self.seconds = num, self, seconds
        self.now, self.step, self.most_open = 0.0, 0, 0
        self.began, self.planned, self.ends, self.open = {}, {}, {}, set()

    def submit_rank(self, rank, method, request):
        group = request.tasks[0].group
        assert rank == group % self.world_size
        self.began[group], self.ends[group] = self.step, self.now + self.seconds(group)
        self.planned[group] = request.step
        self.open.add(group)
        self.most_open = max(self.most_open, len(self.open))
        return SimpleNamespace(refs={group: rank}, request=request)

    def results(self, calls, enough):
        def done():
            return {group for call in calls for group in call.refs if self.ends[group] <= self.now}

        while not enough(done()):
            self.now = min(e for c in calls for g in c.refs if (e := self.ends[g]) > self.now)
        return [[result_of(c.request.tasks)] if done() & c.refs.keys() else [] for c in calls]


def loader_of(kind):
    if kind == "rows":
        return PromptLoader(range(100), fingerprint="", seed=0, shuffle=True)
    return MixtureLoader(
        {"a": range(70), "b": range(100, 130)},
        {"a": 0.7, "b": 0.3},
        fingerprint=lambda _: "",
        batch_size=4,
        seed=0,
        shuffle=True,
    )


def source_of(replicas, lag, *, order="first_in", kind="rows", saved=None, rows=(), **loop):
    config = CONFIG.replace(
        rollout=CONFIG.rollout.replace(max_lag=lag, order=order),
        grpo=CONFIG.grpo.replace(**{"max_steps": 1000} | loop),
    )
    feed = GroupFeed(loader_of(kind))
    if saved is not None:
        feed.load_state(saved)
    source = RolloutSource(
        config,
        generation=replicas,
        sync=SimpleNamespace(is_due=False, give_to_policy=lambda: None),  # pyright: ignore
        feed=feed,  # pyright: ignore
        validation_rows=rows,  # pyright: ignore
        stop_token_ids=(2,),
        failures=RewardFailures(CONFIG.environment, Path("never-made"), -1),
        span=lambda _: nullcontext(),
        show=lambda *_: None,
    )
    return source, feed


def trained(source, replicas, step, *keep):
    """Numbers of the groups that ``step`` trains on, after a second of training."""
    replicas.step = step
    groups = source.next_batch(step, *keep)[0].rows[keys.GROUP_IDS].unique().tolist()
    replicas.now += 1
    replicas.open -= set(groups)
    return groups


@pytest.mark.parametrize("order", ["first_in", "ready"])
@pytest.mark.parametrize("seed", range(20))
def test_no_group_is_ever_older_than_the_lag_and_none_is_lost(seed, order):
    """And the oldest are as old as the lag, so that one step less would show as well."""
    draw = random.Random(seed)
    lag, prompts = draw.choice([1, 2, 3, 5]), draw.choice([1, 2, 5])
    replicas = Clocked(lambda _: draw.lognormvariate(0, 1), num=draw.choice([1, 2, 3]))
    source, _ = source_of(replicas, lag, order=order, num_prompts_per_step=prompts)
    ages, used = set(), []
    for step in range(1, 60):
        groups = trained(source, replicas, step)
        assert len(groups) == prompts
        ages |= {step - replicas.began[group] for group in groups}
        if order == "first_in":
            assert {replicas.planned[group] for group in groups} == {step}
        used += groups
    assert max(ages) == lag
    assert replicas.most_open == (lag + 1) * prompts
    assert len(used) == len(set(used))
    assert sorted({*used, *replicas.open}) == list(range(len(replicas.began)))
    if order == "first_in":
        assert used == list(range(len(used)))


def test_what_is_ready_trains_first_and_slow_prompts_get_their_share():
    """Half of the prompts take four steps, half take one."""
    seconds = {0: 0.5, 1: 4.0}
    spent = {}
    for order in ("first_in", "ready"):
        replicas = Clocked(lambda group: seconds[group % 2], num=1)
        source, _ = source_of(replicas, 4, order=order)
        used = [group for step in range(1, 201) for group in trained(source, replicas, step)]
        slow = sum(group % 2 for group in used) / len(used)
        assert abs(slow - 0.5) < 0.05
        spent[order] = replicas.now
    assert spent["ready"] <= spent["first_in"]


def test_a_straggler_is_waited_for_only_when_its_time_has_come():
    replicas = Clocked(lambda group: 1e6 if group == 0 else 0.1)
    source, _ = source_of(replicas, 3, order="ready")
    assert [0 in trained(source, replicas, step) for step in range(1, 5)] == [0, 0, 0, 1]


def test_groups_that_take_the_place_of_others_do_not_raise_the_lag():
    """What is admitted in a step's later rounds would otherwise be used a step too late."""
    replicas = Clocked(lambda _: 1.0)
    source, _ = source_of(replicas, 1)

    def odd(batch):
        return batch.rows[keys.GROUP_IDS] % 2 == 1

    for step in range(1, 8):
        keep = (odd,) if step % 2 else ()  # in other steps all are used
        groups = trained(source, replicas, step, *keep)
        assert len(groups) == 4
        assert all(step - replicas.began[group] <= 1 for group in groups)


@pytest.mark.parametrize("order", ["first_in", "ready"])
@pytest.mark.parametrize("seed", range(10))
def test_a_resumed_run_knows_which_groups_were_used(order, seed):
    """Some early, in the place of groups left out: their trajectories are not sampled again."""
    draw = random.Random(seed)
    lag, prompts = draw.choice([1, 2, 4]), draw.choice([1, 3, 4])
    replicas = Clocked(lambda _: draw.lognormvariate(0, 1))
    source, feed = source_of(replicas, lag, order=order, num_prompts_per_step=prompts)
    used, use_up = set(), feed.use_up

    def noted(numbers):
        used.update(numbers := [*numbers])
        use_up(numbers)

    feed.use_up = noted
    for step in range(1, 15):
        trained(source, replicas, step, lambda batch: batch.rows[keys.GROUP_IDS] % 3 > 0)
        again = GroupFeed(loader_of("rows"))
        again.load_state(feed.state())
        for one in (feed, again):
            assert {*range(one.first_open), *one.used} == used


def test_groups_that_train_as_they_finish_are_a_batch_in_the_order_of_their_numbers():
    source, feed = source_of(Clocked(lambda group: 9.0 - group), 0)
    parts = []
    batch, _ = source.next_batch(1, early=parts.append)
    assert [part.rows[keys.GROUP_IDS][0].item() for part in parts] == [3, 2, 1, 0]
    assert batch.rows[keys.GROUP_IDS].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    num_drawn = feed.loader.num_drawn
    assert feed.state() == feed.loader.state() | {"first": num_drawn, "num_drawn": num_drawn}


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_run_shorter_than_its_lag_ends_with_nothing_under_way(steps):
    replicas = Clocked(lambda _: 1.0)
    source, _ = source_of(replicas, 2, max_steps=steps)
    used = [group for step in range(1, steps + 1) for group in trained(source, replicas, step)]
    assert used == [*replicas.began] == list(range(4 * steps))


@pytest.mark.parametrize("kind", ["rows", "mixture"])
@pytest.mark.parametrize("order", ["first_in", "ready"])
def test_a_run_that_goes_on_draws_what_was_under_way_again_and_nothing_twice(order, kind):
    """Killed after any step: what was sampled ahead is lost, and drawn again, the same rows."""
    draw = random.Random(1)
    straight = loader_of(kind)
    rows = {}
    used, saved, step = [], None, 0
    while step < 40:
        replicas = Clocked(lambda _: draw.lognormvariate(0, 1))
        source, feed = source_of(replicas, 2, order=order, kind=kind, saved=saved)
        taken = feed.draw

        def noted(count, taken=taken):
            found = taken(count)
            for number, row in found:
                assert rows.setdefault(number, row) == row
            return found

        feed.draw = noted
        for _ in range(draw.choice([1, 2, 5])):
            step += 1
            used += trained(source, replicas, step)
            saved = feed.state()
    assert len(used) == len(set(used))
    lost = set(range(max(used))) - set(used)
    assert lost <= set(replicas.open)
    if kind == "rows":
        assert [rows[i] for i in range(len(rows))] == straight.next_rows(len(rows))


def test_a_saved_position_without_groups_under_way_is_that_of_the_loader():
    feed = GroupFeed(loader_of("rows"))
    drawn = [*feed.draw(7), *feed.draw(2)]
    feed.use_up(number for number, _ in drawn)
    num_drawn = feed.loader.num_drawn
    assert feed.state() == feed.loader.state() | {"first": num_drawn, "num_drawn": num_drawn}


def test_groups_of_other_rows_have_new_numbers():
    """Or they would be taken for used ones, or used ones for those to sample again."""
    before = GroupFeed(PromptLoader(range(100), fingerprint="a", seed=0, shuffle=True))
    before.use_up(number for number, _ in before.draw(8))
    before.draw(8)
    before.use_up([8])
    saved = before.state()
    for start in (16, 32):
        feed = GroupFeed(PromptLoader(range(100), fingerprint=f"{start}", seed=0, shuffle=True))
        feed.load_state(saved)
        assert (feed.first_open, feed.used, feed.loader.num_drawn) == (start, (), 0)
        feed.use_up(number for number, _ in feed.draw(8))
        assert [number for number, _ in feed.draw(8)] == list(range(start + 8, start + 16))
        feed.use_up(range(start + 9, start + 16))
        saved = feed.state()
        assert saved["used"] == list(range(start + 9, start + 16))
    again = GroupFeed(PromptLoader(range(100), fingerprint="32", seed=0, shuffle=True))
    again.load_state(saved)
    assert (again.first_open, again.used) == (40, tuple(range(41, 48)))
    assert [number for number, _ in again.draw(2)] == [40, 48]


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"loss": {"importance": "none"}}, "set truncate or mask"),
        ({"mismatch": {"action": "mask"}}, "set warn or stop"),
    ],
)
def test_lag_without_a_correction_is_refused(changes, remedy):
    with pytest.raises(UserError, match=remedy):
        accept(GRPOConfig, rollout={"max_lag": 1}, **changes)
    accept(GRPOConfig, rollout={"max_lag": 1})


def rows_of_versions(*versions):
    lengths = torch.full((len(versions),), 2)
    return TensorBatch(
        lengths=lengths,
        tokens={
            keys.INPUT_IDS: torch.ones(2 * len(versions), dtype=torch.int64),
            keys.LOSS_MASK: torch.tensor([False, True] * len(versions)),
            keys.GENERATION_LOGPROBS: torch.full((2 * len(versions),), -1.0),
        },
        rows={
            keys.SAMPLE_MASK: torch.ones(len(versions), dtype=torch.bool),
            keys.NUM_LOSS_TOKENS: torch.tensor([1, 3, 2, 2][: len(versions)]),
            keys.WEIGHT_VERSIONS: torch.tensor(versions),
            keys.MEAN_VERSIONS: torch.tensor(versions).double(),
            keys.NEWEST_VERSIONS: torch.tensor(versions),
            keys.NUM_OLDER: torch.zeros(len(versions), dtype=torch.int64),
        },
    )


def test_staleness_is_counted_from_the_version_that_trains_and_mismatch_of_fresh_rows_alone():
    """Version 4 trains rows of versions 4, 3, 2 and 0: the mean age is 1.75."""
    config = CONFIG.replace(rollout=CONFIG.rollout.replace(max_lag=4))
    batch = rows_of_versions(4, 3, 2, 0)
    found = values(staleness(config, batch, 4))  # pyright: ignore
    assert found["staleness/mean"] == 1.75
    assert found["staleness/max"] == 4
    assert found["staleness/mean_of_tokens"] == (0 * 1 + 1 * 3 + 2 * 2 + 4 * 2) / 8
    assert [found[f"staleness/share_{i}"] for i in range(5)] == [0.25, 0.25, 0.25, 0, 0.25]
    sums = MismatchSums(torch.device("cpu"))
    now = torch.tensor([0.0, -1.5, 0.0, -9.0, 0.0, -9.0, 0.0, -9.0])
    sums.add(now, torch.zeros(8), batch)
    assert values(sums.metrics())["mismatch/mean_abs"] == pytest.approx(0.5)
    assert staleness(CONFIG, batch, 4) == {}


def test_a_trajectory_without_completions_has_no_age():
    """Its environment failed before the first call: version -1 stands for none."""
    config = CONFIG.replace(rollout=CONFIG.rollout.replace(max_lag=1))
    batch = rows_of_versions(58, 57, -1)
    batch.rows[keys.NUM_LOSS_TOKENS][2] = 0
    found = values(staleness(config, batch, 58))  # pyright: ignore
    assert (found["staleness/max"], found["staleness/mean"]) == (1, 0.5)
    assert "staleness/share_2" not in found
    batch.rows[keys.NUM_LOSS_TOKENS][:] = 0
    assert staleness(config, batch, 58) == {}  # pyright: ignore


def test_mismatch_is_measured_on_the_tokens_after_the_last_refit_alone():
    """Of 3 and 4 tokens, versions 2 2 3 and 1 3 3 3: the policy is at 3, and agrees to 0.5."""
    stop = FinishReason.stop
    parts = ((completion(2, stop, 2), completion(1, stop, 3)),)
    parts += ((completion(1, stop, 1), completion(3, stop, 3)),)
    scored = RewardResult(reward=1.0)
    rows = [single_turn(task(0, i), joined(one), "", scored) for i, one in enumerate(parts)]
    columns = collate_rows(rows)
    assert columns[keys.NEWEST_VERSIONS].tolist() == [3, 3]
    assert columns[keys.NUM_OLDER].tolist() == [2, 1]
    batch = collate_tokens(rows)
    batch.rows |= columns
    config = CONFIG.replace(rollout=CONFIG.rollout.replace(max_lag=2))
    for version, expected in ((3, 0.5), (4, None)):
        staleness(config, batch, version)  # pyright: ignore
        sums = MismatchSums(torch.device("cpu"))
        now = torch.tensor([0, 0, -9, -9, -1.5, 0, 0, -9, -1.5, -1.5, -1.5])
        sums.add(now, torch.zeros(11), batch)
        assert values(sums.metrics()).get("mismatch/mean_abs") == expected


def test_a_token_older_than_the_bound_stops_the_run():
    batch = rows_of_versions(4, 3)
    check_versions(batch, range(3, 5))  # pyright: ignore
    for allowed in (range(4, 5), range(2, 4)):
        with pytest.raises(RunError, match="a refit was missed"):
            check_versions(batch, allowed)  # pyright: ignore


def test_a_batch_may_be_as_old_as_its_lag_in_optimizer_steps_and_no_newer_than_the_policy():
    updates = ("rollout.max_lag=2", "grpo.num_mini_batches=2", "mismatch.action=ignore")
    config = small_config("never-made", *updates)
    check_sampled(config, rows_of_versions(6, 10), 10, 4)  # pyright: ignore
    for version in (5, 11):
        with pytest.raises(RunError, match="a refit was missed"):
            check_sampled(config, rows_of_versions(10, version), 10, 4)  # pyright: ignore


def test_the_bound_is_in_steps_also_where_the_critic_trains_alone_at_first():
    """Steps 3 and 4 of 4 train the policy, and the last one on weights of the third."""
    config = PPOConfig(
        ppo=PPOSection(max_steps=4, num_critic_warmup_steps=2),
        rollout=CONFIG.rollout.replace(max_lag=1),
        mismatch=CONFIG.mismatch.replace(action="ignore"),
    )
    check_sampled(config, rows_of_versions(1, 0), 1, 4)  # pyright: ignore
    with pytest.raises(RunError, match="a refit was missed"):
        check_sampled(config, rows_of_versions(2, 0), 2, 4)  # pyright: ignore


@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize("order", [pytest.param("first_in", marks=pytest.mark.full), "ready"])
def test_a_run_with_lag_goes_on_after_a_fault_and_trains_each_group_once(tmp_path, order):
    options = [
        "grpo.max_steps=6",
        "checkpoint.every_steps=1",
        "validation.every_steps=0",
        "cluster.cpu_workers_per_node=2",
        "cluster.num_generation_workers=1",
        "rollout.max_lag=2",
        f"rollout.order={order}",
        "run.resume=true",
    ]
    small = tuple(one for one in SMALL if "validation" not in one)
    used = {}
    for until in (3, 7):
        config = small_config(tmp_path, *options, small=small)
        with nullcontext() if until == 7 else pytest.raises(StopError):
            run_until(config, until, noting=used)
    assert sorted(used) == [1, 2, 3, 4, 5, 6]
    groups = [group for step in sorted(used) for group in used[step]]
    assert sorted(groups) == list(range(24))
    steps = records(tmp_path)
    assert 1 <= max(steps[step]["staleness/max"] for step in steps) <= 2
    found = {
        step: one["mismatch/max_abs"] for step, one in steps.items() if "mismatch/max_abs" in one
    }
    assert 1 in found
    assert max(found.values()) < 1e-5


@pytest.mark.usefixtures("local_ray")
def test_a_run_that_trains_on_groups_as_they_finish_has_the_numbers_of_the_plain_one(
    tmp_path, straight
):
    options = ["grpo.max_steps=3", "validation.every_steps=2"]
    expected, found = records(straight), run(tmp_path, *options, "rollout.overlap=true")
    for step in (1, 2, 3):
        for name in ("train/loss", "train/grad_norm", "rollout/reward", "train/num_tokens"):
            assert found[step][name] == pytest.approx(expected[step][name], abs=1e-5), (step, name)


@pytest.mark.usefixtures("local_ray")
def test_groups_that_train_as_they_finish_have_the_credit_of_their_steps(tmp_path):
    options = [
        "grpo.max_steps=1",
        "environment.name=guess",
        "environment.options={high: 3}",
        "environment.max_turns=2",
        "advantage.baseline=mean",
        "advantage.credit=step",
    ]
    plain, early = (
        run(tmp_path / name, *options, f"rollout.overlap={name}")[1] for name in ("false", "true")
    )
    for name in ("train/loss", "train/grad_norm", "train/num_tokens"):
        assert early[name] == pytest.approx(plain[name], abs=1e-5), name


def test_an_engine_has_room_for_all_that_is_under_way_at_a_time():
    """4 prompts a step, with 2 completions each."""
    for lag, expected in ((0, 8), (2, 24)):
        config = CONFIG.replace(rollout=CONFIG.rollout.replace(max_lag=lag))
        found = engine_config(config, str(resolve_model("embedded")), 64, plan_run(config))
        assert found.max_num_seqs == expected


def completion(count, reason, version):
    return Completion(
        token_ids=list(range(count)),
        logprobs=[-1.0] * count,
        finish_reason=reason,
        weight_version=version,
    )


def test_what_is_left_of_an_interrupted_completion_has_the_rest_of_its_budget():
    """Of 16 tokens after a prompt of 8: 10, then 6, and never more than 24 in all."""
    request = GenerationRequest(
        request_id="r",
        prompt_ids=list(range(8)),
        sampling=SamplingParams(max_new_tokens=16),
        seed=2**63 - 1,
    )
    first = completion(10, FinishReason.interrupted, 3)
    rest = continued(request, first)
    assert rest.sampling.max_new_tokens == 6
    assert len(rest.prompt_ids) + rest.sampling.max_new_tokens == 24
    assert rest.request_id != request.request_id
    assert 0 <= rest.seed < 2**63
    assert rest.seed != request.seed
    nothing = completion(0, FinishReason.interrupted, 4)
    whole = joined([first, nothing, completion(6, FinishReason.length, 5)])
    assert (len(whole.token_ids), whole.finish_reason) == (16, FinishReason.length)
    assert (whole.weight_version, whole.later_versions) == (3, ((10, 5),))
    assert whole.versions == [3] * 10 + [5] * 6


def test_a_stop_string_ends_a_completion_also_where_a_refit_came_in_its_middle():
    """The rest was sampled without seeing that it had begun, and went on."""

    def parts(*texts):
        return [
            Completion(
                token_ids=[*map(ord, text)],
                logprobs=[-float(len(text))] * len(text),
                finish_reason=FinishReason.interrupted,
                weight_version=version,
            )
            for version, text in enumerate(texts)
        ]

    def decode(ids):
        return "".join(map(chr, ids))

    whole = stopped(
        joined(parts("one", " two </", "answ", "er> three")), ["</answer>", "x"], decode
    )
    assert decode(whole.token_ids) == "one two </answer>"
    assert whole.finish_reason is FinishReason.stop
    assert whole.later_versions == ((3, 1), (10, 2), (14, 3))
    assert len(whole.logprobs) == len(whole.token_ids) == len(whole.versions)
    early = stopped(joined(parts("</answer", "> on", "e")), ["</answer>"], decode)
    assert (decode(early.token_ids), early.later_versions) == ("</answer>", ((8, 1),))
    for unchanged in (joined(parts("one </", "b> two")), joined(parts("one"))):
        assert stopped(unchanged, ["</answer>"], decode) is unchanged
        assert stopped(unchanged, [], decode) is unchanged


@pytest.mark.parametrize(
    ("sampled", "now", "importance", "weight"),
    [
        (0.3, 0.6, "truncate", 2.0),
        (0.3, 0.9, "truncate", 2.0),
        (0.6, 0.3, "truncate", 0.5),
        (0.3, 0.9, "mask", 0.0),
        (0.5, 0.5, "truncate", 1.0),
    ],
)
def test_a_token_of_older_weights_counts_by_its_ratio_to_what_sampled_it(
    sampled, now, importance, weight
):
    """Not by that to the policy's own logprobs of now, which is always 1; and a fresh one as is."""
    batch = rows_of_versions(0)
    batch.tokens[keys.GENERATION_LOGPROBS] = torch.tensor([0.0, sampled]).log()
    batch.rows[keys.ADVANTAGES] = torch.ones(1)
    logprobs = torch.tensor([0.0, now]).log().requires_grad_()
    loss, _ = ClippedPGLoss(LossConfig(importance=importance))(
        logprobs, batch, Denominators(tokens=1.0, sequences=1.0)
    )
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad[1].item() == pytest.approx(-weight)


def test_a_validation_amid_sampling_measures_the_newest_weights():
    """What is under way goes on; the validation's own completions begin after the refit."""
    asked = []
    replicas = Clocked(lambda _: 5.0)
    source, _ = source_of(replicas, 2, rows=range(3))
    trained(source, replicas, 1)
    source.sync.is_due = True
    source.sync.give_to_generation = lambda: asked.append("refit") or {}
    replicas.scatter = lambda _, requests: (
        asked.append(requests[0].phase) or [result_of(one.tasks) for one in requests]
    )
    source.validate(1)
    assert asked == ["refit", "validation"]
    assert trained(source, replicas, 2) == [4, 5, 6, 7]
