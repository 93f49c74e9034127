"""Group Relative Policy Optimization (arXiv:2402.03300) and its relatives, by their parameters.

For each prompt a group of completions is sampled and graded; a completion's advantage is its reward
less a baseline; the policy-gradient loss moves the policy. ``configs/recipes`` has the settings of
GRPO, Dr. GRPO, DAPO, GSPO, CISPO, RLOO, REINFORCE and REINFORCE++ (``advantages.py`` and
``losses/policy_gradient.py`` name the equations). By default a batch takes one optimizer step,
which is on-policy, so that its own forward pass gives the policy's logprobs and no pass is made for
them. Left out here: asynchronous rollouts, token-level rewards.
"""

import logging
from collections.abc import Iterator

import torch
from torch import Tensor

from nemo_like.advantages import (
    group_advantages,
    has_signal,
    overlong_penalty,
    zero_variance_share,
)
from nemo_like.algorithms.grpo.config import GRPOConfig
from nemo_like.algorithms.processes import Processes
from nemo_like.algorithms.run import Run
from nemo_like.algorithms.self_check import (
    RewardWatch,
    check_ratios,
    check_sampled,
    gap_check,
    max_mean_gap,
    warn_of_gap,
)
from nemo_like.algorithms.setup import Setup, prepare, start
from nemo_like.batch import keys
from nemo_like.config.sampling import PolicyGradientRunConfig
from nemo_like.distributed.remote_batch import RemoteBatch
from nemo_like.losses.policy_gradient import ClippedPGLoss
from nemo_like.observe.metrics import Metric, Metrics, Reduce, mean_of_steps

logger = logging.getLogger(__name__)


def run_grpo(config: GRPOConfig, processes: Processes) -> None:
    """Everything from a run's processes to a trained model in ``run.dir``."""
    run = processes.run
    with run.start_phase("prompts"):
        prepared = prepare(config, processes.rows, processes.model_path)
    setup = start(
        config,
        processes,
        prepared,
        with_reference=config.keeps_reference,
    )
    train(config, setup, run)
    if config.checkpoint.export:
        setup.policy.export(str(run.dir / "final"))
    run.finish(generation_backend=config.generation.backend)


def train(config: GRPOConfig, setup: Setup, run: Run) -> None:
    """The loop."""
    policy, rollouts, grpo = setup.policy, setup.rollouts, config.grpo
    kl = config.loss.kl_estimator if config.kl_in_reward else None
    reuse = config.reuses_logprobs
    loss = make_loss(config)
    if reuse:
        logger.info("One optimizer step a batch: its own forward pass gives the policy's logprobs.")
    watch_rewards = RewardWatch(config.environment.reward)

    def keep(batch: RemoteBatch) -> Tensor:
        return signal(batch, config)

    for step in run.steps(
        grpo.max_steps,
        setup.models,
        setup.loader,
        rollouts if config.validates else None,
        config.validation.every_steps,
    ):
        setup.meter.pop()  # what a validation before this step came to
        if grpo.dynamic_sampling:
            batch, metrics = rollouts.next_batch(step, keep, grpo.max_sampling_rounds)
        else:
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
        metrics |= choose_rows(batch, config)
        add_advantages(batch, config)
        metrics |= batch_metrics(batch)
        with run.span("train"):
            updates = [
                policy.train(one, loss, on_policy=reuse, check=check if reuse else None)
                for one in mini_batches(batch, config, step)
            ]
        check_ratios(config, updates[0], num_made)
        metrics |= mean_of_steps(updates)
        warn_of_gap(config, metrics)
        run.log(metrics | setup.meter.pop())


def make_loss(config: PolicyGradientRunConfig) -> ClippedPGLoss:
    """The loss, with everything that other sections decide filled in."""
    most = config.loss.constant_tokens or config.generation.max_new_tokens
    return ClippedPGLoss(config.loss.replace(constant_tokens=most))


def trainable(batch: RemoteBatch, config: GRPOConfig) -> Tensor:
    """Bool [B]: graded completions with tokens, unless ``grpo.mask_truncated`` leaves them out."""
    rows = batch.rows
    trains = rows[keys.SAMPLE_MASK] & (rows[keys.NUM_LOSS_TOKENS] > 0)
    return trains & ~rows[keys.TRUNCATED] if config.grpo.mask_truncated else trains


