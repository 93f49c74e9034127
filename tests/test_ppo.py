"""PPO: values and advantages of tokens against plain loops, whole small runs, learning."""

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from nemo_like.algorithms.ppo import loop as ppo
from nemo_like.algorithms.ppo.config import CriticConfig, PPOConfig, PPOSection
from nemo_like.algorithms.ppo.loop import find_critic
from nemo_like.algorithms.processes import policy_group
from nemo_like.batch import keys
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.compose.load import check, compose_config
from nemo_like.config.policy import PolicyConfig
from nemo_like.config.run import ClusterConfig
from nemo_like.distributed.remote_batch import RemoteBatch
from nemo_like.distributed.virtual_cluster import VirtualCluster
from nemo_like.errors import UserError
from nemo_like.losses.advantages import Moments
from nemo_like.losses.value import TokenAdvantages, WhitenedAdvantages
from nemo_like.observe.metrics import Metric, values
from nemo_like.planning.resources import plan_resources
from nemo_like.policy.remote_model import RemoteModel
from tests.conftest import build_model
from tests.key_loops import Ranks, looped
from tests.small_runs import ROOT, SEEDS, SMALL, numbers, records, run_config

NAN = float("nan")
GAMMA, LAM, KL_COEF = 0.9, 0.7, 0.3
MAKE = TokenAdvantages(gamma=GAMMA, lam=LAM, kl_coef=KL_COEF, kl_estimator="k1")

LENGTHS = [9, 30, 4, 17, 23]
# Of each row the tokens that the policy sampled; a tool's text may be between them.
SAMPLED = [range(3, 9), [*range(10, 18), *range(22, 28)], range(2, 4), range(5, 17), range(20, 23)]
REWARDS = [1.0, -0.5, 2.0, NAN, 0.25]
TRAINS = [True, True, True, False, True]


def make_batch(**columns):
    """Rows with random tokens and logprobs; the fourth could not be scored."""
    generator = torch.Generator().manual_seed(3)
    num_tokens = sum(LENGTHS)
    mask = [t in row for length, row in zip(LENGTHS, SAMPLED, strict=True) for t in range(length)]
    return TensorBatch(
        lengths=torch.tensor(LENGTHS),
        tokens={
            keys.INPUT_IDS: torch.randint(3, 256, (num_tokens,), generator=generator),
            keys.LOSS_MASK: torch.tensor(mask),
            keys.POLICY_LOGPROBS: -torch.rand(num_tokens, generator=generator),
            keys.REFERENCE_LOGPROBS: -torch.rand(num_tokens, generator=generator),
            **columns,
        },
        rows={
            keys.REWARDS: torch.tensor(REWARDS, dtype=torch.float64),
            keys.SAMPLE_MASK: torch.tensor(TRAINS),
            keys.NUM_LOSS_TOKENS: torch.tensor([len(row) for row in SAMPLED]),
        },
    )


def plain_advantages(batch):
    """Advantages and returns [N] as plain lists, token by token from the end of each row."""
    column = {name: values.tolist() for name, values in batch.tokens.items()}
    advantages, returns = [0.0] * batch.num_tokens, [0.0] * batch.num_tokens
    for start, row, reward, trains in zip(batch.starts, SAMPLED, REWARDS, TRAINS, strict=True):
        after = next_value = 0.0
        for at in [int(start) + t for t in reversed(row)] if trains else []:
            kl = column[keys.POLICY_LOGPROBS][at] - column[keys.REFERENCE_LOGPROBS][at]
            value = column[keys.VALUES][at]
            delta = reward - KL_COEF * kl + GAMMA * next_value - value
            after = advantages[at] = delta + GAMMA * LAM * after
            returns[at] = after + value
            next_value, reward = value, 0.0
    return advantages, returns


