"""Configuration of direct preference optimization; ``loop`` has the algorithm."""

from typing import ClassVar

from nemo_like.config.data import PairsConfig
from nemo_like.config.losses import PreferenceLossConfig
from nemo_like.config.run import Algorithm
from nemo_like.config.texts import PairPassesSection, TextRunConfig


class DPOSection(PairPassesSection):
    """The loop of direct preference optimization."""


class DPOConfig(TextRunConfig):
    """Configuration of ``nemo-like dpo``."""

    section: ClassVar[str] = "dpo"

    dpo: DPOSection = DPOSection()
    loss: PreferenceLossConfig = PreferenceLossConfig()
    data: PairsConfig = PairsConfig()


ALGORITHM = Algorithm(name="dpo", config=DPOConfig, run="nemo_like.algorithms.dpo.loop:run")
