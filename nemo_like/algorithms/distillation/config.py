"""Configurations of distillation, on the student's own samples and on given texts."""

from collections.abc import Iterator
from typing import Any, ClassVar

from nemo_like.config.data import ConversationsConfig
from nemo_like.config.losses import DistillationLossConfig
from nemo_like.config.policy import TeacherConfig
from nemo_like.config.run import Algorithm
from nemo_like.config.sampling import SamplingLoop, SamplingRunConfig
from nemo_like.config.section import Count, Positive
from nemo_like.config.texts import RowPassesSection, TextRunConfig


class DistillationSection(SamplingLoop):
    """The loop of on-policy distillation: the student samples, the teacher scores its tokens."""

    num_generations_per_prompt: Count = 4
    """Completions of each prompt."""


class DistillationConfig(SamplingRunConfig):
    """Configuration of ``nemo-like distillation``."""

    section: ClassVar[str] = "distillation"

    distillation: DistillationSection = DistillationSection()
    teacher: TeacherConfig = TeacherConfig()
    loss: DistillationLossConfig = DistillationLossConfig()

    def rules(self, here: str, run: Any) -> Iterator[str]:
        """There is a teacher, and no importance ratio."""
        yield from super().rules(here, run)
        yield from _teacher_rules(self)
        if self.mismatch.action == "mask":
            yield (
                "mismatch.action=mask would have no effect: this loss has no importance ratio that "
                "a gap could spoil; use warn or stop."
            )

    @property
    def keeps_probabilities(self) -> bool:
        return True

    def other_models(self) -> Iterator[tuple[str, str]]:
        yield "teacher.model", str(self.teacher.model)


class OffPolicyDistillationSection(RowPassesSection):
    """The loop of off-policy distillation: the teacher scores given conversations."""

    temperature: Positive = 1.0
    """Of both models' distributions."""


class OffPolicyDistillationConfig(TextRunConfig):
    """Configuration of ``nemo-like off_policy_distillation``."""

    section: ClassVar[str] = "distillation"

    distillation: OffPolicyDistillationSection = OffPolicyDistillationSection()
    teacher: TeacherConfig = TeacherConfig()
    loss: DistillationLossConfig = DistillationLossConfig()
    data: ConversationsConfig = ConversationsConfig()

    def rules(self, here: str, run: Any) -> Iterator[str]:
        yield from super().rules(here, run)
        yield from _teacher_rules(self)

    @property
    def keeps_probabilities(self) -> bool:
        return True

    def other_models(self) -> Iterator[tuple[str, str]]:
        yield "teacher.model", str(self.teacher.model)


def _teacher_rules(config: DistillationConfig | OffPolicyDistillationConfig) -> Iterator[str]:
    if config.teacher.model is None:
        yield (
            "teacher.model is not set, and there is nothing to imitate without it; give a folder "
            "in Hugging Face format, or a hub name (organisation/model), with the student's "
            "vocabulary."
        )
    stages = config.policy.parallel.pipeline_parallel_size
    if stages > 1:
        yield (
            f"policy.parallel.pipeline_parallel_size={stages} does not go with distillation: its "
            "stages exchange one logprob per token; set it to 1, and shard by fsdp or "
            "policy.parallel.tensor_parallel_size."
        )


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