def assert_as_plain(batch):
    """The columns of GAE, whitened over all trained tokens, as plain loops give them."""
    advantages, returns = plain_advantages(batch)
    trained = batch.tokens[keys.LOSS_MASK] & torch.tensor(TRAINS)[batch.row_of_token]
    chosen = torch.tensor(advantages, dtype=torch.float64)[trained]
    whitened = torch.zeros(batch.num_tokens, dtype=torch.float64)
    whitened[trained] = (chosen - chosen.mean()) / chosen.std()
    assert torch.allclose(
        batch.tokens[keys.RETURNS].double(), torch.tensor(returns).double(), rtol=0, atol=1e-6
    )
    assert torch.allclose(batch.tokens[keys.ADVANTAGES].double(), whitened, rtol=0, atol=1e-6)


@pytest.mark.parametrize("parts", [[range(5)], [[4, 0], [2, 1, 3]], [[3], [1], [0, 2], [4]]])
def test_advantages_of_parts_are_those_of_a_loop_over_tokens_whitened_over_all(parts):
    values = torch.randn(sum(LENGTHS), generator=torch.Generator().manual_seed(5))
    batch = make_batch(**{keys.VALUES: values})
    shards = [batch.select(list(part)) for part in parts]
    made = [MAKE(shard) for shard in shards]
    moments = Moments.joined([summary for _, summary in made])
    for shard, (columns, _) in zip(shards, made, strict=True):
        shard.tokens |= columns
        shard.tokens |= WhitenedAdvantages(moments)(shard)[0]
    order = torch.tensor([row for part in parts for row in part]).argsort()
    assert_as_plain(TensorBatch.concatenate(shards).select(order))


def test_without_values_a_rows_first_token_earns_its_reward_less_the_kl_of_all_its_tokens():
    batch = make_batch()
    columns, _ = replace(MAKE, gamma=1.0, lam=1.0)(batch)
    kl = batch.tokens[keys.POLICY_LOGPROBS] - batch.tokens[keys.REFERENCE_LOGPROBS]
    for start, row, reward, trains in zip(batch.starts, SAMPLED, REWARDS, TRAINS, strict=True):
        at = start + torch.tensor(list(row))
        expected = reward - KL_COEF * kl[at].sum() if trains else torch.tensor(0.0)
        assert torch.allclose(columns[keys.ADVANTAGES][at[0]], expected, atol=1e-6)


def test_whitening_leaves_the_column_that_it_was_made_of_alone():
    batch = make_batch()
    batch.tokens |= MAKE(batch)[0]
    before = batch.tokens[keys.ADVANTAGES].clone()
    moments = Moments.of(before[before != 0])
    white, _ = WhitenedAdvantages(moments)(batch)
    assert torch.equal(batch.tokens[keys.ADVANTAGES], before)
    assert not torch.equal(white[keys.ADVANTAGES], before)


class Disagreeing(Ranks):
    """A policy whose logprobs are far from the engine's in every other row."""

    def __init__(self):
        self.derived = []

    def logprobs(self, shard, with_policy, kl):
        column, metrics, rows = super().logprobs(shard, with_policy, kl)
        index = torch.arange(len(shard.batch))
        return column, metrics, rows | {keys.MEAN_MISMATCHES: 0.5 * (index % 2).double()}

    def derive(self, batch, make):
        self.derived.append(batch.rows[keys.SAMPLE_MASK].tolist())
        return super().derive(batch, make)


