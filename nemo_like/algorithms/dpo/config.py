"""Configuration of direct preference optimization; ``loop`` has the algorithm."""

from typing import Annotated, ClassVar

from nemo_like.config.algorithm import Algorithm
from nemo_like.config.data import PairsConfig
from nemo_like.config.losses import DPOLossConfig
from nemo_like.config.section import OnlyIf
from nemo_like.config.texts import PairPassesSection, TextRunConfig


class DPOSection(PairPassesSection):
    """The loop of direct preference optimization."""

    precompute_reference: Annotated[
        bool,
        OnlyIf(
            lambda _, run: not run.loss.reference_free,
            "loss.reference_free=true needs no reference",
        ),
    ] = True
    """Score all rows with the reference model once, before the first step, and free it. False:
    keep it, and score each step's rows."""


class DPOConfig(TextRunConfig):
    """Configuration of ``nemo-like dpo``."""

    section: ClassVar[str] = "dpo"

    dpo: DPOSection = DPOSection()
    loss: DPOLossConfig = DPOLossConfig()
    data: PairsConfig = PairsConfig()

    @property
    def keeps_reference(self) -> bool:
        """Only where each step scores its own rows."""
        return not (self.dpo.precompute_reference or self.loss.reference_free)


ALGORITHM = Algorithm(name="dpo", config=DPOConfig, run="nemo_like.algorithms.dpo.loop:run")
