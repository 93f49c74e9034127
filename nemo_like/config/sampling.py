"""Runs that sample completions: how they are scored and validated, and how much is sampled."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from nemo_like.config.data import PromptsConfig
from nemo_like.config.environment import EnvironmentConfig
from nemo_like.config.generation import GenerationConfig, MismatchConfig, RefitConfig
from nemo_like.config.losses import LossConfig
from nemo_like.config.run import NEEDS_VALIDATION_ROWS, RunConfig
from nemo_like.config.section import Count, OnlyIf, Section

_ON = OnlyIf(
    lambda here, _: here.every_steps > 0, "{here}.every_steps=0 turns validation off; raise it"
)
_HAS_ROWS = OnlyIf(
    lambda _, run: run.data.has_validation_rows, "there are no validation rows; set data.validation"
)
_NOT_GREEDY = OnlyIf(lambda here, _: here.temperature > 0, "{here}.temperature=0 is greedy")


class ValidationConfig(Section):
    """Measuring on held-out prompts: training rows with the same prompt are left out."""

    every_steps: Annotated[int, Field(ge=0), NEEDS_VALIDATION_ROWS] = 5
    """Steps between validations; one is made before the first and after the last step. 0: never."""
    num_generations_per_prompt: Annotated[Count, _ON, _HAS_ROWS] = 1
    """Completions of each validation prompt; all of them count."""
    temperature: Annotated[float, Field(ge=0), _ON, _HAS_ROWS] = 1.0
    """Sampling temperature; 0: greedy."""
    top_p: Annotated[float, Field(ge=1e-6, le=1), _ON, _HAS_ROWS, _NOT_GREEDY] = 1.0
    """Nucleus sampling."""
    top_k: Annotated[int, Field(ge=0), _ON, _HAS_ROWS, _NOT_GREEDY] = 0
    """Most likely tokens to sample from. 0: all."""
    max_new_tokens: Annotated[Count | None, _ON, _HAS_ROWS] = None
    """Most tokens of one completion. None: ``generation.max_new_tokens``."""

    def rules(self, here: str, run: Any) -> Iterator[str]:
        """A temperature that the engine samples at."""
        least = run.generation.kind.lowest_temperature
        if 0 < self.temperature < least:
            yield (
                f"{here}.temperature={self.temperature:g} must be at least {least:g}, or 0, which "
                "is greedy."
            )


class SamplingLoop(Section):
    """How much is sampled for one step, and for how many steps."""

    max_steps: Count = 40
    """Steps of the whole run, resumed parts included: each samples a batch and trains on it."""
    num_prompts_per_step: Count = 16
    """Distinct prompts sampled for one step."""
    num_generations_per_prompt: Count = 8
    """Completions of each prompt."""

    @property
    def num_updates(self) -> int:
        """Optimizer steps of one step."""
        return 1


class SamplingRunConfig(RunConfig):
    """Sections of runs that sample completions. An algorithm adds its own."""

    samples: ClassVar[bool] = True

    generation: GenerationConfig = GenerationConfig()
    refit: RefitConfig = RefitConfig()
    mismatch: MismatchConfig = MismatchConfig()
    data: PromptsConfig = PromptsConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    validation: ValidationConfig = ValidationConfig()

    @property
    def loop(self) -> SamplingLoop:
        """The algorithm's own section."""
        loop = getattr(self, self.section)
        assert isinstance(loop, SamplingLoop)
        return loop

    @property
    def max_steps(self) -> int:
        return self.loop.max_steps

    @property
    def max_updates(self) -> int:
        return self.max_steps

    @property
    def rows_per_step(self) -> int:
        return self.loop.num_prompts_per_step * self.loop.num_generations_per_prompt

    @property
    def validates(self) -> bool:
        return self.data.has_validation_rows and self.validation.every_steps > 0

    @property
    def metric_areas(self) -> tuple[str, ...]:
        return ("train/", "rollout/", "mismatch/", "policy/")

    @property
    def max_lag(self) -> int:
        """Steps that sampling may be ahead of training."""
        return 0

    @property
    def overlaps(self) -> bool:
        """Whether engines sample while the policy trains."""
        return False

    @property
    def rollout_order(self) -> str:
        """Order in which groups sampled ahead train."""
        return "first_in"

    @property
    def trains(self) -> bool:
        """Whether what is sampled also trains."""
        return True

    def longest_completion(self, rows: str) -> tuple[str, int]:
        """The key that limits completions of ``rows``, such as ``data.train``, and its value."""
        if rows == "data.validation" and self.validation.max_new_tokens is not None:
            return "validation.max_new_tokens", self.validation.max_new_tokens
        return "generation.max_new_tokens", self.generation.max_new_tokens

    def rules(self, here: str, run: Any) -> Iterator[str]:
        """A micro-batch must hold one completion with something before it."""
        tokens, least = self.policy.micro_batch_tokens, self.generation.max_new_tokens + 1
        if self.trains and tokens < least:
            yield (
                f"policy.micro_batch_tokens={tokens} cannot hold one prompt token and "
                f"generation.max_new_tokens={self.generation.max_new_tokens}; use at least "
                f"{least}, plus the length of your prompts."
            )


