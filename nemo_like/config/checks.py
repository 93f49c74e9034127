"""Every rule of a configuration, checked before anything heavy is imported.

Two kinds: values that cannot work, and keys that were set and would have no effect. Each refusal
names key, value, rule and remedy. Those of ``policy`` are in ``policy_checks.py``, of sampling in
``rollout_checks.py``; those that need the model's config.json in ``model_checks.py``.
"""

from nemo_like.config.choices import WandbMode
from nemo_like.config.critic_checks import check_ppo
from nemo_like.config.distillation_checks import (
    check_distillation,
    check_sampled_distillation,
)
from nemo_like.config.eval_checks import check_eval
from nemo_like.config.file_checks import REASONING_GYM, check_files
from nemo_like.config.launch_checks import check_slurm
from nemo_like.config.lora_checks import check_lora
from nemo_like.config.policy_checks import check_policy
from nemo_like.config.preference_checks import check_dpo, check_reward_model
from nemo_like.config.rollout_checks import (
    NEEDS_VALIDATION_ROWS,
    check_averaging,
    check_grpo,
    check_rollouts,
    has_validation,
)
from nemo_like.config.rules import (
    Effect,
    Ranges,
    check_effects,
    check_finite,
    check_ranges,
    check_values,
    value_of,
)
from nemo_like.config.run_schema import RolloutRunConfig, TrainingRunConfig
from nemo_like.config.sampling_run_schema import (
    DistillationRunConfig,
    EvalRunConfig,
    GRPORunConfig,
    PPORunConfig,
)
from nemo_like.config.text_run_schema import (
    DPORunConfig,
    OffPolicyDistillationRunConfig,
    RewardModelRunConfig,
    SFTRunConfig,
    TextRunConfig,
)
from nemo_like.errors import UserError

_RANGES = Ranges(
    at_least={
        "run.seed": 0,
        "cluster.num_nodes": 1,
        "cluster.gpus_per_node": 0,
        "cluster.cpu_workers_per_node": 1,
        "run.stop_grace_s": 0,
        "checkpoint.every_steps": 0,
        "checkpoint.every_minutes": 0,
        "checkpoint.keep_last": 1,
        "logging.trajectories_per_step": 0,
    },
    above_zero=(
        "cluster.cpus_per_worker",
        "cluster.start_timeout_s",
        "cluster.call_timeout_s",
        "cluster.save_timeout_s",
    ),
)


def check(config: TrainingRunConfig, *, files_are_here: bool = True, runs: bool = True) -> None:
    """Raise UserError for the first rule that ``config`` breaks.

    ``files_are_here`` is false for a run on other machines, whose files cannot be looked at;
    ``runs`` is false where the run is only planned, for which models need no tokenizer.
    """
    check_values(config)
    _check_switches(config)
    check_ranges(config, _RANGES)
    check_effects(config, _EFFECTS)
    if isinstance(config, RolloutRunConfig):
        check_rollouts(config)
    if isinstance(config, TextRunConfig):
        check_effects(config, _WITHOUT_ROLLOUTS)
        _check_passes(config)
    match config:
        case GRPORunConfig():
            check_grpo(config)
        case EvalRunConfig():
            check_eval(config)
        case PPORunConfig():
            check_ppo(config)
        case SFTRunConfig():
            pass
        case DPORunConfig():
            check_dpo(config)
        case RewardModelRunConfig():
            check_reward_model(config)
        case DistillationRunConfig():
            check_distillation(config)
            check_sampled_distillation(config)
        case OffPolicyDistillationRunConfig():
            check_ranges(config, Ranges(above_zero=("distillation.temperature",)))
            check_distillation(config)
        case _:
            raise AssertionError(type(config))
    _check_metric(config)
    check_policy(config)
    check_lora(config)
    if isinstance(config, RolloutRunConfig):
        check_averaging(config)
    check_finite(config)
    check_slurm(config)
    if files_are_here:
        check_files(config, runs=runs)


def _check_switches(config: TrainingRunConfig) -> None:
    """Refuse values of switches that are neither text nor number nor true or false."""
    keys = ["data.template_switches"]
    if isinstance(config, RolloutRunConfig):
        keys.append("environment.reward_model.template_switches")
    for key in keys:
        for name, value in value_of(config, key).items():
            if not isinstance(value, bool | int | float | str):
                raise UserError(
                    f"{key}.{name}={'null' if value is None else value} must be true, false, a "
                    "number or text."
                )


def _check_passes(config: TextRunConfig) -> None:
    """Rules of a run that goes through its rows."""
    section = config.section
    names = ("num_epochs", "max_steps", config.passes.size_key)
    least = {f"{section}.{name}": 1 for name in names}
    check_ranges(config, Ranges(at_least=least))
    check_ranges(config, _TEXT_RANGES)
    check_effects(config, _TEXT_EFFECTS)
    effects = Effect(
        keys=(f"{section}.num_epochs",),
        applies=lambda _: config.max_steps is None,
        why_not=f"{section}.max_steps decides how often rows are used; set it to null",
    )
    check_effects(config, [effects])


def _check_metric(config: TrainingRunConfig) -> None:
    metric, areas, example = config.checkpoint.metric, ["train/"], "train/loss"
    if isinstance(config, RolloutRunConfig):
        areas += ["rollout/", "mismatch/", "policy/"]
    if isinstance(config, PPORunConfig) and config.critic.enabled:
        areas.append("critic/")
    if has_validation(config):
        areas.insert(0, "validation/")
        example = "validation/reward" if isinstance(config, RolloutRunConfig) else "validation/loss"
    if metric is not None and not metric.startswith(tuple(areas)):
        raise UserError(
            f"checkpoint.metric={metric} is not a metric of this run; it must "
            f"start with one of {', '.join(areas)} (for example {example})."
        )


_EFFECTS = (
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
    Effect(
        keys=("checkpoint.smaller_is_better",),
        applies=lambda c: c.checkpoint.metric is not None,
        why_not="checkpoint.metric is null, whose metric and direction are the algorithm's",
    ),
)

_TEXT_RANGES = Ranges(
    at_least={
        "validation.every_steps": 0,
        "data.num_train_rows": 1,
        "data.num_validation_rows": 1,
        "data.max_length": 2,
    },
)

_TEXT_EFFECTS = (
    Effect(
        keys=("data.tasks",),
        applies=lambda c: REASONING_GYM in (c.data.train, c.data.validation),
        why_not="neither data.train nor data.validation is reasoning_gym",
    ),
    Effect(
        keys=("data.num_validation_rows",),
        applies=lambda c: (c.data.validation or c.data.train) == REASONING_GYM,
        why_not="validation rows do not come from reasoning_gym",
    ),
    Effect(
        keys=("data.num_train_rows",),
        applies=lambda c: c.data.train == REASONING_GYM,
        why_not="data.train is a file, whose rows are all used",
    ),
    NEEDS_VALIDATION_ROWS,
)

_WITHOUT_ROLLOUTS = (
    Effect(
        keys=("cluster.num_generation_workers", "logging.trajectories_per_step", "run.self_check"),
        applies=lambda _: False,
        why_not="this run samples no completions",
    ),
)