@pytest.mark.usefixtures("local_ray")
def test_rows_that_a_mismatch_masks_count_in_no_whitening(tmp_path):
    overrides = ("mismatch.action=mask", "mismatch.max_mean_abs=0.1", "critic.enabled=false")
    steps = ("ppo.lam=1", "ppo.max_steps=1", "validation.every_steps=0")
    config = compose_config(ROOT / "configs", "ppo", [*overrides, *steps])
    policy = Disagreeing()
    looped(config, tmp_path, policy)
    assert policy.derived == [[True, False] * 64] * 2  # advantages, and whitened once more
    assert list(records(tmp_path)) == [1]


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_advantages_are_made_as_configured_and_then_whitened_by_their_own_moments(kl_in):
    """A KL that the loss has is not in the rewards too."""
    made, moments = [], Moments.of(torch.tensor([1.0, 2.0, 6.0]))

    def derive(_, make):
        made.append(make)
        return [moments]

    overrides = (f"loss.kl_in={kl_in}", "loss.kl_coef=0.3", "ppo.gamma=0.9", "ppo.lam=0.7")
    config = compose_config(ROOT / "configs", "ppo", [*overrides, "loss.kl_estimator=k2"])
    metrics = ppo.add_advantages(None, SimpleNamespace(derive=derive), config)  # pyright: ignore
    coef = KL_COEF if kl_in == "reward" else 0.0
    assert made == [
        replace(MAKE, kl_coef=coef, kl_estimator="k2"),
        WhitenedAdvantages(Moments.joined([moments])),
    ]
    found = {name: one.value for name, one in metrics.items()}
    assert found == {"train/advantage_mean": 3.0, "train/advantage_std": 7**0.5}


def test_a_critic_trains_on_every_part_and_is_judged_by_the_first_pass():
    """Two mini-batches, twice; what it explains then is all, and of equal returns nothing."""
    trained, released = [], []

    def train(part, _):
        trained.append(part)
        numbers = {
            "return": 1.0,
            "return_square": 1.0 if part == "equal" else 5.0,
            "value_error": 0.0,
            "value_error_square": {"a1": 1.0, "b1": 3.0}.get(part, 0.0),
        }
        return {f"train/{name}": Metric(number) for name, number in numbers.items()}

    critic = SimpleNamespace(train=train, release_memory=lambda: released.append(len(trained)))
    parts = ["a1", "b1", "a2", "b2"]
    found = values(ppo.train_critic(critic, parts, None, 2))  # pyright: ignore
    assert (trained, released) == (parts, [4])
    assert found["critic/explained_variance"] == 0.5
    assert found["critic/value_error_square"] == 1.0
    metrics = ppo.train_critic(critic, ["equal"], None, 1)  # pyright: ignore
    assert "critic/explained_variance" not in metrics


def test_moments_of_equal_numbers_do_not_blow_up_their_rounding():
    """Two-pass deviations leave 1e-17 of the rounding of 0.95; dividing by it would give 1."""
    moments = Moments.joined([Moments.of(torch.full((n,), 0.95)) for n in (3, 0, 4)])
    assert moments.whiten(torch.tensor([0.95])).abs().item() < 1e-6
    assert Moments.joined([]).whiten(torch.tensor([2.0])).item() == 2.0


# On Ray workers.


@pytest.fixture(scope="module")
def scored_model(tmp_path_factory):
    """A model with a scalar head that is not 0."""
    folder = build_model(tmp_path_factory.mktemp("scored"))
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    torch.nn.init.normal_(model.score.weight, std=0.5)
    model.save_pretrained(folder)
    return folder


@contextmanager
def make_critic(folder, tmp_path, ranks, **config):
    cluster_config = ClusterConfig(cpu_workers_per_node=ranks)
    with VirtualCluster(plan_resources(cluster_config, 1), 60.0) as cluster:
        policy_config = PolicyConfig(**config)
        critic = RemoteModel(
            policy_config,
            cluster_config,
            policy_group(
                policy_config, cluster_config, cluster, log_dir=str(tmp_path), role="critic"
            ),
            model_path=str(folder),
            max_steps=1,
            output="values_before",
        )
        try:
            critic.start()
            yield critic
        finally:
            critic.group.shutdown()


