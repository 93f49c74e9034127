"""Proximal policy optimization with a critic (arXiv:1707.06347), on scored completions.

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

from nemo_like.algorithms.policy_gradient import (
    PolicyGradient,
    mask_mismatch,
    mini_batches,
    training_metrics,
)
from nemo_like.algorithms.ppo.config import PPOConfig
from nemo_like.algorithms.sampling import Sampling, start_sampling
from nemo_like.algorithms.session import Session
from nemo_like.batch import keys
from nemo_like.data.chat import ChatTokenizer
from nemo_like.distributed.remote_batch import RemoteBatch
from nemo_like.errors import UserError
from nemo_like.losses.advantages import Moments
from nemo_like.losses.value import (
    TokenAdvantages,
    ValueLoss,
    WhitenedAdvantages,
    explained_variance,
)
from nemo_like.models.resolve import resolve_model
from nemo_like.observe.metrics import Metric, Metrics, mean_of_steps, merge, values
from nemo_like.planning.placement import check_model_fits
from nemo_like.planning.resources import plan_run
from nemo_like.policy.remote_model import RemoteModel


def run(config: PPOConfig, session: Session) -> None:
    """From a run's processes to a trained policy and critic in ``run.dir``."""
    critic = None
    if config.critic.enabled:
        folder = find_critic(config, session.model_path)
        critic = new_critic(config, session, folder)
    live = start_sampling(config, session, critic)
    train(config, live)
    models = {"final": live.policy} | ({"final_critic": critic} if critic is not None else {})
    session.finish(models, generation_backend=config.generation.backend)


def train(config: PPOConfig, live: Sampling) -> None:
    """The loop."""
    ppo, critic, span = config.ppo, live.critic, live.session.run.span
    updates, value_loss = PolicyGradient(config, live), ValueLoss(config.value_loss)
    for step, batch, metrics in live.batches():
        updates.watch_rewards(batch, metrics)
        metrics |= updates.logprobs(batch)
        metrics |= mask_mismatch(batch, config)
        with span("advantages"):
            if critic is not None:
                critic.score(batch, keys.VALUES)
            metrics |= add_advantages(batch, live.policy, config)
        metrics |= training_metrics(batch)
        parts = list(mini_batches(batch, config, step))
        if critic is not None:
            with span("train_critic"):
                metrics |= train_critic(critic, parts, value_loss, ppo.num_mini_batches)
        if step > ppo.num_critic_warmup_steps:
            metrics |= updates.train(step, batch, parts)
        live.log(metrics)


def find_critic(config: PPOConfig, model_path: str) -> str:
    """The critic's folder; UserError if it does not read the policy's tokens."""
    folder = model_path
    if config.critic.model is not None:
        folder = str(resolve_model(config.critic.model, "critic.model"))
        if ChatTokenizer(folder).token_ids() != ChatTokenizer(model_path).token_ids():
            raise UserError(
                f"critic.model={config.critic.model} has other tokens than "
                f"policy.model={config.policy.model}, whose completions it reads; use a model with "
                "the same tokenizer, or null for the policy's."
            )
    check_model_fits(config.critic_policy, len(plan_run(config).policy), Path(folder))
    return folder


def new_critic(config: PPOConfig, session: Session, model_path: str) -> RemoteModel:
    """A model that gives values, on the policy's bundles; not started yet."""
    return RemoteModel(
        config.critic_policy,
        config.cluster,
        session.new_group(config.critic_policy, model_path, "critic"),
        model_path=model_path,
        max_steps=config.max_critic_updates,
        output="values_before",
    )


def add_advantages(batch: RemoteBatch, policy: RemoteModel, config: PPOConfig) -> Metrics:
    """Token columns ``advantages`` and ``returns``; whitened over all ranks' trained tokens."""
    ppo, loss = config.ppo, config.loss
    make = TokenAdvantages(
        gamma=ppo.gamma,
        lam=ppo.lam,
        kl_coef=loss.kl_coef if config.kl_in_reward else 0.0,
        kl_estimator=loss.kl_estimator,
    )
    moments = Moments.joined(policy.derive(batch, make))
    policy.derive(batch, WhitenedAdvantages(moments))
    return {
        "train/advantage_mean": Metric(moments.mean),
        "train/advantage_std": Metric(moments.deviation),
    }


def train_critic(
    critic: RemoteModel, parts: list[RemoteBatch], loss: ValueLoss, num_mini_batches: int
) -> Metrics:
    """One optimizer step per part; metrics ``critic/...``.

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
