"""Rules of runs that sample completions: batch sizes, engines, validation."""

import re

from nemo_like.config.choices import Backend, Baseline
from nemo_like.config.file_checks import BUILT_IN_REWARDS, REASONING_GYM, REWARD_MODEL
from nemo_like.config.loss_checks import check_loss
from nemo_like.config.plan import plan_run, refit_transport
from nemo_like.config.rules import Effect, Ranges, check_effects, check_ranges, value_of
from nemo_like.config.run_schema import RolloutRunConfig, TrainingRunConfig
from nemo_like.config.sampling_run_schema import (
    EvalRunConfig,
    GRPORunConfig,
    PolicyGradientRunConfig,
)
from nemo_like.errors import UserError

_RANGES = Ranges(
    at_least={
        "generation.max_new_tokens": 1,
        "generation.tensor_parallel_size": 1,
        "generation.num_engines_per_bundle": 1,
        "refit.bucket_mib": 1,
        "data.num_train_rows": 1,
        "data.num_validation_rows": 1,
        "environment.num_processes": 1,
        "environment.rows_at_once": 1,
        "environment.reward_model.num_threads": 1,
        "environment.reward_model.rows_at_once": 1,
        "validation.every_steps": 0,
        "validation.num_generations_per_prompt": 1,
        "validation.temperature": 0,
        "validation.top_k": 0,
        "validation.max_new_tokens": 1,
    },
    above_zero=(
        "generation.temperature",
        "mismatch.max_mean_abs",
        "environment.timeout_s",
        "environment.process_memory_gib",
        "validation.top_p",
    ),
    at_most={"validation.top_p": 1},
    instead={
        "validation.num_generations_per_prompt": "validation.every_steps=0 turns validation off",
        "generation.temperature": "only validation and evaluation have greedy sampling",
    },
)

_VLLM_LOWEST = 0.01
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_GRPO_RANGES = Ranges(at_least={"grpo.max_sampling_rounds": 2})


def check_rollouts(config: RolloutRunConfig) -> None:
    """Raise UserError for the first rule that ``config`` breaks."""
    if isinstance(config, GRPORunConfig):
        _check_group(config)
    names = ["num_prompts_per_step", "num_generations_per_prompt"]
    if not isinstance(config, EvalRunConfig):
        names.append("max_steps")
    check_ranges(config, Ranges(at_least={f"{config.section}.{name}": 1 for name in names}))
    check_ranges(config, _RANGES)
    check_effects(config, _EFFECTS)
    for name in config.environment.pass_variables:
        if not _VARIABLE.fullmatch(name):  # which may hold a secret, and is not shown
            raise UserError(
                f"environment.pass_variables: an entry of {len(name)} characters is not the name "
                "of a variable; list names alone, as in [OPENAI_API_KEY], and export their values."
            )
    for token in config.generation.stop_token_ids:
        if token < 0:
            raise UserError(f"generation.stop_token_ids: {token} is no token's id; leave it out.")
    if not isinstance(config, EvalRunConfig):
        _check_micro_batches(config)
    _check_sizes(config)
    _check_temperatures(config)


def check_grpo(config: GRPORunConfig) -> None:
    """Raise UserError for the first rule of GRPO that ``config`` breaks."""
    check_ranges(config, _GRPO_RANGES)
    check_effects(config, _GRPO_EFFECTS)
    check_updates(config)


def _check_group(config: GRPORunConfig) -> None:
    """What GRPO compares must not be alone."""
    count = config.grpo.num_generations_per_prompt
    wants = []
    if config.advantage.baseline is not Baseline.none:
        wants.append(("has no baseline", "advantage.baseline=none"))
    if config.grpo.dynamic_sampling:
        wants.append(("always has equal rewards", "grpo.dynamic_sampling=false"))
    if count < 2 and wants:
        reasons, remedies = (" and ".join(parts) for parts in zip(*wants, strict=True))
        raise UserError(
            f"grpo.num_generations_per_prompt={count} must be at least 2, as a group of one "
            f"{reasons}; raise it, or set it to 1 with {remedies}."
        )


def check_updates(config: PolicyGradientRunConfig) -> None:
    """Raise UserError for the first rule of mini-batches or their loss that ``config`` breaks."""
    section, loop = config.section, config.loop
    names = ("num_epochs_per_batch", "num_mini_batches")
    check_ranges(config, Ranges(at_least={f"{section}.{name}": 1 for name in names}))
    reuse = Effect(
        keys=(f"{section}.reuse_logprobs",),
        applies=lambda _: loop.num_updates == 1,
        why_not="a batch takes several optimizer steps, which need logprobs from before them",
    )
    in_reward = Effect(
        keys=(f"{section}.reuse_logprobs",),
        applies=lambda c: not c.kl_in_reward,
        why_not="loss.kl_in=reward needs logprobs from before the step anyway",
    )
    masks = Effect(
        keys=(f"{section}.reuse_logprobs",),
        applies=lambda c: not c.masks_mismatch,
        why_not="mismatch.action=mask needs logprobs from before the step anyway",
    )
    check_effects(config, [reuse, in_reward, masks])
    if loop.num_mini_batches > loop.num_prompts_per_step:
        raise UserError(
            f"{section}.num_mini_batches={loop.num_mini_batches} is more than the "
            f"{loop.num_prompts_per_step} groups of {section}.num_prompts_per_step; use at most "
            "that."
        )
    check_loss(config)


