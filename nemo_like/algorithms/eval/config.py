"""Configuration of evaluations; ``loop`` has the algorithm."""

from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic import Field

from nemo_like.config.paths import is_checkpoint
from nemo_like.config.run import Algorithm
from nemo_like.config.sampling import SamplingLoop, SamplingRunConfig
from nemo_like.config.section import Section

PROMPTS_AT_ONCE = 64
"""Prompts sampled at one time."""

_TRAINING_KEYS = (
    *(
        f"policy.{name}"
        for name in (
            "float32_head",
            "attention",
            "optimizer",
            "scheduler",
            "max_grad_norm",
            "batching",
            "micro_batch_tokens",
            "micro_batch_size",
            "logprob_chunk_tokens",
            "compile",
            "activation_checkpointing",
            "activation_offload",
            "debug",
            "parallel.reshard_after_forward",
            "parallel.sequence_parallel",
            "parallel.pipeline_schedule",
            "parallel.ddp",
        )
    ),
    "checkpoint",
)
_NOTHING_COMPARED = "only the engine computes logprobs in an evaluation, so nothing is compared"
_NO_TRAINING_ROWS = (
    "an evaluation reads validation rows only; set data.validation, or data.num_validation_rows"
)


class EvalSection(Section):
    """How an evaluation summarises completions; ``validation`` says how to sample them.

    ``policy.model`` may also be a checkpoint of a run, ``<run.dir>/checkpoints/step_<n>``. Rows are
    those that a training run with the same ``data`` and ``run.seed`` validates on.
    """

    pass_at: list[int] = Field(default_factory=list)
    """Values of k for pass@k: the chance that at least one of k completions of a prompt passes,
    without bias (arXiv:2107.03374 Eq. 1). At most
    ``validation.num_generations_per_prompt``. (pass@1 is the accuracy, which is always given.)"""
    pass_reward: float = 1.0
    """Least reward of a completion that passes."""
    majority_at: list[int] = Field(default_factory=list)
    """Values of k for maj@k: the chance that the most frequent answer of k completions of a prompt
    passes, ties drawn by lot (arXiv:2203.11171). Answers are equal as text; completions without one
    have no vote. Needs a reward that reports ``answer``, as ``reasoning_gym`` and ``math`` do."""
    category_field: str | None = None
    """Field of the rows by which results are also broken down, such as reasoning_gym's ``task``."""

    def rules(self, here: str, run: Any) -> Iterator[str]:
        """Several completions differ, and are enough for each k."""
        count = run.validation.num_generations_per_prompt
        if run.validation.temperature == 0 and count > 1:
            yield (
                f"validation.num_generations_per_prompt={count} with validation.temperature=0 "
                "would sample the same completion again; set it to 1, or validation.temperature "
                "above 0."
            )
        for name in ("pass_at", "majority_at"):
            for k in getattr(self, name):
                if not 1 <= k <= count:
                    yield (
                        f"{here}.{name}={getattr(self, name)}: {k} must be between 1 and "
                        f"validation.num_generations_per_prompt={count}; raise that, or leave {k} "
                        "out."
                    )


class EvalConfig(SamplingRunConfig):
    """Configuration of ``nemo-like eval``."""

    section: ClassVar[str] = "eval"
    evaluates: ClassVar[bool] = True
    unused: ClassVar[tuple[tuple[str, str], ...]] = (
        *((key, "an evaluation trains nothing") for key in _TRAINING_KEYS),
        ("run.resume", "an evaluation saves no checkpoint to continue from; start it again"),
        ("run.stop_grace_s", "an evaluation saves nothing: SIGTERM ends it at once"),
        ("run.callbacks", "an evaluation has no steps to follow"),
        ("mismatch", _NOTHING_COMPARED),
        ("data.train", _NO_TRAINING_ROWS),
        ("data.num_train_rows", _NO_TRAINING_ROWS),
        ("data.shuffle", "an evaluation uses every row once, and its order changes nothing"),
        ("generation.temperature", "an evaluation samples as the section validation says"),
        ("validation.every_steps", "an evaluation measures once"),
    )

    eval: EvalSection = EvalSection()

    @property
    def loop(self) -> SamplingLoop:
        return SamplingLoop(
            max_steps=1,
            num_prompts_per_step=PROMPTS_AT_ONCE,
            num_generations_per_prompt=self.validation.num_generations_per_prompt,
        )

    @property
    def trains(self) -> bool:
        return False

    def rules(self, here: str, run: Any) -> Iterator[str]:
        """Keys that mean something else, or nothing, without training."""
        yield from super().rules(here, run)
        default = type(self)()
        lora, model = self.policy.lora, self.policy.model
        for sentence, changed in (
            (
                "policy.offload=optimizer would have no effect: an evaluation has no optimizer "
                "state; all offloads the parameters.",
                self.policy.offload == "optimizer",
            ),
            (
                "policy.lora would have no effect: policy.model is a full model; only a run's "
                "checkpoint has adapters apart.",
                lora != default.policy.lora and not is_checkpoint(model),
            ),
            (
                f"generation.max_new_tokens={self.generation.max_new_tokens} would have no effect: "
                "validation.max_new_tokens is set too; leave one of them out.",
                self.generation.max_new_tokens != default.generation.max_new_tokens
                and self.validation.max_new_tokens is not None,
            ),
            (
                f"data.tasks={self.data.tasks} would have no effect: data.validation is a file.",
                bool(self.data.tasks)
                and not any(part.generates for part in self.data.validation_parts),
            ),
        ):
            if changed:
                yield sentence


ALGORITHM = Algorithm(name="eval", config=EvalConfig, run="nemo_like.algorithms.eval.loop:run")
