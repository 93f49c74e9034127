"""Configurations of distillation, on the student's own samples and on given texts."""

from collections.abc import Iterator
from typing import Any, ClassVar

from nemo_like.config.data import ConversationsConfig
from nemo_like.config.losses import DistillationLossConfig
from nemo_like.config.policy import TeacherConfig
from nemo_like.config.run import Algorithm, RunConfig
from nemo_like.config.sampling import SamplingLoop, SamplingRunConfig
from nemo_like.config.section import Count, Positive
from nemo_like.config.texts import RowPassesSection, TextRunConfig


class TaughtConfig(RunConfig):
    """Sections of runs with a teacher."""

    teacher: TeacherConfig = TeacherConfig()
    loss: DistillationLossConfig = DistillationLossConfig()

    def rules(self, here: str, run: Any) -> Iterator[str]:
        """There is a teacher, and a layout that compares distributions."""
        yield from super().rules(here, run)
        if self.teacher.model is None:
            yield (
                "teacher.model is not set, and there is nothing to imitate without it; give a "
                "folder in Hugging Face format, or a hub name (organisation/model), with the "
                "student's vocabulary."
            )
        stages = self.policy.parallel.pipeline_parallel_size
        if stages > 1:
            yield (
                f"policy.parallel.pipeline_parallel_size={stages} does not go with distillation: "
                "its stages exchange one logprob per token; set it to 1, and shard by fsdp or "
                "policy.parallel.tensor_parallel_size."
            )

    @property
    def keeps_probabilities(self) -> bool:
        return True

    def other_models(self) -> Iterator[tuple[str, str]]:
        yield "teacher.model", str(self.teacher.model)


class DistillationSection(SamplingLoop):
    """The loop of on-policy distillation: the student samples, the teacher scores its tokens."""

    num_generations_per_prompt: Count = 4
    """Completions of each prompt."""


class DistillationConfig(TaughtConfig, SamplingRunConfig):
    """Configuration of ``nemo-like distillation``."""

    section: ClassVar[str] = "distillation"

    distillation: DistillationSection = DistillationSection()

    def rules(self, here: str, run: Any) -> Iterator[str]:
        """No importance ratio."""
        yield from super().rules(here, run)
        if self.mismatch.action == "mask":
            yield (
                "mismatch.action=mask would have no effect: this loss has no importance ratio that "
                "a gap could spoil; use warn or stop."
            )


class OffPolicyDistillationSection(RowPassesSection):
    """The loop of off-policy distillation: the teacher scores given conversations."""

    temperature: Positive = 1.0
    """Of both models' distributions."""


class OffPolicyDistillationConfig(TaughtConfig, TextRunConfig):
    """Configuration of ``nemo-like off_policy_distillation``."""

    section: ClassVar[str] = "distillation"

    distillation: OffPolicyDistillationSection = OffPolicyDistillationSection()
    data: ConversationsConfig = ConversationsConfig()


DISTILLATION = Algorithm(
    name="distillation",
    config=DistillationConfig,
    run="nemo_like.algorithms.distillation.loop:run",
)
OFF_POLICY = Algorithm(
    name="off_policy_distillation",
    config=OffPolicyDistillationConfig,
    run="nemo_like.algorithms.distillation.loop:run_off_policy",
)
