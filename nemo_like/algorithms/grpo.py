"""Group Relative Policy Optimization (arXiv:2402.03300), with RLOO's baseline by default.

For each prompt a group of completions is sampled and graded; a completion's advantage is its reward
less its siblings' mean; the clipped policy-gradient loss moves the policy, one optimizer step for
each batch. That step is on-policy, so that its own forward pass gives the policy's logprobs and no
pass is made for them (``grpo.reuse_logprobs``). Left out here: several optimizer steps on one
batch, and asynchronous rollouts.
"""

import logging
from contextlib import ExitStack

from nemo_like.advantages import group_advantages, zero_variance_share
from nemo_like.algorithms.run import Run
from nemo_like.algorithms.self_check import (
    NUM_CHECKED_STEPS,
    check_ratios,
    check_seeds,
    check_versions,
    gap_check,
    max_mean_gap,
    warn_of_gap,
)
from nemo_like.algorithms.setup import Setup, find_model, prepare, start
from nemo_like.batch import keys
from nemo_like.config.choices import MismatchAction
from nemo_like.config.rollout_checks import has_validation
from nemo_like.config.run_schema import GRPORunConfig
from nemo_like.distributed.remote_batch import RemoteBatch
from nemo_like.losses.policy_gradient import ClippedPGLoss
from nemo_like.observe.metrics import Metric, Metrics, Reduce

logger = logging.getLogger(__name__)


def run_grpo(config: GRPORunConfig) -> None:
    """Everything from a configuration to a trained model in ``run.dir``."""
    model_path = find_model(config)  # a wrong layout leaves no folder behind
    with Run(config, "grpo") as run, ExitStack() as stack:
        with run.start_phase("data"):
            prepared = prepare(config, model_path)
        setup = start(config, run, prepared, stack)
        train(config, setup, run)
        if config.checkpoint.export:
            setup.policy.export(str(run.dir / "final"))
        run.finish(
            generation_backend=config.generation.backend.value,
            model=config.policy.model,
            seed=config.run.seed,
        )


def train(config: GRPORunConfig, setup: Setup, run: Run) -> None:
    """The loop."""
    policy, rollouts = setup.policy, setup.rollouts
    reuse = config.grpo.reuse_logprobs
    masks = config.mismatch.action is MismatchAction.mask
    loss = ClippedPGLoss(config.loss, max_mean_gap(config) if masks else None)
    if reuse:
        logger.info("One optimizer step a batch: its own forward pass gives the policy's logprobs.")
    for step in run.steps(
        config.grpo.max_steps,
        {"policy": policy},
        setup.loader,
        rollouts if has_validation(config) else None,
        config.validation.every_steps,
    ):
        setup.meter.pop()  # what a validation before this step came to
        batch, metrics = rollouts.next_batch(step)  # refits first if its weights are stale
        batch.rows[keys.ADVANTAGES] = group_advantages(
            batch.rows[keys.REWARDS],
            batch.rows[keys.PROMPT_IDS],
            batch.rows[keys.SAMPLE_MASK],
            config.advantage,
        )
        check_versions(batch, policy.weight_version)
        num_made = step - run.first_step
        if config.run.self_check and num_made <= NUM_CHECKED_STEPS:
            check_seeds(batch)
        check = gap_check(config, num_made)
        if not reuse or config.loss.kl_coef > 0:
            with run.span("logprobs"):
                metrics |= policy.logprobs(batch, with_policy=not reuse)
        if not reuse:
            check(metrics)
        with run.span("train"):
            metrics |= policy.train(batch, loss, on_policy=reuse, check=check if reuse else None)
        if config.run.self_check and num_made == 1 and "train/max_log_ratio" in metrics:
            check_ratios(metrics, config.policy.dtype)
        warn_of_gap(config, metrics)
        run.log(metrics | batch_metrics(batch) | setup.driver_metrics())


def batch_metrics(batch: RemoteBatch) -> Metrics:
    """What the driver knows of a batch beside what its workers reported."""
    rows = batch.rows
    trained = rows[keys.NUM_LOSS_TOKENS][rows[keys.SAMPLE_MASK]]
    share = zero_variance_share(rows[keys.REWARDS], rows[keys.PROMPT_IDS], rows[keys.SAMPLE_MASK])
    return {
        "train/num_tokens": Metric(int(trained.sum()), reduce=Reduce.sum),
        "rollout/zero_variance_share": Metric(share),
    }
