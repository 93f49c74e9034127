"""Rules between keys, checked before anything heavy is imported.

Two kinds: values that cannot work, and keys that were set and would have no effect. Each refusal
names key, value, rule and remedy.
"""

import math
from collections.abc import Callable
from typing import Any

from nemo_like.config.choices import Attention, Backend, Batching, Dtype, Schedule, WandbMode
from nemo_like.config.file_checks import REASONING_GYM, check_files
from nemo_like.config.plan import plan_resources
from nemo_like.config.schema import GRPORunConfig
from nemo_like.errors import UserError

_METRIC_AREAS = ("validation/", "rollout/", "train/", "mismatch/", "policy/")

_AT_LEAST: dict[str, float] = {
    "run.seed": 0,
    "grpo.max_steps": 1,
    "grpo.num_prompts_per_step": 1,
    "grpo.num_generations_per_prompt": 2,
    "loss.clip_low": 0,
    "loss.clip_high": 0,
    "loss.kl_coef": 0,
    "policy.optimizer.weight_decay": 0,
    "policy.scheduler.warmup_steps": 0,
    "policy.micro_batch_tokens": 2,
    "policy.micro_batch_size": 1,
    "policy.logprob_chunk_tokens": 1,
    "generation.max_new_tokens": 1,
    "generation.tensor_parallel_size": 1,
    "refit.bucket_mib": 1,
    "data.num_train_rows": 1,
    "data.num_validation_rows": 1,
    "environment.num_processes": 1,
    "validation.every_steps": 0,
    "validation.num_generations_per_prompt": 1,
    "validation.temperature": 0,
    "validation.top_k": 0,
    "validation.max_new_tokens": 1,
    "cluster.num_nodes": 1,
    "cluster.gpus_per_node": 0,
    "cluster.cpu_workers_per_node": 1,
    "checkpoint.every_steps": 0,
    "checkpoint.keep_last": 1,
    "logging.trajectories_per_step": 0,
}
_ABOVE_ZERO = (
    "policy.optimizer.lr",
    "policy.optimizer.eps",
    "policy.max_grad_norm",
    "generation.temperature",
    "loss.importance_cap",
    "environment.timeout_s",
    "validation.top_p",
    "cluster.cpus_per_worker",
    "cluster.start_timeout_s",
    "cluster.call_timeout_s",
)
_AT_MOST: dict[str, float] = {
    "policy.scheduler.min_lr_ratio": 1,
    "validation.top_p": 1,
    "loss.clip_low": 1,
}
_SHARES_BELOW_ONE = ("policy.optimizer.beta1", "policy.optimizer.beta2")


def check(config: GRPORunConfig) -> None:
    """Raise UserError for the first rule that ``config`` breaks."""
    _check_ranges(config)
    _check_effects(config)
    _check_sizes(config)
    check_files(config)


def value_of(config: object, key: str) -> Any:
    """The value at a dotted key."""
    for part in key.split("."):
        config = getattr(config, part)
    return config


def _check_ranges(config: GRPORunConfig) -> None:
    for key, least in _AT_LEAST.items():
        value = value_of(config, key)
        if value is not None and not value >= least:
            why = " (a group of one has no baseline)" if "num_generations_per" in key else ""
            raise UserError(f"{key}={value} must be at least {least:g}{why}.")
    for key in _ABOVE_ZERO:
        value = value_of(config, key)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"{key}={value} must be a finite number above 0.")
    for key, most in _AT_MOST.items():
        if not value_of(config, key) <= most:
            raise UserError(f"{key}={value_of(config, key)} must be at most {most:g}.")
    for key in _SHARES_BELOW_ONE:
        if not 0 <= value_of(config, key) < 1:
            raise UserError(f"{key}={value_of(config, key)} must be in [0, 1).")
    if config.policy.scheduler.min_lr_ratio < 0:
        raise UserError(
            f"policy.scheduler.min_lr_ratio={config.policy.scheduler.min_lr_ratio} must be at "
            "least 0."
        )


