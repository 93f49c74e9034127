"""Every rule of a configuration, checked before anything heavy is imported.

Two kinds: values that cannot work, and keys that were set and would have no effect. Each refusal
names key, value, rule and remedy. Those of ``policy`` are in ``policy_checks.py``; those that need
the model's config.json in ``model_checks.py``.
"""

from nemo_like.config.choices import Backend, ImportanceCorrection, WandbMode
from nemo_like.config.file_checks import REASONING_GYM, check_files
from nemo_like.config.plan import plan_run, refit_transport
from nemo_like.config.policy_checks import check_policy
from nemo_like.config.rules import Effect, Ranges, check_effects, check_ranges
from nemo_like.config.run_schema import GRPORunConfig
from nemo_like.errors import UserError

_METRIC_AREAS = ("validation/", "rollout/", "train/", "mismatch/", "policy/")

_RANGES = Ranges(
    at_least={
        "run.seed": 0,
        "grpo.max_steps": 1,
        "grpo.num_prompts_per_step": 1,
        "grpo.num_generations_per_prompt": 2,
        "loss.clip_low": 0,
        "loss.clip_high": 0,
        "loss.kl_coef": 0,
        "generation.max_new_tokens": 1,
        "generation.tensor_parallel_size": 1,
        "generation.num_engines_per_bundle": 1,
        "loss.importance_floor": 0,
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
    },
    above_zero=(
        "generation.temperature",
        "loss.importance_cap",
        "mismatch.max_mean_abs",
        "environment.timeout_s",
        "validation.top_p",
        "cluster.cpus_per_worker",
        "cluster.start_timeout_s",
        "cluster.call_timeout_s",
    ),
    at_most={"validation.top_p": 1, "loss.clip_low": 1},
)


def check(config: GRPORunConfig) -> None:
    """Raise UserError for the first rule that ``config`` breaks."""
    check_ranges(config, _RANGES)
    check_effects(config, _EFFECTS)
    _check_sizes(config)
    check_policy(config)
    _check_averaging(config)
    _check_importance(config)
    check_files(config)


def _check_averaging(config: GRPORunConfig) -> None:
    steps = config.policy.parallel.ddp.average_every_steps
    if steps > 1:
        raise UserError(
            f"policy.parallel.ddp.average_every_steps={steps} would have no effect in GRPO: every "
            "step moves weights to generation, which averages them; set it to 1."
        )


def _check_importance(config: GRPORunConfig) -> None:
    floor, cap = config.loss.importance_floor, config.loss.importance_cap
    if floor >= cap:
        raise UserError(
            f"loss.importance_floor={floor:g} must be below loss.importance_cap={cap:g}: no weight "
            "lies between them, and nothing would train."
        )


def has_validation(config: GRPORunConfig) -> bool:
    """Whether the run validates at all."""
    rows = config.data.validation is not None or config.data.train == REASONING_GYM
    return rows and config.validation.every_steps > 0


_EFFECTS = (
    Effect(
        keys=("loss.kl_estimator",),
        applies=lambda c: c.loss.kl_coef > 0,
        why_not="loss.kl_coef is 0, so there is no KL term; set loss.kl_coef too",
    ),
    Effect(
        keys=("generation.engine_kwargs", "generation.tensor_parallel_size", "generation.sleep"),
        applies=lambda c: c.generation.backend is Backend.vllm,
        why_not="only generation.backend=vllm has it",
    ),
    Effect(
        keys=("generation.sleep",),
        applies=lambda c: c.cluster.gpus_per_node > 0 and c.cluster.num_generation_workers is None,
        why_not="policy and generation share no GPU",
    ),
    Effect(
        keys=("loss.importance_level", "loss.importance_cap"),
        applies=lambda c: c.loss.importance is not ImportanceCorrection.none,
        why_not="loss.importance=none corrects nothing",
    ),
    Effect(
        keys=("loss.importance_floor",),
        applies=lambda c: c.loss.importance is ImportanceCorrection.mask,
        why_not="only loss.importance=mask has a lower bound",
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
        keys=(
            "validation.num_generations_per_prompt",
            "validation.temperature",
            "validation.top_p",
            "validation.top_k",
            "validation.max_new_tokens",
        ),
        applies=has_validation,
        why_not="there is no validation; set data.validation and validation.every_steps",
    ),
    Effect(
        keys=("validation.top_p", "validation.top_k"),
        applies=lambda c: c.validation.temperature > 0,
        why_not="validation.temperature=0 is greedy",
    ),
    Effect(
        keys=("validation.every_steps",),
        applies=lambda c: c.data.validation is not None or c.data.train == REASONING_GYM,
        why_not="there are no validation rows; set data.validation",
    ),
    Effect(
        keys=("cluster.cpu_workers_per_node",),
        applies=lambda c: c.cluster.gpus_per_node == 0,
        why_not="cluster.gpus_per_node decides the workers of a GPU run",
    ),
    Effect(
        keys=("checkpoint.metric",),
        applies=lambda c: c.checkpoint.keep_best,
        why_not="checkpoint.keep_best=false keeps none for its metric",
    ),
    Effect(
        keys=("logging.wandb_project",),
        applies=lambda c: c.logging.wandb is not WandbMode.off,
        why_not="logging.wandb is off; set it to offline or online",
    ),
)


def _check_sizes(config: GRPORunConfig) -> None:
    tokens, least = config.policy.micro_batch_tokens, config.generation.max_new_tokens + 1
    if tokens < least:
        raise UserError(
            f"policy.micro_batch_tokens={tokens} cannot hold one prompt token and "
            f"generation.max_new_tokens={config.generation.max_new_tokens}; use at least {least}, "
            "plus the length of your prompts."
        )
    plan = plan_run(config)
    refit_transport(config.refit, plan)
    if config.grpo.num_prompts_per_step < len(plan.generation):
        raise UserError(
            f"grpo.num_prompts_per_step={config.grpo.num_prompts_per_step} leaves some of the "
            f"{len(plan.generation)} generation replicas without work; use at least "
            f"{len(plan.generation)}."
        )
    if not config.checkpoint.metric.startswith(_METRIC_AREAS):
        raise UserError(
            f"checkpoint.metric={config.checkpoint.metric} is not a metric of this run; it must "
            f"start with one of {', '.join(_METRIC_AREAS)} (for example validation/reward)."
        )
