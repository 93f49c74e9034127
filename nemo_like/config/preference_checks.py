"""Rules of the sections in ``preference_schema``: ranges, and keys that would have no effect."""

import math
from dataclasses import dataclass
from typing import Any

from nemo_like.config.choices import Divergence, PreferenceKind
from nemo_like.config.preference_schema import (
    DistillationLossConfig,
    DPOLossConfig,
    RewardModelLossConfig,
    ValueLossConfig,
)
from nemo_like.errors import UserError


def check_dpo_loss(config: DPOLossConfig, section: str = "loss") -> None:
    """Raise UserError for the first rule that ``config``, which is at ``section``, breaks."""
    rules = _Rules(config, section)
    rules.above_zero("beta")
    rules.not_negative("target_margin")
    rules.not_negative("sft_coef")
    rules.below_half("label_smoothing")
    rules.effect(
        "target_margin",
        config.kind is not PreferenceKind.ipo,
        f"{section}.kind=ipo aims at a margin of 1 / (2 * {section}.beta); set {section}.beta",
    )
    rules.effect(
        "robust",
        config.label_smoothing > 0,
        f"{section}.label_smoothing is 0, so no label is wrong; set {section}.label_smoothing too",
    )


def check_reward_model_loss(config: RewardModelLossConfig, section: str = "loss") -> None:
    """Raise UserError for the first rule that ``config``, which is at ``section``, breaks."""
    rules = _Rules(config, section)
    rules.not_negative("center_coef")
    rules.not_negative("margin")
    rules.below_half("label_smoothing")


def check_value_loss(config: ValueLossConfig, section: str = "value_loss") -> None:
    """Raise UserError for the first rule that ``config``, which is at ``section``, breaks."""
    if config.clip is not None:
        _Rules(config, section).above_zero("clip")


def check_distillation_loss(config: DistillationLossConfig, section: str = "loss") -> None:
    """Raise UserError for the first rule that ``config``, which is at ``section``, breaks."""
    rules = _Rules(config, section)
    rules.demand(
        "alpha",
        0 < config.alpha < 1,
        f"must be in (0, 1); for one side alone set {section}.kind to forward_kl or reverse_kl",
    )
    rules.effect(
        "alpha",
        config.kind in (Divergence.jsd, Divergence.mixed),
        f"{section}.kind={config.kind} has one side; set {section}.kind to jsd or mixed",
    )


@dataclass(frozen=True)
class _Rules:
    """Refusals of one section's keys; ``section`` is where the run's configuration has it."""

    config: Any
    section: str

    def above_zero(self, key: str) -> None:
        value = getattr(self.config, key)
        self.demand(key, 0 < value < math.inf, "must be a finite number above 0")

    def not_negative(self, key: str) -> None:
        value = getattr(self.config, key)
        self.demand(key, 0 <= value < math.inf, "must be a finite number of at least 0")

    def below_half(self, key: str) -> None:
        value = getattr(self.config, key)
        rule = "must be in [0, 0.5); if most labels are wrong, swap chosen and rejected"
        self.demand(key, 0 <= value < 0.5, rule)

    def demand(self, key: str, holds: bool, rule: str) -> None:
        if not holds:
            raise UserError(f"{self.section}.{key}={getattr(self.config, key)} {rule}.")

    def effect(self, key: str, applies: bool, why_not: str) -> None:
        """Refuse a key that differs from its default where it does not apply."""
        value = getattr(self.config, key)
        if value != getattr(type(self.config)(), key) and not applies:
            shown = str(value).lower() if isinstance(value, bool) else value
            raise UserError(f"{self.section}.{key}={shown} would have no effect: {why_not}.")
