"""Schemas of runs that train on given texts, one a script; see ``schema``."""

from dataclasses import dataclass, field
from typing import ClassVar

from nemo_like.config.data_schema import PreferenceDataConfig, SFTDataConfig
from nemo_like.config.policy_schema import TeacherConfig
from nemo_like.config.preference_schema import (
    DistillationLossConfig,
    DPOLossConfig,
    RewardModelLossConfig,
)
from nemo_like.config.run_schema import TrainingRunConfig
from nemo_like.config.schema import HeldOutConfig


@dataclass(kw_only=True)
class PassesConfig:
    """How often the training rows are used."""

    rows_per_unit: ClassVar[int]
    """Consecutive rows that belong together: 2 for the completions of a pair."""
    size_key: ClassVar[str]
    """The key of the units of one step."""

    num_epochs: int = 1
    """Passes over the training rows."""
    max_steps: int | None = None
    """Optimizer steps of the whole run, resumed parts included. None: those of ``num_epochs``."""
    drop_last: bool = False
    """Leave out a last step of a pass that has fewer rows than the others."""

    @property
    def units_per_step(self) -> int:
        """Rows, or pairs of rows, of one optimizer step."""
        return getattr(self, self.size_key)


@dataclass(kw_only=True)
class RowPassesConfig(PassesConfig):
    """Passes over rows."""

    rows_per_unit = 1
    size_key = "num_rows_per_step"

    num_rows_per_step: int = 32
    """Conversations of one optimizer step."""


@dataclass(kw_only=True)
class PairPassesConfig(PassesConfig):
    """Passes over pairs of a chosen and a rejected row."""

    rows_per_unit = 2
    size_key = "num_pairs_per_step"

    num_pairs_per_step: int = 32
    """Pairs of one optimizer step."""


@dataclass(kw_only=True)
class TextRunConfig(TrainingRunConfig):
    """Sections of runs that train on given texts, beside ``data`` and the algorithm's own."""

    validation: HeldOutConfig = field(default_factory=HeldOutConfig)

    @property
    def passes(self) -> PassesConfig:
        """The algorithm's own section."""
        passes = getattr(self, self.section)
        assert isinstance(passes, PassesConfig)
        return passes

    @property
    def max_steps(self) -> int | None:
        """Steps of the whole run; None: as many as the data has."""
        return self.passes.max_steps

    @property
    def rows_per_step(self) -> int:
        """Rows of a step, both of each pair."""
        return self.passes.rows_per_unit * self.passes.units_per_step


@dataclass(kw_only=True)
class SFTConfig(RowPassesConfig):
    """The loop of supervised fine-tuning."""


@dataclass(kw_only=True)
class SFTRunConfig(TextRunConfig):
    """Everything that ``examples/run_sft.py`` can be told."""

    section = "sft"

    sft: SFTConfig = field(default_factory=SFTConfig)
    data: SFTDataConfig = field(default_factory=SFTDataConfig)


@dataclass(kw_only=True)
class DPOConfig(PairPassesConfig):
    """The loop of direct preference optimization."""

    precompute_reference: bool = True
    """Score all rows with the reference model once, before the first step, and free it. False:
    keep it, and score each step's rows."""


@dataclass(kw_only=True)
class DPORunConfig(TextRunConfig):
    """Everything that ``examples/run_dpo.py`` can be told."""

    section = "dpo"

    dpo: DPOConfig = field(default_factory=DPOConfig)
    loss: DPOLossConfig = field(default_factory=DPOLossConfig)
    data: PreferenceDataConfig = field(default_factory=PreferenceDataConfig)

    @property
    def keeps_reference(self) -> bool:
        """Only where each step scores its own rows."""
        return not (self.dpo.precompute_reference or self.loss.reference_free)


@dataclass(kw_only=True)
class RewardModelConfig(PairPassesConfig):
    """The loop of training a reward model."""


@dataclass(kw_only=True)
class RewardModelRunConfig(TextRunConfig):
    """Everything that ``examples/run_rm.py`` can be told."""

    section = "reward_model"

    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    loss: RewardModelLossConfig = field(default_factory=RewardModelLossConfig)
    data: PreferenceDataConfig = field(default_factory=PreferenceDataConfig)


@dataclass(kw_only=True)
class OffPolicyDistillationConfig(RowPassesConfig):
    """The loop of off-policy distillation: the teacher is asked about given conversations."""

    temperature: float = 1.0
    """Of both models' distributions, > 0."""


@dataclass(kw_only=True)
class OffPolicyDistillationRunConfig(TextRunConfig):
    """Everything that ``examples/run_off_policy_distillation.py`` can be told."""

    section = "distillation"

    distillation: OffPolicyDistillationConfig = field(default_factory=OffPolicyDistillationConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    loss: DistillationLossConfig = field(default_factory=DistillationLossConfig)
    data: SFTDataConfig = field(default_factory=SFTDataConfig)