def test_values_are_those_before_each_token_and_advantages_join_two_ranks(
    local_ray, scored_model, tmp_path
):
    whole = make_batch()
    batch = RemoteBatch.put(whole, rows_per_chunk=2)
    with make_critic(scored_model, tmp_path, ranks=2, micro_batch_tokens=32) as critic:
        critic.score(batch, keys.VALUES)
        parts = critic.derive(batch, MAKE)
        critic.derive(batch, WhitenedAdvantages(Moments.joined(parts)))
        fetched = batch.fetch()
        one_row = RemoteBatch.put(whole.select([0]), rows_per_chunk=1)  # fewer rows than ranks
        critic.score(one_row, keys.VALUES)
        assert len(critic.derive(one_row, MAKE)) == 1
        fetched_row = one_row.fetch()  # while its owner lives
    assert len(parts) == 2
    assert_as_plain(fetched)
    first = slice(0, LENGTHS[0])
    assert torch.allclose(
        fetched_row.tokens[keys.RETURNS], fetched.tokens[keys.RETURNS][first], atol=1e-6
    )

    model = AutoModelForSequenceClassification.from_pretrained(scored_model).eval()
    with torch.no_grad():
        for start, length, row in zip(whole.starts, LENGTHS, SAMPLED, strict=True):
            ids = whole.tokens[keys.INPUT_IDS][start : start + length]
            hidden = model.base_model(ids[None]).last_hidden_state[0]
            after = model.score(hidden)[:, 0]
            values = fetched.tokens[keys.VALUES][start : start + length]
            for t in range(length):
                expected = after[t - 1] if t in row else torch.tensor(0.0)
                assert torch.allclose(values[t], expected, atol=1e-5), (int(start), t)


# Whole runs.

PPO_SMALL = (*(one.replace("grpo", "ppo") for one in SMALL), "validation.every_steps=0")
# Everything that a step may have: KL, a critic ahead of the policy, several updates a batch.
FULL = (
    "loss.kl_coef=0.05",
    "loss.kl_in=reward",
    "loss.kl_estimator=k1",
    "ppo.num_critic_warmup_steps=1",
    "ppo.num_epochs_per_batch=2",
    "ppo.num_mini_batches=2",
    "critic.lr=1e-3",
    "checkpoint.every_steps=2",
)


def run(folder, *overrides):
    """Run to the end; returns the records of metrics.jsonl by step."""
    always = ("generation.backend=hf", "cluster.call_timeout_s=120", f"run.dir={folder}")
    config = compose_config(ROOT / "configs", "ppo", [*PPO_SMALL, *always, *overrides])
    run_config(config)
    return records(folder)


@pytest.fixture(scope="module")
def straight(local_ray, tmp_path_factory):
    """Four steps without interruption: their folder and records."""
    folder = tmp_path_factory.mktemp("ppo")
    return SimpleNamespace(folder=folder, steps=run(folder, "ppo.max_steps=4", *FULL))


def test_a_run_trains_the_critic_first_and_leaves_both_models(straight):
    steps = straight.steps
    assert "train/loss" not in steps[1]
    assert steps[1]["critic/grad_norm"] > 0
    assert steps[1]["rollout/reference_kl"] == pytest.approx(0.0, abs=1e-5)
    assert steps[2]["train/grad_norm"] > 0
    assert steps[3]["rollout/reference_kl"] != 0
    assert steps[2]["critic/value"] != 0
    head = AutoModelForSequenceClassification.from_pretrained(straight.folder / "final_critic")
    assert head.score.weight.abs().sum() > 0
    assert (straight.folder / "final" / "chat_template.jinja").is_file()
    for role in ("policy", "critic"):
        assert (straight.folder / "checkpoints" / "step_4" / role).is_dir()


def test_without_a_critic_it_is_reinforce_with_kl_in_each_tokens_reward(tmp_path):
    options = [one for one in FULL if "critic" not in one]
    steps = run(tmp_path, "ppo.max_steps=1", *options, "critic.enabled=false", "ppo.lam=1")
    assert steps[1]["train/grad_norm"] > 0
    assert not [name for name in steps[1] if name.startswith("critic/")]
    assert not (tmp_path / "final_critic").exists()


def test_two_workers_take_the_steps_of_one(tmp_path, straight):
    """Two ranks of each model."""
    steps = run(tmp_path, "ppo.max_steps=2", *FULL, "cluster.cpu_workers_per_node=2")
    for step in (1, 2):
        for name, value in numbers(straight.steps[step]).items():
            if name.startswith(("rollout/", "train/", "critic/")):
                assert steps[step][name] == pytest.approx(value, abs=1e-5), (step, name)


