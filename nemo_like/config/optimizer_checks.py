"""Rules of the sections ``optimizer`` and ``scheduler``, which each trained model has."""

import importlib.util

from nemo_like.config.choices import OptimizerKind, Schedule
from nemo_like.config.rules import Effect, Ranges, check_effects, check_ranges, value_of
from nemo_like.config.run_schema import TrainingRunConfig
from nemo_like.errors import UserError

_ADAM = (OptimizerKind.adamw, OptimizerKind.adamw8bit, OptimizerKind.muon)


def check_optimizer(config: TrainingRunConfig, section: str) -> None:
    """Raise UserError for the first rule that the model at ``section`` (``policy``) breaks."""
    optimizer, scheduler = f"{section}.optimizer", f"{section}.scheduler"
    ranges = Ranges(
        at_least={
            f"{optimizer}.weight_decay": 0,
            f"{scheduler}.warmup_steps": 0,
            f"{scheduler}.decay_steps": 1,
            f"{scheduler}.min_lr_ratio": 0,
        },
        above_zero=(f"{optimizer}.lr", f"{optimizer}.eps"),
        at_most={f"{scheduler}.min_lr_ratio": 1},
        below_one=tuple(f"{optimizer}.{name}" for name in ("beta1", "beta2", "momentum")),
    )
    check_ranges(config, ranges)
    check_effects(config, _effects(config, optimizer, scheduler))
    kind = value_of(config, f"{optimizer}.kind")
    if kind is OptimizerKind.adamw8bit and importlib.util.find_spec("torchao") is None:
        raise UserError(
            f"{optimizer}.kind=adamw8bit needs the package torchao, which is not installed; "
            "pip install torchao, or use adamw."
        )


def check_scheduler(config: TrainingRunConfig, section: str, max_updates: int) -> None:
    """The schedule must fit into the ``max_updates`` optimizer steps of the model there."""
    scheduler, most = value_of(config, f"{section}.scheduler"), last_update(config, max_updates)
    warmup, decay = scheduler.warmup_steps, scheduler.decay_steps
    if warmup >= max_updates:
        raise UserError(
            f"{section}.scheduler.warmup_steps={warmup} must be below {most}, or the peak is never "
            "reached."
        )
    if scheduler.kind is Schedule.wsd and warmup + decay > max_updates:
        raise UserError(
            f"{section}.scheduler.decay_steps={decay} and warmup_steps={warmup} together must be "
            f"at most {most}; lower them."
        )


def last_update(config: TrainingRunConfig, max_updates: int) -> str:
    """Where a schedule ends, in the user's terms."""
    key = f"{config.section}.max_steps"
    if config.max_steps in (None, max_updates):
        return f"{key}={max_updates}"
    return f"{max_updates}, the optimizer steps that {key}={config.max_steps} come to"


def _effects(config: TrainingRunConfig, optimizer: str, scheduler: str) -> tuple[Effect, ...]:
    kind, shape = value_of(config, f"{optimizer}.kind"), value_of(config, f"{scheduler}.kind")
    decays = value_of(config, f"{optimizer}.weight_decay") > 0
    return (
        Effect(
            keys=tuple(f"{optimizer}.{name}" for name in ("beta1", "beta2", "eps")),
            applies=lambda _: kind in _ADAM,
            why_not=f"only {optimizer}.kind=adamw, adamw8bit and muon have it",
        ),
        Effect(
            keys=(f"{optimizer}.momentum",),
            applies=lambda _: kind in (OptimizerKind.sgd, OptimizerKind.muon),
            why_not=f"only {optimizer}.kind=sgd and muon have it; adamw has beta1",
        ),
        Effect(
            keys=(f"{optimizer}.decay",),
            applies=lambda _: decays,
            why_not=f"{optimizer}.weight_decay is 0; set it too",
        ),
        Effect(
            keys=(f"{scheduler}.min_lr_ratio",),
            applies=lambda _: shape is not Schedule.constant,
            why_not=f"a constant schedule has no minimum; set {scheduler}.kind to linear, cosine "
            "or wsd",
        ),
        Effect(
            keys=(f"{scheduler}.decay_steps",),
            applies=lambda _: shape is Schedule.wsd,
            why_not=f"only {scheduler}.kind=wsd has it",
        ),
    )
