"""What a step's batch and metrics must pass, and what is said of them.

``mismatch.action=ignore`` turns off the comparisons of the first steps.
"""

import logging
from dataclasses import dataclass

import torch

from nemo_like.batch import keys
from nemo_like.config.sampling import SamplingRunConfig
from nemo_like.distributed.remote_batch import RemoteBatch
from nemo_like.errors import RunError
from nemo_like.generation.protocol import EngineConfig
from nemo_like.observe.metrics import Metrics

logger = logging.getLogger(__name__)

# Difference between the engine's and the trainer's logprobs of the same tokens and weights. Float32
# leaves 4e-7 on a CPU and 1.4e-4 on an H100, where the engine has other kernels. In bfloat16 a
# logit of 16 to 32 is rounded to 1/8: SmolLM2-135M has a mean of 0.04 and single tokens 0.6. A
# stale output head gives 1.1. Float16 has three bits more than bfloat16: an eighth of its rounding.
MAX_MEAN_MISMATCH = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.1 / 8}
# A number of 8 bits has three bits of a mantissa: it is off by 2.6 % in the mean (root of squares),
# a product of two by 3.7 %. That model then has 0.3 on a given text, and single tokens anything.
# The limit is between this and a stale head.
MAX_MEAN_IN_8_BITS = 0.5
MAX_MISMATCH = {"float32": 5e-2, "bfloat16": 2.0, "float16": 2.0 / 8}
# The trainer against itself, before and in the step: the same weights, perhaps other kernels.
MAX_LOG_RATIO = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.5 / 8}
# Weights that an engine failed to replace show from the second refit on.
NUM_CHECKED_STEPS = 3
NUM_CONSTANT_STEPS = 5


def check_sampled(
    config: SamplingRunConfig, batch: RemoteBatch, weight_version: int, num_made: int
) -> None:
    """Check a batch; the first ones of an execution more thoroughly."""
    lag = config.max_lag * config.loop.num_updates
    check_versions(batch, range(weight_version - lag, weight_version + 1))
    if compares(config, num_made):
        check_seeds(batch)


def compares(config: SamplingRunConfig, num_made: int, first: int = NUM_CHECKED_STEPS) -> bool:
    """Whether step ``num_made`` of an execution is among the ``first``, which are checked."""
    return config.mismatch.action != "ignore" and num_made <= first


def check_versions(batch: RemoteBatch, allowed: range) -> None:
    """Raise RunError if a token was sampled with weights outside ``allowed`` versions.

    The last of these is the policy's.
    """
    sampled = batch.rows[keys.NUM_LOSS_TOKENS] > 0
    versions = set(batch.rows[keys.WEIGHT_VERSIONS][sampled].tolist())
    if not versions <= set(allowed):
        raise RunError(
            f"Completions were sampled with weight versions {sorted(versions)}, and the policy is "
            f"at {allowed[-1]}: a refit was missed."
        )


def check_seeds(batch: RemoteBatch) -> None:
    """Raise RunError if two completions share a seed."""
    seeds = batch.rows[keys.SEEDS].unique_consecutive()  # rows of a trajectory are neighbours
    num_distinct = len(torch.unique(seeds))
    if num_distinct < len(seeds):
        raise RunError(
            f"Self-check failed: {len(seeds)} completions have only {num_distinct} distinct seeds."
        )


@dataclass(frozen=True)
class MismatchLimit:
    """Upper limit of a metric, and what to do above it."""

    metric: str
    limit: float
    remedy: str


@dataclass(frozen=True)
class MismatchCheck:
    """Raises RunError if engine and policy disagree by more than a limit; runs in workers."""

    limits: tuple[MismatchLimit, ...]

    def __call__(self, metrics: Metrics) -> None:
        """Look at the metrics of a step."""
        for each in self.limits:
            mismatch = metrics.get(each.metric)
            if mismatch is not None and not mismatch.value <= each.limit:
                raise RunError(
                    "The logprobs of generation and policy differ too much "
                    f"({each.metric}={mismatch.value:.3g}, limit {each.limit:.3g}). {each.remedy}"
                )


def mismatch_check(config: SamplingRunConfig, num_made: int) -> MismatchCheck:
    """What the ``num_made``-th step of an execution must pass before its optimizer step."""
    limits: list[MismatchLimit] = []
    if compares(config, num_made):
        remedy = (
            "Self-check failed: either the refit is wrong or the engine computes this model in "
            "another way; mismatch.action=ignore goes on regardless."
        )
        if config.generation.backend == "replay":
            remedy = (
                "This policy is not that of the recorded run; temperature, sizes, seed, lag, loss "
                "and optimizer must be the same (mismatch.action=ignore trains on regardless)."
            )
        limits.append(MismatchLimit("mismatch/mean_abs", usual_mean_mismatch(config), remedy))
        if not config.generation.samples_in_8_bits:
            limit = MAX_MISMATCH[config.policy.dtype]
            limits.append(MismatchLimit("mismatch/max_abs", limit, remedy))
    if config.mismatch.action == "stop":
        remedy = (
            "mismatch.action=stop ended the run before the optimizer step; continue from the last "
            "checkpoint with run.resume=true, or raise mismatch.max_mean_abs."
        )
        limits.append(MismatchLimit("mismatch/mean_abs", max_mean_mismatch(config), remedy))
    return MismatchCheck(tuple(limits))