class UpdatesLoop(SamplingLoop):
    """How many optimizer steps a step's completions take."""

    num_epochs_per_batch: Count = 1
    """Passes over a step's completions."""
    num_mini_batches: Count = 1
    """Optimizer steps per pass; each pass deals the groups afresh."""

    @property
    def num_updates(self) -> int:
        return self.num_epochs_per_batch * self.num_mini_batches

    def rules(self, here: str, run: Any) -> Iterator[str]:
        """Groups are dealt whole."""
        if self.num_mini_batches > self.num_prompts_per_step:
            yield (
                f"{here}.num_mini_batches={self.num_mini_batches} is more than the "
                f"{self.num_prompts_per_step} groups of {here}.num_prompts_per_step; use at most "
                "that."
            )


class RolloutConfig(Section):
    """How far sampling runs ahead of training."""

    max_lag: Annotated[int, Field(ge=0)] = 0
    """Most steps by which the weights that sampled a token may be older than the policy that trains
    on it. 0: each step samples with the newest weights and waits. From 1 on, engines sample while
    the policy trains: completions in progress continue with new weights as they arrive, and
    ``loss.importance`` corrects for the difference. Engines must not sleep."""
    order: Annotated[
        Literal["first_in", "ready"],
        OnlyIf(lambda here, _: here.max_lag > 0, "with rollout.max_lag=0 a step waits for all"),
    ] = "first_in"
    """Which groups train next. ``first_in``: those that began first; ``ready``: those that finished
    first, unless another group would then exceed ``max_lag``: the step waits for that one. Short
    completions train earlier, but not more often."""

    overlap: bool = False
    """Train on groups as they finish, while others are still being sampled. There is still one
    optimizer step, with the gradient of the whole batch. Engines must not sleep."""

    def rules(self, here: str, run: Any) -> Iterator[str]:
        """Refuse what does not work with old tokens or with part of a batch."""
        if self.max_lag and run.loss.importance == "none":
            yield (
                f"{here}.max_lag={self.max_lag} trains on tokens of older weights, which "
                "loss.importance=none does not correct; set truncate or mask."
            )
        if self.max_lag and run.mismatch.action == "mask":
            yield (
                f"{here}.max_lag={self.max_lag} makes logprobs differ by steps of training, which "
                "mismatch.action=mask would take for an engine's error; set warn or stop."
            )
        if self.overlap and (whole := run.needs_whole_batch):
            yield (
                f"{here}.overlap=true trains on some of a step's groups before the others are "
                f"finished, and {whole}."
            )


class PolicyGradientRunConfig(SamplingRunConfig):
    """Sections of runs that make completions with high advantages more likely."""

    loss: LossConfig = LossConfig()
    rollout: RolloutConfig = RolloutConfig()

    @property
    def max_lag(self) -> int:
        return self.rollout.max_lag

    @property
    def rollout_order(self) -> str:
        return self.rollout.order

    @property
    def overlaps(self) -> bool:
        return self.max_lag > 0 or self.rollout.overlap

    @property
    def needs_whole_batch(self) -> str | None:
        """Why a step cannot begin before all its groups are finished, and what to set instead."""
        if self.max_lag:
            return "rollout.max_lag is above 0, so steps overlap anyway; leave one of them out"
        if not self.reuses_logprobs:
            return (
                "several optimizer steps, loss.kl_in=reward and mismatch.action=mask need logprobs "
                "of all first; set num_mini_batches=1, num_epochs_per_batch=1, loss.kl_in=loss and "
                "mismatch.action=warn"
            )
        if self.policy.parallel.ddp.compression != "none":
            return (
                "policy.parallel.ddp.compression would round the sum once more with each of them; "
                "set it to none"
            )
        return None

    @property
    def loop(self) -> UpdatesLoop:
        loop = getattr(self, self.section)
        assert isinstance(loop, UpdatesLoop)
        return loop

    @property
    def max_updates(self) -> int:
        return self.max_steps * self.loop.num_updates

    @property
    def kl_in_reward(self) -> bool:
        """Whether a KL is subtracted from rewards."""
        return self.loss.kl_coef > 0 and self.loss.kl_in == "reward"

    @property
    def masks_mismatch(self) -> bool:
        """Whether rows that engine and policy disagree about do not train."""
        return self.mismatch.action == "mask"

    @property
    def reuses_logprobs(self) -> bool:
        """Whether a batch's only optimizer step gives the policy's logprobs: rewards or masks
        may need them before it."""
        return self.loop.num_updates == 1 and not self.kl_in_reward and not self.masks_mismatch

    @property
    def keeps_reference(self) -> bool:
        return self.loss.kl_coef > 0

    @property
    def keeps_probabilities(self) -> bool:
        return self.loss.entropy_coef > 0