# Keys that do nothing in some runs: (keys, whether they would have an effect, why not).
_EFFECTS: tuple[tuple[tuple[str, ...], Callable[[GRPORunConfig], bool], str], ...] = (
    (
        ("loss.kl_estimator",),
        lambda c: c.loss.kl_coef > 0,
        "loss.kl_coef is 0, so there is no KL term; set loss.kl_coef too",
    ),
    (
        ("policy.scheduler.min_lr_ratio",),
        lambda c: c.policy.scheduler.kind is not Schedule.constant,
        "a constant schedule has no minimum; set policy.scheduler.kind to linear or cosine",
    ),
    (
        ("policy.attention",),
        lambda c: c.policy.batching is Batching.padded,
        "packed rows have their own attention; set policy.batching=padded",
    ),
    (
        ("generation.engine_kwargs", "generation.tensor_parallel_size"),
        lambda c: c.generation.backend is Backend.vllm,
        "only generation.backend=vllm has it",
    ),
    (
        ("data.tasks",),
        lambda c: REASONING_GYM in (c.data.train, c.data.validation),
        "neither data.train nor data.validation is reasoning_gym",
    ),
    (
        ("data.num_train_rows",),
        lambda c: c.data.train == REASONING_GYM,
        "data.train is a file, whose rows are all used",
    ),
    (
        ("data.num_validation_rows",),
        lambda c: (c.data.validation or c.data.train) == REASONING_GYM,
        "validation rows do not come from reasoning_gym",
    ),
    (
        (
            "validation.num_generations_per_prompt",
            "validation.temperature",
            "validation.top_p",
            "validation.top_k",
            "validation.max_new_tokens",
        ),
        lambda c: has_validation(c),
        "there is no validation; set data.validation and validation.every_steps",
    ),
    (
        ("validation.top_p", "validation.top_k"),
        lambda c: c.validation.temperature > 0,
        "validation.temperature=0 is greedy",
    ),
    (
        ("validation.every_steps",),
        lambda c: c.data.validation is not None or c.data.train == REASONING_GYM,
        "there are no validation rows; set data.validation",
    ),
    (
        ("cluster.cpu_workers_per_node",),
        lambda c: c.cluster.gpus_per_node == 0,
        "cluster.gpus_per_node decides the workers of a GPU run",
    ),
    (
        ("checkpoint.metric",),
        lambda c: c.checkpoint.keep_best,
        "checkpoint.keep_best=false keeps none for its metric",
    ),
    (
        ("logging.wandb_project",),
        lambda c: c.logging.wandb is not WandbMode.off,
        "logging.wandb is off; set it to offline or online",
    ),
)


def _check_effects(config: GRPORunConfig) -> None:
    """A key that differs from its default and changes nothing is a misunderstanding: say so."""
    default = GRPORunConfig()
    for keys, has_effect, why in _EFFECTS:
        for key in keys:
            value = value_of(config, key)
            if value != value_of(default, key) and not has_effect(config):
                raise UserError(f"{key}={value} would have no effect: {why}.")


def has_validation(config: GRPORunConfig) -> bool:
    """Whether the run validates at all."""
    rows = config.data.validation is not None or config.data.train == REASONING_GYM
    return rows and config.validation.every_steps > 0


def _check_sizes(config: GRPORunConfig) -> None:
    policy, cluster = config.policy, config.cluster
    least = config.generation.max_new_tokens + 1
    if policy.micro_batch_tokens < least:
        raise UserError(
            f"policy.micro_batch_tokens={policy.micro_batch_tokens} cannot hold one prompt token "
            f"and generation.max_new_tokens={config.generation.max_new_tokens}; use at least "
            f"{least}, plus the length of your prompts."
        )
    if policy.scheduler.warmup_steps >= config.grpo.max_steps:
        raise UserError(
            f"policy.scheduler.warmup_steps={policy.scheduler.warmup_steps} must be below "
            f"grpo.max_steps={config.grpo.max_steps}, or the peak is never reached."
        )
    plan = plan_resources(cluster, config.generation.tensor_parallel_size)
    if config.grpo.num_prompts_per_step < len(plan.generation):
        raise UserError(
            f"grpo.num_prompts_per_step={config.grpo.num_prompts_per_step} leaves some of the "
            f"{len(plan.generation)} generation replicas without work; use at least "
            f"{len(plan.generation)}."
        )
    if policy.attention is Attention.flash_attention_2 and policy.dtype is Dtype.float32:
        raise UserError(
            "policy.attention=flash_attention_2 does not compute in float32; set "
            "policy.dtype=bfloat16."
        )
    if not config.checkpoint.metric.startswith(_METRIC_AREAS):
        raise UserError(
            f"checkpoint.metric={config.checkpoint.metric} is not a metric of this run; it must "
            f"start with one of {', '.join(_METRIC_AREAS)} (for example validation/reward)."
        )