def max_mean_mismatch(config: SamplingRunConfig) -> float:
    """The configured limit, or that of the number format."""
    limit = config.mismatch.max_mean_abs
    return usual_mean_mismatch(config) if limit is None else limit


def usual_mean_mismatch(config: SamplingRunConfig) -> float:
    """More than rounding leaves."""
    if config.generation.samples_in_8_bits:
        return MAX_MEAN_IN_8_BITS
    return MAX_MEAN_MISMATCH[config.policy.dtype]


def warn_of_mismatch(config: SamplingRunConfig, metrics: Metrics) -> None:
    """Warn if a step's mismatch is above the limit."""
    mismatch, limit = metrics.get("mismatch/mean_abs"), max_mean_mismatch(config)
    if mismatch is None or config.mismatch.action == "ignore":
        return
    if not mismatch.value <= limit:
        logger.warning(
            "The logprobs of generation and policy differ by %.3g on average (limit %.3g, "
            "mismatch.max_mean_abs); mismatch.action=%s.",
            mismatch.value,
            limit,
            config.mismatch.action,
        )


def say_logits(config: SamplingRunConfig, engine: EngineConfig) -> None:
    """Say in which format the engine has its logits; warn if it isn't the policy's, float32."""
    if engine.dtype == "float32" or not config.trains:
        return
    overrides = engine.engine_kwargs.get("hf_overrides")
    head = overrides.get("head_dtype", "float32") if isinstance(overrides, dict) else "float32"
    if engine.device not in config.generation.kind.float32_logits_on:
        head = engine.dtype
    say = logger.info if head == "float32" else logger.warning
    say("Logits are float32 in the policy and %s in the engine.", head)


def warn_of_adapters(config: SamplingRunConfig) -> None:
    """Warn where engines lose more of a small LoRA update to rounding than the policy does.

    A 16-bit sum drops what is below half of its last digit: in the weights if adapters are merged,
    in the activations if they are separate. A compiled policy adds before it rounds, engines do
    not.
    """
    policy, generation = config.policy, config.generation
    causes = {
        "policy.lora.refit=merged": policy.lora.refit == "merged",
        "policy.compile=true": policy.compile,
    }
    found = [key for key, applies in causes.items() if applies]
    if policy.lora.rank > 0 and policy.dtype != "float32" and found:
        can_part = generation.kind.most_adapter_rank >= policy.lora.rank
        remedy = "; policy.lora.refit=adapters with policy.compile=false agrees best"
        if not can_part or generation.quantization:
            remedy = "; policy.dtype=float16 loses less" if policy.dtype == "bfloat16" else ""
        logger.warning(
            "With %s in %s, small LoRA updates are lost to rounding in the engine, which then "
            "samples from a policy that lags behind (mismatch/mean_abs)%s.",
            " and ".join(found),
            policy.dtype,
            remedy,
        )


@dataclass
class RewardWatch:
    """Warns if rewards teach nothing: several steps in a row had one constant reward."""

    reward: str
    """``environment.reward``."""
    _num_steps: int = 0

    def __call__(self, batch: RemoteBatch, metrics: Metrics) -> None:
        """Look at a step's batch and at what its rollout measured."""
        rewards = batch.rows[keys.REWARDS][batch.rows[keys.SAMPLE_MASK]]
        self._num_steps = self._num_steps + 1 if len(rewards.unique()) == 1 else 0
        if self._num_steps != NUM_CONSTANT_STEPS:
            return
        remedy = "read some in trajectories.jsonl"
        answered = metrics.get("rollout/answered")
        if answered is not None and answered.value == 0:
            remedy += f"; none states an answer as environment.reward={self.reward} reads it"
            if self.reward == "reasoning_gym":
                remedy += (
                    " (<answer>...</answer>): ask for that in data.system_prompt, or use "
                    "environment.reward=math"
                )
        logger.warning(
            "All completions of %d steps in a row had the reward %g, which teaches nothing: %s.",
            NUM_CONSTANT_STEPS,
            rewards[0].item(),
            remedy,
        )


def check_ratios(config: SamplingRunConfig, metrics: Metrics, num_made: int) -> None:
    """Raise RunError unless importance ratios of an execution's first update are 1.

    ``metrics`` are that update's; without a logprob pass before it they have no ratio.
    """
    ratio, dtype = metrics.get("train/max_log_ratio"), config.policy.dtype
    if ratio is None or not compares(config, num_made, first=1):
        return
    if not ratio.value <= MAX_LOG_RATIO[dtype]:
        raise RunError(
            f"Self-check failed: importance ratios of the first step are not 1 "
            f"(max |log ratio| {ratio.value:.3g}, limit {MAX_LOG_RATIO[dtype]:g} in {dtype}); the "
            "logprob pass and the train step compute different things."
        )