def check_averaging(config: RolloutRunConfig) -> None:
    """Weights leave the policy every step, so replicas must not drift apart."""
    steps = config.policy.parallel.ddp.average_every_steps
    if steps > 1:
        raise UserError(
            f"policy.parallel.ddp.average_every_steps={steps} would have no effect here: every "
            "step moves weights to generation, which averages them; set it to 1."
        )


def has_validation(config: TrainingRunConfig) -> bool:
    """Whether the run validates at all."""
    return _has_validation_rows(config) and value_of(config, "validation.every_steps") > 0


def _has_validation_rows(config: TrainingRunConfig) -> bool:
    validation, train = (value_of(config, f"data.{name}") for name in ("validation", "train"))
    return validation is not None or train == REASONING_GYM


NEEDS_VALIDATION_ROWS = Effect(
    keys=("validation.every_steps",),
    applies=lambda c: c.validation.every_steps == 0 or _has_validation_rows(c),  # 0 is what it is
    why_not="there are no validation rows; set data.validation",
)


_GRPO_EFFECTS = (
    Effect(
        keys=("grpo.max_sampling_rounds",),
        applies=lambda c: c.grpo.dynamic_sampling,
        why_not="grpo.dynamic_sampling is off; set it too",
    ),
)

_HOW_TO_VALIDATE = (
    "validation.num_generations_per_prompt",
    "validation.temperature",
    "validation.top_p",
    "validation.top_k",
    "validation.max_new_tokens",
)

_EFFECTS = (
    Effect(
        keys=("environment.reward_model",),
        applies=lambda c: c.environment.reward == REWARD_MODEL,
        why_not=f"environment.reward is not {REWARD_MODEL}",
    ),
    Effect(
        keys=("environment.rows_at_once", "environment.pass_variables"),
        applies=lambda c: c.environment.reward not in BUILT_IN_REWARDS,
        why_not="environment.reward is not a function of your own",
    ),
    Effect(
        keys=("generation.engine_kwargs", "generation.tensor_parallel_size"),
        applies=lambda c: c.generation.backend is Backend.vllm,
        why_not="only generation.backend=vllm has it",
    ),
    Effect(
        keys=("data.tasks",),
        applies=lambda c: REASONING_GYM in (c.data.train, c.data.validation),
        why_not="neither data.train nor data.validation is reasoning_gym",
    ),
    Effect(
        keys=("data.num_train_rows",),
        applies=lambda c: c.data.train == REASONING_GYM,
        why_not="data.train is a file, whose rows are all used",
    ),
    Effect(
        keys=("data.num_validation_rows",),
        applies=lambda c: (c.data.validation or c.data.train) == REASONING_GYM,
        why_not="validation rows do not come from reasoning_gym",
    ),
    Effect(
        keys=_HOW_TO_VALIDATE,
        applies=lambda c: c.validation.every_steps > 0,
        why_not="validation.every_steps=0 turns validation off; raise it",
    ),
    Effect(
        keys=_HOW_TO_VALIDATE,
        applies=has_validation,
        why_not="there are no validation rows; set data.validation",
    ),
    Effect(
        keys=("validation.top_p", "validation.top_k"),
        applies=lambda c: c.validation.temperature > 0,
        why_not="validation.temperature=0 is greedy",
    ),
    NEEDS_VALIDATION_ROWS,
)


def _check_temperatures(config: RolloutRunConfig) -> None:
    """vLLM samples at 0.01 where it is asked for less, and logprobs would be of another one."""
    keys = ["generation.temperature", "validation.temperature"]
    if isinstance(config, EvalRunConfig):
        keys = ["eval.temperature"]
    for key in keys:
        value = value_of(config, key)
        if config.generation.backend is Backend.vllm and 0 < value < _VLLM_LOWEST:
            greedy = "" if key == "generation.temperature" else ", or 0, which is greedy"
            raise UserError(f"{key}={value:g} must be at least {_VLLM_LOWEST}{greedy}.")


def _check_micro_batches(config: RolloutRunConfig) -> None:
    tokens, least = config.policy.micro_batch_tokens, config.generation.max_new_tokens + 1
    if tokens < least:
        raise UserError(
            f"policy.micro_batch_tokens={tokens} cannot hold one prompt token and "
            f"generation.max_new_tokens={config.generation.max_new_tokens}; use at least {least}, "
            "plus the length of your prompts."
        )


def _check_sizes(config: RolloutRunConfig) -> None:
    plan = plan_run(config)
    refit_transport(config.refit, plan)
    prompts, num_replicas = config.loop.num_prompts_per_step, len(plan.generation)
    if prompts < num_replicas:
        raise UserError(
            f"{config.section}.num_prompts_per_step={prompts} leaves some of the "
            f"{num_replicas} generation replicas without work; use at least {num_replicas}."
        )
