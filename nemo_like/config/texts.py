"""Runs that train on given texts: how often rows are used, and held-out loss."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from pydantic import Field

from nemo_like.config.data import TextsConfig
from nemo_like.config.run import NEEDS_VALIDATION_ROWS, RunConfig
from nemo_like.config.section import Count, OnlyIf, Section, value_of


class HeldOutConfig(Section):
    """Measuring the loss on held-out rows."""

    every_steps: Annotated[int, Field(ge=0), NEEDS_VALIDATION_ROWS] = 20
    """Steps between validations; one is made before the first and after the last step. 0: never."""


class PassesSection(Section):
    """How often the training rows are used."""

    rows_per_unit: ClassVar[int]
    """Consecutive rows that belong together: 2 for the completions of a pair."""
    size_key: ClassVar[str]
    """The key of the units of one step."""

    num_epochs: Annotated[
        Count,
        OnlyIf(
            lambda here, _: here.max_steps is None,
            "{here}.max_steps decides how often rows are used; set it to null",
        ),
    ] = 1
    """Passes over the training rows."""
    max_steps: Count | None = None
    """Optimizer steps of the whole run, resumed parts included. None: those of ``num_epochs``."""

    def rules(self, here: str, run: Any) -> Iterator[str]:
        """Parts of a mixture have passes of their own; a pair stays together."""
        if (run.policy.micro_batch_size or self.rows_per_unit) < self.rows_per_unit:
            yield "policy.micro_batch_size=1 holds no pair of rows; use at least 2."
        if self.max_steps is None and run.data.mixes:
            yield (
                f"{here}.max_steps=null: data.train is a mixture, whose parts end at different "
                f"times; set {here}.max_steps."
            )

    @property
    def units_per_step(self) -> int:
        """Rows, or pairs of rows, of one optimizer step."""
        return getattr(self, self.size_key)


class RowPassesSection(PassesSection):
    """Passes over rows."""

    rows_per_unit: ClassVar[int] = 1
    size_key: ClassVar[str] = "num_rows_per_step"

    num_rows_per_step: Count = 32
    """Conversations of one optimizer step."""


class PairPassesSection(PassesSection):
    """Passes over pairs of a chosen and a rejected row."""

    rows_per_unit: ClassVar[int] = 2
    size_key: ClassVar[str] = "num_pairs_per_step"

    num_pairs_per_step: Count = 32
    """Pairs of one optimizer step."""


class TextRunConfig(RunConfig):
    """Sections of runs that train on given texts. An algorithm adds its own, and ``data``."""

    unused: ClassVar[tuple[tuple[str, str], ...]] = tuple(
        (key, "this run samples no completions")
        for key in (
            "cluster.num_generation_workers",
            "logging.trajectories_gib",
        )
    )

    validation: HeldOutConfig = HeldOutConfig()

    @property
    def texts(self) -> TextsConfig:
        """Section ``data``, which each algorithm has in its own form."""
        texts = value_of(self, "data")
        assert isinstance(texts, TextsConfig)
        return texts

    @property
    def passes(self) -> PassesSection:
        """The algorithm's own section."""
        passes = getattr(self, self.section)
        assert isinstance(passes, PassesSection)
        return passes

    @property
    def max_steps(self) -> int | None:
        return self.passes.max_steps

    @property
    def rows_per_step(self) -> int:
        return self.passes.rows_per_unit * self.passes.units_per_step

    @property
    def validates(self) -> bool:
        return self.texts.has_validation_rows and self.validation.every_steps > 0
