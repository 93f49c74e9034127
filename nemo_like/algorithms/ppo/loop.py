"""Proximal policy optimization with a critic (arXiv:1707.06347), on graded completions.

A critic, a model of its own with a scalar head, predicts at each token what the completion will
still earn; generalized advantage estimation (arXiv:1506.02438) turns rewards and values into one
advantage a token; the clipped loss moves the policy, and half the squared error of its values the
critic. A completion earns its reward at its last token and, with ``loss.kl_in=reward``, less at
each token for its KL to the reference. Tokens and what is computed of them stay on the ranks; the
driver sees the moments of all advantages, by which they are whitened. ``critic.enabled=false`` is
REINFORCE++ (arXiv:2501.03262). Left out here: tensor, context and pipeline parallelism, which the
scalar head does not know; a value in place of the reward of completions that were cut off.
"""

import math
from pathlib import Path

from nemo_like.advantages import Moments
from nemo_like.algorithms.grpo.loop import batch_metrics, make_loss, mask_mismatch, mini_batches
from nemo_like.algorithms.ppo.config import PPOConfig
from nemo_like.algorithms.processes import Processes
from nemo_like.algorithms.run import Run
from nemo_like.algorithms.self_check import (
    RewardWatch,
    check_ratios,
    check_sampled,
    gap_check,
    warn_of_gap,
)
from nemo_like.algorithms.setup import CriticSetup, Setup, prepare, start
from nemo_like.batch import keys
from nemo_like.data.chat import ChatTokenizer
from nemo_like.distributed.remote_batch import RemoteBatch
from nemo_like.errors import UserError
from nemo_like.losses.value import ValueLoss, explained_variance
from nemo_like.models.resolve import resolve_model
from nemo_like.observe.metrics import Metric, Metrics, mean_of_steps, merge, values
from nemo_like.planning.model_fit import check_model_fits
from nemo_like.planning.resources import plan_run
from nemo_like.policy.policy import Policy
from nemo_like.policy.token_advantages import TokenAdvantages, WhitenedAdvantages


def run_ppo(config: PPOConfig, processes: Processes) -> None:
    """Everything from a run's processes to a trained policy and critic in ``run.dir``."""
    run = processes.run
    with run.start_phase("prompts"):
        critic = find_critic(config, processes.model_path)
        prepared = prepare(config, processes.rows, processes.model_path)
    setup = start(
        config,
        processes,
        prepared,
        with_reference=config.keeps_reference,
        critic=critic,
    )
    train(config, setup, run)
    if config.checkpoint.export:
        setup.policy.export(str(run.dir / "final"))
        if setup.critic is not None:
            setup.critic.export(str(run.dir / "final_critic"))
    run.finish(generation_backend=config.generation.backend)


def find_critic(config: PPOConfig, model_path: str) -> CriticSetup | None:
    """The critic's model and settings; UserError if it does not read the policy's tokens."""
    if not config.critic.enabled:
        return None
    folder = model_path
    if config.critic.model is not None:
        folder = str(resolve_model(config.critic.model, "critic.model"))
        if not ChatTokenizer(folder).has_tokens_of(ChatTokenizer(model_path)):
            raise UserError(
                f"critic.model={config.critic.model} has other tokens than "
                f"policy.model={config.policy.model}, whose completions it reads; use a model with "
                "the same tokenizer, or null for the policy's."
            )
    plan = plan_run(config)
    check_model_fits(config.critic_policy, len(plan.critic or plan.policy), Path(folder))
    return CriticSetup(
        config=config.critic_policy,
        model_path=folder,
        max_updates=config.max_critic_updates,
    )


def train(config: PPOConfig, setup: Setup, run: Run) -> None:
    """The loop."""
    policy, critic, rollouts, ppo = setup.policy, setup.critic, setup.rollouts, config.ppo
    kl = config.loss.kl_estimator if config.kl_in_reward else None
    reuse = config.reuses_logprobs
    loss, value_loss = make_loss(config), ValueLoss(config.value_loss)
    watch_rewards = RewardWatch(config.environment.reward)
    for step in run.steps(
        ppo.max_steps,
        setup.models,
        setup.loader,
        rollouts if config.validates else None,
        config.validation.every_steps,
    ):
        setup.meter.pop()  # what a validation before this step came to
        batch, metrics = rollouts.next_batch(step)  # refits first if its weights are stale
        num_made = step - run.first_step
        check_sampled(config, batch, policy.weight_version, num_made)
        watch_rewards(batch, metrics)
        check = gap_check(config, num_made)
        if not reuse or config.loss.kl_coef > 0:
            with run.span("logprobs"):
                metrics |= policy.logprobs(batch, with_policy=not reuse, kl=kl)
        if not reuse:
            check(metrics)
        metrics |= mask_mismatch(batch, config)
        with run.span("advantages"):
            if critic is not None:
                critic.score(batch, keys.VALUES)
            metrics |= add_advantages(batch, policy, config)
        metrics |= batch_metrics(batch)
        parts = list(mini_batches(batch, config, step))
        if critic is not None:
            with run.span("train_critic"):
                metrics |= train_critic(critic, parts, value_loss, ppo.num_mini_batches)
        if step > ppo.num_critic_warmup_steps:
            with run.span("train"):
                updates = [
                    policy.train(one, loss, on_policy=reuse, check=check if reuse else None)
                    for one in parts
                ]
            check_ratios(config, updates[0], num_made)
            metrics |= mean_of_steps(updates)
        warn_of_gap(config, metrics)
        run.log(metrics | setup.meter.pop())


def add_advantages(batch: RemoteBatch, policy: Policy, config: PPOConfig) -> Metrics:
    """Token columns ``advantages`` and ``returns``; whitened over all ranks' trained tokens."""
    ppo, loss = config.ppo, config.loss
    make = TokenAdvantages(
        gamma=ppo.gamma,
        lam=ppo.lam,
        kl_coef=loss.kl_coef if config.kl_in_reward else 0.0,
        kl_estimator=loss.kl_estimator,
    )
    moments = Moments.joined(policy.derive(batch, make))
    if ppo.whiten_advantages:
        policy.derive(batch, WhitenedAdvantages(moments))
    return {
        "train/advantage_mean": Metric(moments.mean),
        "train/advantage_std": Metric(moments.deviation),
    }


def train_critic(
    critic: Policy, parts: list[RemoteBatch], loss: ValueLoss, num_mini_batches: int
) -> Metrics:
    """One optimizer step a part; metrics ``critic/...``.

    The explained variance is that of the first pass, where each part is scored before any step
    has been taken on it.
    """
    updates = [critic.train(one, loss) for one in parts]
    critic.release_memory()  # the policy trains next, on the same devices
    metrics = {
        f"critic/{name.rpartition('/')[2]}": metric
        for name, metric in mean_of_steps(updates).items()
    }
    first_pass = values(merge(updates[:num_mini_batches]))
    explained = explained_variance(first_pass) if first_pass else math.nan
    if not math.isnan(explained):  # returns that are all equal have no variance
        metrics["critic/explained_variance"] = Metric(explained)
    return metrics
