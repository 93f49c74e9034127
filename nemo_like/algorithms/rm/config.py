"""Configuration of reward models; ``loop`` has the algorithm."""

from typing import ClassVar

from nemo_like.config.algorithm import Algorithm
from nemo_like.config.data import PairsConfig
from nemo_like.config.losses import RewardModelLossConfig
from nemo_like.config.texts import PairPassesSection, TextRunConfig


class RewardModelSection(PairPassesSection):
    """The loop of training a reward model."""


class RewardModelConfig(TextRunConfig):
    """Everything that ``examples/run_rm.py`` can be told."""

    section: ClassVar[str] = "reward_model"
    unused: ClassVar[tuple[tuple[str, str], ...]] = (
        *TextRunConfig.unused,
        *(
            (key, "a reward model has no logits, and its head is always multiplied in float32")
            for key in ("policy.float32_head", "policy.logprob_chunk_tokens")
        ),
    )

    reward_model: RewardModelSection = RewardModelSection()
    loss: RewardModelLossConfig = RewardModelLossConfig()
    data: PairsConfig = PairsConfig()

    @property
    def scalar_heads(self) -> bool:
        """The model's."""
        return True


ALGORITHM = Algorithm(name="rm", config=RewardModelConfig, run="nemo_like.algorithms.rm.loop:run")