class StopError(Exception):
    """Ends a run at once, as a fault of its own would."""


def test_stop_and_resume_repeats_the_uninterrupted_run_bit_for_bit(tmp_path, straight, monkeypatch):
    """Stopped in the middle of the third step, between the critic's updates and the policy's."""
    train_critic, calls = ppo.train_critic, iter(range(3))

    def breaking(*args):
        metrics = train_critic(*args)
        if next(calls) == 2:
            raise StopError
        return metrics

    with monkeypatch.context() as patch, pytest.raises(StopError):
        patch.setattr(ppo, "train_critic", breaking)
        run(tmp_path, "ppo.max_steps=4", *FULL)
    assert list(records(tmp_path)) == [1, 2]
    resumed = run(tmp_path, "ppo.max_steps=4", *FULL, "run.resume=true")
    for step in range(1, 5):
        assert numbers(resumed[step]) == numbers(straight.steps[step]), step


# Wrong input.


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("ppo.gamma=1.5", "ppo.gamma=1.5 must be in [0, 1]."),
        ("ppo.lam=-0.1", "ppo.lam=-0.1 must be in [0, 1]."),
        ("ppo.num_critic_warmup_steps=40", "must be below ppo.max_steps=40"),
        ("ppo.num_mini_batches=17", "ppo.num_mini_batches=17 is more than the 16 groups of ppo."),
        ("value_loss.clip=0", "value_loss.clip=0 must be above 0"),
        ("critic.lr=0", "critic.lr=0 must be above 0"),
        ("critic.model=./nowhere", "critic.model=./nowhere: no such folder"),
        ("loss.kl_in=reward", "loss.kl_coef is 0"),
        ("critic.enabled=false", "ppo.lam=0.95 weighs values"),
        (
            "critic.enabled=false ppo.lam=1 critic.lr=1e-3",
            "critic.lr=0.001 would have no effect: critic.enabled=false",
        ),
        (
            "policy.parallel.tensor_parallel_size=2 cluster.cpu_workers_per_node=2",
            "policy.parallel.tensor_parallel_size=2 does not go with a scalar head; set it to 1",
        ),
    ],
)
def test_what_cannot_work_or_would_do_nothing_is_refused(overrides, message):
    with pytest.raises(UserError) as error:
        compose_config(ROOT / "configs", "ppo", overrides.split())
    assert message in str(error.value)


def test_a_group_of_one_completion_is_let_through():
    check(PPOConfig(ppo=PPOSection(num_generations_per_prompt=1)))


def test_a_critic_that_reads_other_tokens_is_refused(tiny_model):
    config = PPOConfig(critic=CriticConfig(model=tiny_model()))
    embedded = str(ROOT / "nemo_like" / "models" / "embedded")
    with pytest.raises(UserError, match=r"critic\.model=.* has other tokens than .*=embedded"):
        find_critic(config, embedded)
    assert find_critic(config, tiny_model()) == tiny_model()


# Learning.


@pytest.mark.parametrize("seed", SEEDS)
def test_ppo_learns_the_embedded_models_task_and_its_critic_to_tell_who_will_succeed(
    local_ray, tmp_path, seed
):
    steps = run(
        tmp_path,
        f"run.seed={seed}",
        "ppo.max_steps=8",
        "ppo.num_prompts_per_step=64",
        "ppo.num_generations_per_prompt=1",
        "ppo.num_mini_batches=4",
        "policy.optimizer.lr=3e-4",
        "critic.lr=1e-3",
        "data.num_train_rows=400",
        "checkpoint.export=false",
    )
    reward = [steps[step]["rollout/reward"] for step in range(1, 9)]
    assert sum(reward[-3:]) / 3 > sum(reward[:3]) / 3 + 0.15, reward
    explained = [steps[step]["critic/explained_variance"] for step in range(1, 9)]
    assert sum(explained[-3:]) / 3 > 0.2, explained
