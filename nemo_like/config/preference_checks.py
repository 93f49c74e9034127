"""Rules of runs that train on pairs: ranges, and keys that would have no effect."""

from nemo_like.config.choices import PreferenceKind
from nemo_like.config.policy_checks import check_scalar_head
from nemo_like.config.rules import Effect, Ranges, check_effects, check_ranges
from nemo_like.config.text_run_schema import DPORunConfig, RewardModelRunConfig
from nemo_like.errors import UserError

_DPO_RANGES = Ranges(
    at_least={"loss.target_margin": 0, "loss.sft_coef": 0}, above_zero=("loss.beta",)
)
_REWARD_MODEL_RANGES = Ranges(at_least={"loss.center_coef": 0, "loss.margin": 0})


def check_dpo(config: DPORunConfig) -> None:
    """Raise UserError for the first rule of DPO that ``config`` breaks."""
    check_ranges(config, _DPO_RANGES)
    _check_label_smoothing(config)
    check_effects(config, _DPO_EFFECTS)


def check_reward_model(config: RewardModelRunConfig) -> None:
    """Raise UserError for the first rule of reward models that ``config`` breaks."""
    check_ranges(config, _REWARD_MODEL_RANGES)
    _check_label_smoothing(config)
    check_scalar_head(config)
    check_effects(config, _REWARD_MODEL_EFFECTS)


def _check_label_smoothing(config: DPORunConfig | RewardModelRunConfig) -> None:
    share = config.loss.label_smoothing
    if not 0 <= share < 0.5:
        swap = "; if most labels are wrong, swap chosen and rejected" if share >= 0.5 else ""
        raise UserError(f"loss.label_smoothing={share} must be in [0, 0.5){swap}.")


_DPO_EFFECTS = (
    Effect(
        keys=("dpo.precompute_reference",),
        applies=lambda c: not c.loss.reference_free,
        why_not="loss.reference_free=true needs no reference",
    ),
    Effect(
        keys=("loss.target_margin",),
        applies=lambda c: c.loss.kind is not PreferenceKind.ipo,
        why_not="loss.kind=ipo aims at a margin of 1 / (2 * loss.beta); set loss.beta",
    ),
    Effect(
        keys=("loss.robust",),
        applies=lambda c: c.loss.label_smoothing > 0,
        why_not="loss.label_smoothing is 0, so no label is wrong; set loss.label_smoothing too",
    ),
)

_REWARD_MODEL_EFFECTS = (
    Effect(
        keys=("policy.float32_head",),
        applies=lambda _: False,
        why_not="a reward model's head is always multiplied in float32",
    ),
    Effect(
        keys=("policy.logprob_chunk_tokens",),
        applies=lambda _: False,
        why_not="a reward model has no logits to compute in chunks",
    ),
)
