"""Configuration of reward models; ``loop`` has the algorithm."""

from typing import ClassVar

from nemo_like.config.data import PairsConfig
from nemo_like.config.losses import RewardModelLossConfig
from nemo_like.config.run import Algorithm
from nemo_like.config.texts import PairPassesSection, TextRunConfig


class RewardModelSection(PairPassesSection):
    """The loop of training a reward model."""


class RewardModelConfig(TextRunConfig):
    """Configuration of ``nemo-like rm``."""

    section: ClassVar[str] = "reward_model"
    unused: ClassVar[tuple[tuple[str, str], ...]] = (
        *TextRunConfig.unused,
        ("policy.float32_head", "a reward model's head is always multiplied in float32"),
        ("policy.logprob_chunk_tokens", "a reward model has no logits to compute in chunks"),
    )

    reward_model: RewardModelSection = RewardModelSection()
    loss: RewardModelLossConfig = RewardModelLossConfig()
    data: PairsConfig = PairsConfig()

    @property
    def scalar_heads(self) -> bool:
        return True


ALGORITHM = Algorithm(name="rm", config=RewardModelConfig, run="nemo_like.algorithms.rm.loop:run")
