"""What GRPO and PPO share: logprobs before a step, its optimizer steps, and their checks."""

import logging
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from nemo_like.algorithms.checks import RewardWatch, check_ratios, max_mean_mismatch
from nemo_like.batch import keys
from nemo_like.config.sampling import PolicyGradientRunConfig
from nemo_like.distributed.remote_batch import RemoteBatch
from nemo_like.doors import absolute
from nemo_like.losses.advantages import of_trained
from nemo_like.losses.policy_gradient import ClippedPGLoss
from nemo_like.observe.metrics import Metric, Metrics, Reduce, mean_of_steps

if TYPE_CHECKING:
    from nemo_like.algorithms.sampling import Sampling

logger = logging.getLogger(__name__)


class PolicyGradient:
    """One policy-gradient step on a batch of completions: what surrounds its advantages."""

    def __init__(self, config: PolicyGradientRunConfig, live: "Sampling") -> None:
        self._config, self._live = config, live
        self._loss = make_loss(config)
        self._by_token = config.loss.normalization == "token"
        self._count = 0.0
        """Denominators of the groups added so far."""
        most = config.rows_per_step * (config.generation.max_new_tokens if self._by_token else 1)
        self._early_divisor = 2.0 ** math.ceil(math.log2(most))
        """Of early gradients, whose sums would overflow float16. A power of two rounds nothing."""
        self.watch_rewards = RewardWatch(config.environment.reward)

    def logprobs(self, batch: RemoteBatch) -> Metrics:
        """Token columns of logprobs from before the step, as far as this run needs them."""
        config, live = self._config, self._live
        reuse = config.reuses_logprobs
        if reuse and (config.loss.kl_coef == 0 or config.rollout.overlap):
            return {}
        kl = config.loss.kl_estimator if config.kl_in_reward else None
        with live.session.run.span("logprobs"):
            metrics = live.policy.logprobs(batch, with_policy=not reuse, kl=kl)
        if not reuse:
            live.mismatch_check()(metrics)
        return metrics

    def add(self, part: RemoteBatch) -> None:
        """Compute gradients of some of the step's groups early."""
        config, policy = self._config, self._live.policy
        if config.loss.kl_coef:
            policy.logprobs(part, with_policy=False)
        counts = policy.add(part, self._loss, self._early_divisor)
        self._count += counts.tokens if self._by_token else counts.sequences

    def train(
        self, step: int, batch: RemoteBatch, parts: Iterable[RemoteBatch] | None = None
    ) -> Metrics:
        """One optimizer step on each of ``parts``; None: those of ``mini_batches``.

        If groups were added before, it completes their step.
        """
        config, live = self._config, self._live
        reuse, check = config.reuses_logprobs, live.mismatch_check()
        if config.rollout.overlap:
            count, self._count = self._count, 0.0
            with live.session.run.span("train"):
                return live.policy.finish(count / self._early_divisor, check)
        with live.session.run.span("train"):
            updates = [
                live.policy.train(one, self._loss, check=check if reuse else None)
                for one in (mini_batches(batch, config, step) if parts is None else parts)
            ]
        check_ratios(config, updates[0], live.num_made)
        return mean_of_steps(updates)


def make_loss(config: PolicyGradientRunConfig) -> ClippedPGLoss:
    """The loss, completed with values of other sections."""
    loss = config.loss
    most = loss.constant_tokens or config.generation.max_new_tokens
    return ClippedPGLoss(loss.replace(constant_tokens=most, objective=absolute(loss.objective)))


def mask_mismatch(batch: RemoteBatch, config: PolicyGradientRunConfig) -> Metrics:
    """Exclude rows where engine and policy disagree, if ``mismatch.action=mask``.

    Call it before the step, which then takes its mean over the others, and before advantages.
    """
    if not config.masks_mismatch:
        return {}
    rows = batch.rows
    # Not ">": a NaN must mask its row.
    kept = rows[keys.SAMPLE_MASK] & (rows[keys.MEAN_MISMATCHES] <= max_mean_mismatch(config))
    masked = int(rows[keys.SAMPLE_MASK].sum() - kept.sum())
    if masked and not kept.any():
        logger.warning(
            "mismatch.action=mask leaves none of %d completions: the least mismatch is %.3g, the "
            "limit %.3g (mismatch.max_mean_abs).",
            masked,
            rows[keys.MEAN_MISMATCHES][rows[keys.SAMPLE_MASK]].min(),
            max_mean_mismatch(config),
        )
    rows[keys.SAMPLE_MASK] = kept
    return {"mismatch/masked_rows": Metric(masked, reduce=Reduce.sum)}


def mini_batches(
    batch: RemoteBatch, config: PolicyGradientRunConfig, step: int
) -> Iterator[RemoteBatch]:
    """The batch of each optimizer step: whole groups, shuffled for each pass."""
    loop = config.loop
    if loop.num_updates == 1:
        yield batch
        return
    generator = torch.Generator().manual_seed(config.run.seed * 1_000_003 + step)
    prompts = batch.rows[keys.GROUP_IDS]
    groups = prompts.unique()
    for _ in range(loop.num_epochs_per_batch):
        order = groups[torch.randperm(len(groups), generator=generator)]
        for part in order.tensor_split(loop.num_mini_batches):
            yield batch.select(torch.isin(prompts, part).nonzero(as_tuple=True)[0])


def training_metrics(batch: RemoteBatch) -> Metrics:
    """What the driver knows about a batch that trains, besides what its workers reported."""
    rows = batch.rows
    trained = rows[keys.NUM_LOSS_TOKENS][rows[keys.SAMPLE_MASK]]
    metrics: Metrics = {"train/num_tokens": Metric(int(trained.sum()), reduce=Reduce.sum)}
    if len(advantages := of_trained(rows).double()):
        found = {"mean": advantages.mean(), "std": advantages.std(correction=0)}
        for name, one in found.items():
            metrics[f"train/advantage_{name}"] = Metric(one.item(), weight=len(advantages))
    if keys.REFERENCE_KL in rows:
        scored = rows[keys.REFERENCE_KL][~rows[keys.REWARDS].isnan()]
        metrics["rollout/reference_kl"] = Metric(scored.mean().item(), weight=len(scored))
    return metrics
