"""Configuration of GRPO and its relatives; ``loop`` has the algorithm."""

from collections.abc import Iterator
from typing import Any, ClassVar

from nemo_like.config.advantages import AdvantageConfig
from nemo_like.config.losses import ONE_UPDATE
from nemo_like.config.run import Algorithm
from nemo_like.config.sampling import PolicyGradientRunConfig, UpdatesLoop
from nemo_like.config.section import Count


class GRPOSection(UpdatesLoop):
    """The loop of GRPO and its relatives."""

    num_generations_per_prompt: Count = 8
    """Completions of each prompt: the group that its baseline is taken over."""
    dynamic_sampling: bool = False
    """Leave out groups whose raw rewards are all equal (of completions that count, see
    ``advantage.count_untrained``), and sample others in their place (DAPO, arXiv:2503.14476
    section 3.2). After four rounds the groups with a signal found so far train; if there is none,
    the step trains on nothing."""
    mask_truncated: bool = False
    """Completions that were cut off do not train (overlong filter of DAPO, section 3.4, with
    ``advantage.count_untrained``)."""


class GRPOConfig(PolicyGradientRunConfig):
    """Configuration of ``nemo-like grpo``."""

    section: ClassVar[str] = "grpo"

    grpo: GRPOSection = GRPOSection()
    advantage: AdvantageConfig = AdvantageConfig()

    @property
    def needs_whole_batch(self) -> str | None:
        """Adds dynamic sampling and step-wide scales, which need all groups."""
        advantage = self.advantage
        if self.grpo.dynamic_sampling:
            return "grpo.dynamic_sampling=true chooses among all of them; set it to false"
        if advantage.scale == "batch" or advantage.each_reward or advantage.function:
            return (
                "advantage.scale=batch, advantage.each_reward and your own advantage.function "
                "look at all of them; set advantage.scale=std and leave the others out"
            )
        return super().needs_whole_batch

    def rules(self, here: str, run: Any) -> Iterator[str]:
        """A baseline needs siblings; a sequence's ratio needs a step to move in."""
        yield from super().rules(here, run)
        count, wants = self.grpo.num_generations_per_prompt, []
        if self.advantage.baseline != "none":
            wants.append(("has no baseline", "advantage.baseline=none"))
        if self.grpo.dynamic_sampling:
            wants.append(("always has equal rewards", "grpo.dynamic_sampling=false"))
        if count < 2 and wants:
            reasons, remedies = (" and ".join(parts) for parts in zip(*wants, strict=True))
            yield (
                f"grpo.num_generations_per_prompt={count} must be at least 2, as a group of one "
                f"{reasons}; raise it, or set it to 1 with {remedies}."
            )
        # (PPO's advantages differ from token to token, and a sequence's ratio mixes them.)
        level = self.loss.ratio_level
        if level != "token" and not ONE_UPDATE.holds(self.loss, self):
            yield f"loss.ratio_level={level} would have no effect: {ONE_UPDATE.otherwise}."


ALGORITHM = Algorithm(name="grpo", config=GRPOConfig, run="nemo_like.algorithms.grpo.loop:run")
