"""What the schemas of runs have in common; see ``schema``."""

from dataclasses import dataclass, field
from typing import ClassVar

from nemo_like.config.policy_schema import PolicyConfig
from nemo_like.config.rollout_schema import (
    DataConfig,
    EnvironmentConfig,
    GenerationConfig,
    MismatchConfig,
    RefitConfig,
    ValidationConfig,
)
from nemo_like.config.schema import CheckpointConfig, ClusterConfig, LoggingConfig, RunConfig


@dataclass(kw_only=True)
class TrainingRunConfig:
    """Sections of every run that trains."""

    section: ClassVar[str]
    """The algorithm's own section."""

    run: RunConfig = field(default_factory=RunConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    @property
    def max_steps(self) -> int | None:
        """Steps of the whole run; None: as many as the data has."""
        raise NotImplementedError

    @property
    def max_updates(self) -> int | None:
        """Optimizer steps of the policy in all of them."""
        return self.max_steps

    @property
    def rows_per_step(self) -> int:
        """Rows that one step trains on."""
        raise NotImplementedError

    @property
    def keeps_reference(self) -> bool:
        """Whether a frozen copy of the model stays beside it."""
        return False


@dataclass(kw_only=True)
class RolloutLoopConfig:
    """How much is sampled for one step, and for how many steps."""

    max_steps: int = 40
    """Steps of the whole run, resumed parts included: each samples a batch and trains on it."""
    num_prompts_per_step: int = 16
    """Distinct prompts sampled for one step."""
    num_generations_per_prompt: int = 8
    """Completions of each prompt."""


@dataclass(kw_only=True)
class RolloutRunConfig(TrainingRunConfig):
    """Sections of runs that sample completions."""

    generation: GenerationConfig = field(default_factory=GenerationConfig)
    refit: RefitConfig = field(default_factory=RefitConfig)
    mismatch: MismatchConfig = field(default_factory=MismatchConfig)
    data: DataConfig = field(default_factory=DataConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)

    @property
    def loop(self) -> RolloutLoopConfig:
        """The algorithm's own section."""
        loop = getattr(self, self.section)
        assert isinstance(loop, RolloutLoopConfig)
        return loop

    @property
    def max_steps(self) -> int:
        """Steps of the whole run."""
        return self.loop.max_steps

    @property
    def max_updates(self) -> int:
        """One optimizer step a step."""
        return self.max_steps

    @property
    def rows_per_step(self) -> int:
        """Completions of a step."""
        return self.loop.num_prompts_per_step * self.loop.num_generations_per_prompt
