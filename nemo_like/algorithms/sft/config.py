"""Configuration of supervised fine-tuning; ``loop`` has the algorithm."""

from typing import ClassVar

from nemo_like.config.data import ConversationsConfig
from nemo_like.config.run import Algorithm
from nemo_like.config.texts import RowPassesSection, TextRunConfig


class SFTSection(RowPassesSection):
    """The loop of supervised fine-tuning."""


class SFTConfig(TextRunConfig):
    """Configuration of ``nemo-like sft``."""

    section: ClassVar[str] = "sft"

    sft: SFTSection = SFTSection()
    data: ConversationsConfig = ConversationsConfig()


ALGORITHM = Algorithm(name="sft", config=SFTConfig, run="nemo_like.algorithms.sft.loop:run")
