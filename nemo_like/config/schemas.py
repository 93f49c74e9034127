"""All schemas of runs, by name."""

from nemo_like.config.run_schema import TrainingRunConfig
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
)

SCHEMAS: dict[str, type[TrainingRunConfig]] = {
    "grpo_schema": GRPORunConfig,
    "ppo_schema": PPORunConfig,
    "sft_schema": SFTRunConfig,
    "dpo_schema": DPORunConfig,
    "rm_schema": RewardModelRunConfig,
    "eval_schema": EvalRunConfig,
    "distillation_schema": DistillationRunConfig,
    "off_policy_distillation_schema": OffPolicyDistillationRunConfig,
}
"""By the name that a YAML file's ``defaults`` begin with."""