def counted(batch: RemoteBatch, config: GRPOConfig) -> Tensor:
    """Bool [B]: completions whose rewards make baselines and scales.

    They are those that train: what is left out of the loss would otherwise shift the advantages of
    its siblings, whose sum is then no longer 0.
    """
    if config.advantage.count_untrained:
        return ~batch.rows[keys.REWARDS].isnan()
    return trainable(batch, config)


def signal(batch: RemoteBatch, config: GRPOConfig) -> Tensor:
    """Bool [B]: rows of groups that count raw rewards which differ."""
    rows = batch.rows
    return has_signal(rows[keys.REWARDS], rows[keys.PROMPT_IDS], counted(batch, config))


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
    """Row column ``advantages``, from rewards with what the configuration adds to them."""
    rows, advantage = batch.rows, config.advantage
    rewards = rows[keys.REWARDS].double()
    if advantage.overlong_buffer_tokens:
        rewards = rewards + overlong_penalty(
            rows[keys.NUM_LOSS_TOKENS],
            config.generation.max_new_tokens,
            advantage.overlong_buffer_tokens,
            advantage.overlong_penalty,
        )
    if config.kl_in_reward:
        rewards = rewards - config.loss.kl_coef * rows[keys.REFERENCE_KL]
    rows[keys.ADVANTAGES] = group_advantages(
        rewards, rows[keys.PROMPT_IDS], counted(batch, config), advantage
    )


def mask_mismatch(batch: RemoteBatch, config: PolicyGradientRunConfig) -> Metrics:
    """Take rows that engine and policy disagree about out of training, if so configured.

    Before the step, so that its mean is over the others, and before advantages.
    """
    if not config.masks_mismatch:
        return {}
    rows = batch.rows
    # Not "above", so that a gap of NaN masks its row.
    kept = rows[keys.SAMPLE_MASK] & (rows[keys.MEAN_GAPS] <= max_mean_gap(config))
    masked = int(rows[keys.SAMPLE_MASK].sum() - kept.sum())
    if masked and not kept.any():
        logger.warning(
            "mismatch.action=mask leaves none of %d completions: the least gap is %.3g, the limit "
            "%.3g (mismatch.max_mean_abs).",
            masked,
            rows[keys.MEAN_GAPS][rows[keys.SAMPLE_MASK]].min(),
            max_mean_gap(config),
        )
    rows[keys.SAMPLE_MASK] = kept
    return {"mismatch/masked_rows": Metric(masked, reduce=Reduce.sum)}


def mini_batches(
    batch: RemoteBatch, config: PolicyGradientRunConfig, step: int
) -> Iterator[RemoteBatch]:
    """The batch of each optimizer step: whole groups, dealt anew in each pass."""
    loop = config.loop
    if loop.num_updates == 1:
        yield batch
        return
    generator = torch.Generator().manual_seed(config.run.seed * 1_000_003 + step)
    prompts = batch.rows[keys.PROMPT_IDS]
    groups = prompts.unique()
    for _ in range(loop.num_epochs_per_batch):
        order = groups[torch.randperm(len(groups), generator=generator)]
        for part in order.tensor_split(loop.num_mini_batches):
            yield batch.select(torch.isin(prompts, part).nonzero(as_tuple=True)[0])


def batch_metrics(batch: RemoteBatch) -> Metrics:
    """What the driver knows of a batch, as it trains, beside what its workers reported."""
    rows = batch.rows
    trained = rows[keys.NUM_LOSS_TOKENS][rows[keys.SAMPLE_MASK]]
    metrics: Metrics = {"train/num_tokens": Metric(int(trained.sum()), reduce=Reduce.sum)}
    if keys.REFERENCE_KL in rows:
        graded = rows[keys.REFERENCE_KL][~rows[keys.REWARDS].isnan()]
        metrics["rollout/reference_kl"] = Metric(graded.mean().item(), weight=len(graded))
    return metrics


def group_metrics(batch: RemoteBatch, config: GRPOConfig) -> Metrics:
    """How many groups have no signal."""
    rows = batch.rows
    share = zero_variance_share(rows[keys.REWARDS], rows[keys.PROMPT_IDS], counted(batch, config))
    return {"rollout/zero_variance_share": Metric(share)}
