"""Group Relative Policy Optimization (arXiv:2402.03300) and its relatives, by their parameters.

For each prompt a group of completions is sampled and scored; a completion's advantage is its reward
less a baseline; the policy-gradient loss moves the policy. ``configs/recipes`` has the settings of
GRPO, Dr. GRPO, DAPO, GSPO, CISPO, RLOO, REINFORCE and REINFORCE++ (``losses/advantages.py`` and
``losses/policy_gradient.py`` name the equations). By default a batch takes one optimizer step,
which is on-policy: its own forward pass gives the policy's logprobs, and no extra pass is made.
"""

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from nemo_like.algorithms.grpo.config import GRPOConfig
from nemo_like.algorithms.policy_gradient import PolicyGradient, mask_mismatch, training_metrics
from nemo_like.algorithms.sampling import Sampling, start_sampling
from nemo_like.algorithms.session import Session
from nemo_like.batch import keys
from nemo_like.config.advantages import ADVANTAGES
from nemo_like.distributed.remote_batch import RemoteBatch
from nemo_like.losses.advantages import (
    advantages_of_turns,
    by_task,
    group_advantages,
    has_signal,
    overlong_penalty,
    reward_to_go,
    whiten,
    zero_variance_share,
)
from nemo_like.observe.metrics import Metric, Metrics
from nemo_like.rollout.trajectory import first_rows

logger = logging.getLogger(__name__)


def run(config: GRPOConfig, session: Session) -> None:
    """From a run's processes to a trained model in ``run.dir``."""
    live = start_sampling(config, session)
    train(config, live)
    session.finish({"final": live.policy}, generation_backend=config.generation.backend)


def train(config: GRPOConfig, live: Sampling) -> None:
    """The loop."""
    grpo, updates = config.grpo, PolicyGradient(config, live)
    if config.reuses_logprobs:
        logger.info(
            "One optimizer step per batch: its own forward pass gives the policy's logprobs."
        )

    def keep(batch: RemoteBatch) -> Tensor:
        return signal(batch, config)

    def advantages(batch: RemoteBatch) -> None:
        add_advantages(batch, config)
        if config.advantage.credit == "step":
            live.policy.derive(batch, advantages_of_turns)

    def early(part: RemoteBatch) -> None:
        choose_rows(part, config)
        advantages(part)
        updates.add(part)

    for step, batch, metrics in live.batches(
        keep=keep if grpo.dynamic_sampling else None,
        early=early if config.rollout.overlap else None,
    ):
        updates.watch_rewards(batch, metrics)
        metrics |= updates.logprobs(batch)
        # With overlap each part had columns of its own; these are for the metrics.
        metrics |= choose_rows(batch, config)
        advantages(batch)
        metrics |= training_metrics(batch)
        metrics |= updates.train(step, batch)
        live.log(metrics)


def trainable(batch: RemoteBatch, config: GRPOConfig) -> Tensor:
    """Bool [B]: scored completions with tokens, unless ``grpo.mask_truncated`` leaves them out."""
    rows = batch.rows
    trains = rows[keys.SAMPLE_MASK] & (rows[keys.NUM_LOSS_TOKENS] > 0)
    return trains & ~rows[keys.TRUNCATED] if config.grpo.mask_truncated else trains


def counted(batch: RemoteBatch, config: GRPOConfig) -> Tensor:
    """Bool [B]: completions that count in baselines and scales.

    They are those that train: what is left out of the loss would otherwise shift the advantages of
    its siblings, whose sum is then no longer 0.
    """
    if config.advantage.count_untrained:
        return ~batch.rows[keys.REWARDS].isnan()
    return trainable(batch, config)


def signal(batch: RemoteBatch, config: GRPOConfig) -> Tensor:
    """Bool [B]: rows of groups with different raw rewards."""
    rows = batch.rows
    return has_signal(rows[keys.REWARDS], rows[keys.GROUP_IDS], counted(batch, config))


def choose_rows(batch: RemoteBatch, config: GRPOConfig) -> Metrics:
    """Take completions that do not train out of ``SAMPLE_MASK``, before anything counts them.

    Groups without a signal, which dynamic sampling gives where it found no other, do not train.
    """
    rows = batch.rows
    rows[keys.SAMPLE_MASK] = trainable(batch, config)
    metrics = mask_mismatch(batch, config) | group_metrics(batch, config)
    if config.grpo.dynamic_sampling:
        rows[keys.SAMPLE_MASK] = rows[keys.SAMPLE_MASK] & signal(batch, config)
    return metrics


def add_advantages(batch: RemoteBatch, config: GRPOConfig) -> None:
    """Add row column ``advantages``, from rewards, penalties and KL, or ``step_advantages``.

    A trajectory counts once in its group, if any of its rows counts; all rows have its advantage.
    """
    rows, advantage = batch.rows, config.advantage
    first, trajectory = first_rows(rows)

    def total(column: Tensor) -> Tensor:
        return torch.zeros(len(first), dtype=column.dtype).index_add_(0, trajectory, column)

    rewards = rows[keys.REWARDS][first].double()
    if advantage.overlong_buffer_tokens:
        rewards = rewards + overlong_penalty(
            total(rows[keys.NUM_LOSS_TOKENS]),
            config.generation.max_new_tokens,
            advantage.overlong_buffer_tokens,
        )
    if config.kl_in_reward:
        rewards = rewards - config.loss.kl_coef * total(rows[keys.REFERENCE_KL])
    function: Callable[..., Tensor] = group_advantages
    if advantage.function is not None:
        function = ADVANTAGES.load("advantage.function", advantage.function)
    groups, valid = rows[keys.GROUP_IDS][first], total(counted(batch, config).long()) > 0
    tasks = rows[keys.TASKS][first] if advantage.per_task else torch.zeros_like(groups)

    def advantages_of(rewards: Tensor, valid: Tensor, of: Tensor | slice = slice(None)) -> Tensor:
        return by_task(
            lambda *part: function(*part, advantage), tasks[of], rewards, groups[of], valid
        )

    if advantage.credit == "step":
        turn_rewards = rows[keys.STEP_REWARDS][first]
        given = ~turn_rewards.isnan() & valid[:, None]
        of_turns, of_trajectory = torch.zeros(turn_rewards.shape), given.nonzero(as_tuple=True)[0]
        of_turns[given] = advantages_of(
            turn_rewards[given], torch.ones(len(of_trajectory), dtype=torch.bool), of_trajectory
        )
        rows[keys.STEP_ADVANTAGES] = reward_to_go(of_turns)[trajectory]
        return
    if not advantage.each_reward:
        rows[keys.ADVANTAGES] = advantages_of(rewards, valid)[trajectory]
        return
    joined = torch.zeros_like(rewards, dtype=torch.float32)
    for name, part in config.environment.rewards.items():
        of_part = rows[f"{keys.REWARD_OF}{name}"][first]
        # A function with TRL's signature may give none for a row.
        joined += part.weight * advantages_of(of_part, valid & ~of_part.isnan())
    rows[keys.ADVANTAGES] = by_task(whiten, tasks, joined, valid)[trajectory]


def group_metrics(batch: RemoteBatch, config: GRPOConfig) -> Metrics:
    """How many groups have no signal."""
    rows = batch.rows
    share = zero_variance_share(rows[keys.REWARDS], rows[keys.GROUP_IDS], counted(batch, config))
    return {"rollout/zero_variance_share": Metric(share)}
