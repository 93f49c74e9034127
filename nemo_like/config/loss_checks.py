"""Rules of the sections ``advantage`` and ``loss`` of runs by policy gradient."""

import math

from nemo_like.config.choices import (
    AdvantageScale,
    Baseline,
    ImportanceCorrection,
    Normalization,
    Objective,
)
from nemo_like.config.rules import Effect, Ranges, check_effects, check_ranges
from nemo_like.config.sampling_run_schema import GRPORunConfig, PolicyGradientRunConfig
from nemo_like.errors import UserError

_RANGES = Ranges(
    at_least={
        "loss.clip_high": 0,
        "loss.constant_tokens": 1,
        "loss.importance_floor": 0,
        "loss.entropy_coef": 0,
        "loss.kl_coef": 0,
    },
    above_zero=("loss.importance_cap",),
)

_ADVANTAGE_RANGES = Ranges(
    at_least={"advantage.overlong_buffer_tokens": 0},
    above_zero=("advantage.overlong_penalty",),
)


def check_loss(config: PolicyGradientRunConfig) -> None:
    """Raise UserError for the first rule of advantages or loss that ``config`` breaks."""
    check_ranges(config, _RANGES)
    check_effects(config, _EFFECTS)
    check_effects(config, [one_update(config, "loss.clip_low", "loss.clip_high", "loss.dual_clip")])
    _check_bounds(config)
    _check_importance(config)
    if isinstance(config, GRPORunConfig):
        check_ranges(config, _ADVANTAGE_RANGES)
        # (PPO's advantages differ from token to token, and a sequence's ratio mixes them.)
        check_effects(config, [*_ADVANTAGE_EFFECTS, one_update(config, "loss.ratio_level")])
        _check_overlong(config)


def one_update(config: PolicyGradientRunConfig, *keys: str) -> Effect:
    """Bounds of what moves from one optimizer step on a batch to the next."""
    section = config.section
    return Effect(
        keys=keys,
        applies=lambda _: config.loop.num_updates > 1,
        why_not="a batch takes one optimizer step, in which nothing has moved yet; raise "
        f"{section}.num_mini_batches or {section}.num_epochs_per_batch too",
    )


def _check_bounds(config: PolicyGradientRunConfig) -> None:
    low, dual = config.loss.clip_low, config.loss.dual_clip
    if low is not None and not 0 <= low <= 1:
        raise UserError(
            f"loss.clip_low={low:g} must be in [0, 1], as ratios are above 0; set it to null for "
            "no lower bound."
        )
    if dual is not None and not 1 < dual < math.inf:
        raise UserError(
            f"loss.dual_clip={dual:g} must be a finite number above 1, or tokens would lose their "
            "gradient before the policy has moved; use null for no bound."
        )


def _check_importance(config: PolicyGradientRunConfig) -> None:
    floor, cap = config.loss.importance_floor, config.loss.importance_cap
    if floor >= cap:
        raise UserError(
            f"loss.importance_floor={floor:g} must be below loss.importance_cap={cap:g}: no weight "
            "lies between them, and nothing would train."
        )


def _check_overlong(config: GRPORunConfig) -> None:
    buffer, most = config.advantage.overlong_buffer_tokens, config.generation.max_new_tokens
    if buffer > most:
        raise UserError(
            f"advantage.overlong_buffer_tokens={buffer} must be at most generation.max_new_tokens="
            f"{most}: the buffer is the last part of a completion."
        )


_ADVANTAGE_EFFECTS = (
    Effect(
        keys=("advantage.overlong_penalty",),
        applies=lambda c: c.advantage.overlong_buffer_tokens > 0,
        why_not="advantage.overlong_buffer_tokens is 0, so no completion is overlong",
    ),
    Effect(
        keys=("advantage.count_untrained",),
        applies=lambda c: c.grpo.mask_truncated or c.masks_mismatch,
        why_not="all graded completions train; set grpo.mask_truncated=true or "
        "mismatch.action=mask too",
    ),
    Effect(
        keys=("advantage.count_untrained",),
        applies=lambda c: (
            c.advantage.baseline is not Baseline.none
            or c.advantage.scale is not AdvantageScale.none
            or c.grpo.dynamic_sampling
        ),
        why_not="advantage.baseline=none and advantage.scale=none count nothing",
    ),
)

_EFFECTS = (
    Effect(
        keys=("loss.clip_low", "loss.clip_high", "loss.ratio_level"),
        applies=lambda c: c.loss.objective is not Objective.reinforce,
        why_not="loss.objective=reinforce has no ratio",
    ),
    Effect(
        keys=("loss.dual_clip",),
        applies=lambda c: c.loss.objective is Objective.clip,
        why_not="only loss.objective=clip has it",
    ),
    Effect(
        keys=("loss.constant_tokens",),
        applies=lambda c: c.loss.normalization is Normalization.constant,
        why_not="only loss.normalization=constant divides by it",
    ),
    Effect(
        keys=("loss.kl_estimator", "loss.kl_in"),
        applies=lambda c: c.loss.kl_coef > 0,
        why_not="loss.kl_coef is 0, so there is no KL term; set loss.kl_coef too",
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
)
