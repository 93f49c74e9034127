"""Schemas of runs that train on given texts, one a script; see ``schema``."""

from dataclasses import dataclass, field

from nemo_like.config.data_schema import PreferenceDataConfig, SFTDataConfig
from nemo_like.config.policy_schema import TeacherConfig
from nemo_like.config.preference_schema import (
    DistillationLossConfig,
    DPOLossConfig,
    RewardModelLossConfig,
)
from nemo_like.config.run_schema import PassesConfig, TrainingRunConfig
from nemo_like.config.schema import HeldOutConfig


@dataclass(kw_only=True)
class SFTConfig(PassesConfig):
    """The loop of supervised fine-tuning."""

    num_rows_per_step: int = 32
    """Conversations of one optimizer step."""


@dataclass(kw_only=True)
class SFTRunConfig(TrainingRunConfig):
    """Everything that ``examples/run_sft.py`` can be told."""

    section = "sft"

    sft: SFTConfig = field(default_factory=SFTConfig)
    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    validation: HeldOutConfig = field(default_factory=HeldOutConfig)

    @property
    def max_steps(self) -> int | None:
        """See ``sft.max_steps``."""
        return self.sft.max_steps

    @property
    def rows_per_step(self) -> int:
        """Conversations of a step."""
        return self.sft.num_rows_per_step


@dataclass(kw_only=True)
class DPOConfig(PassesConfig):
    """The loop of direct preference optimization."""

    num_pairs_per_step: int = 32
    """Pairs of one optimizer step."""
    precompute_reference: bool = True
    """Score all rows with the reference model once, before the first step, and free it. False:
    keep it, and score each step's rows."""


@dataclass(kw_only=True)
class DPORunConfig(TrainingRunConfig):
    """Everything that ``examples/run_dpo.py`` can be told."""

    section = "dpo"

    dpo: DPOConfig = field(default_factory=DPOConfig)
    loss: DPOLossConfig = field(default_factory=DPOLossConfig)
    data: PreferenceDataConfig = field(default_factory=PreferenceDataConfig)
    validation: HeldOutConfig = field(default_factory=HeldOutConfig)

    @property
    def max_steps(self) -> int | None:
        """See ``dpo.max_steps``."""
        return self.dpo.max_steps

    @property
    def rows_per_step(self) -> int:
        """Both completions of a step's pairs."""
        return 2 * self.dpo.num_pairs_per_step

    @property
    def keeps_reference(self) -> bool:
        """Only where each step scores its own rows."""
        return not (self.dpo.precompute_reference or self.loss.reference_free)


@dataclass(kw_only=True)
class RewardModelConfig(PassesConfig):
    """The loop of training a reward model."""

    num_pairs_per_step: int = 32
    """Pairs of one optimizer step."""


@dataclass(kw_only=True)
class RewardModelRunConfig(TrainingRunConfig):
    """Everything that ``examples/run_rm.py`` can be told."""

    section = "reward_model"

    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    loss: RewardModelLossConfig = field(default_factory=RewardModelLossConfig)
    data: PreferenceDataConfig = field(default_factory=PreferenceDataConfig)
    validation: HeldOutConfig = field(default_factory=HeldOutConfig)

    @property
    def max_steps(self) -> int | None:
        """See ``reward_model.max_steps``."""
        return self.reward_model.max_steps

    @property
    def rows_per_step(self) -> int:
        """Both completions of a step's pairs."""
        return 2 * self.reward_model.num_pairs_per_step


@dataclass(kw_only=True)
class OffPolicyDistillationConfig(PassesConfig):
    """The loop of off-policy distillation: the teacher is asked about given conversations."""

    num_rows_per_step: int = 32
    """Conversations of one optimizer step."""
    temperature: float = 1.0
    """Of both models' distributions, > 0."""


@dataclass(kw_only=True)
class OffPolicyDistillationRunConfig(TrainingRunConfig):
    """Everything that ``examples/run_off_policy_distillation.py`` can be told."""

    section = "distillation"

    distillation: OffPolicyDistillationConfig = field(default_factory=OffPolicyDistillationConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    loss: DistillationLossConfig = field(default_factory=DistillationLossConfig)
    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    validation: HeldOutConfig = field(default_factory=HeldOutConfig)

    @property
    def max_steps(self) -> int | None:
        """See ``distillation.max_steps``."""
        return self.distillation.max_steps
