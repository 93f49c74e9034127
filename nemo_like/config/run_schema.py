"""One schema an algorithm: the sections that its script can be told; see ``schema``."""

from dataclasses import dataclass, field

from nemo_like.config.loss_schema import AdvantageConfig, LossConfig
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
class GRPOConfig:
    """The loop: how much is sampled for one optimizer step, and for how many steps."""

    max_steps: int = 40
    """Optimizer steps of the whole run, resumed parts included."""
    num_prompts_per_step: int = 16
    """Distinct prompts sampled for one step."""
    num_generations_per_prompt: int = 8
    """Completions of each prompt: the group that its baseline is taken over, >= 2."""
    reuse_logprobs: bool = True
    """A batch takes one optimizer step, so the logprobs of that step's own forward pass are the
    policy's before it. False: compute them in a pass of their own, and check that ratios are 1."""


@dataclass(kw_only=True)
class GRPORunConfig:
    """Everything that ``examples/run_grpo.py`` can be told."""

    run: RunConfig = field(default_factory=RunConfig)
    grpo: GRPOConfig = field(default_factory=GRPOConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    mismatch: MismatchConfig = field(default_factory=MismatchConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    refit: RefitConfig = field(default_factory=RefitConfig)
    data: DataConfig = field(default_factory=DataConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
