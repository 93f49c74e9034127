"""Sections ``data``: prompts to sample from, conversations, and pairs."""

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator
from pydantic_core import PydanticCustomError

from nemo_like.config.section import Count, OnlyIf, Section

REASONING_GYM = "reasoning_gym"

TrainOn = Literal["assistant", "last_assistant", "all"]
OverlongRows = Literal["refuse", "drop", "truncate"]


def _switch(value: Any) -> Any:
    if not isinstance(value, bool | int | float | str):
        raise PydanticCustomError("switch", "must be true, false, a number or text")
    return value


Switch = Annotated[Any, PlainValidator(_switch)]
"""Value of a chat template's variable: true, false, a number or text."""

DEFAULT_TASKS: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 5, "max_terms": 5, "min_digits": 1, "max_digits": 1}
}


class RowsConfig(Section):
    """What all kinds of rows have in common."""

    train: str = REASONING_GYM
    """``reasoning_gym`` or a .jsonl file."""
    validation: str | None = None
    """Like ``train``; training rows with the same prompt are left out. None: held-out rows of
    reasoning_gym; no validation for a file."""
    tasks: Annotated[
        dict[str, Any],
        OnlyIf(
            lambda here, _: REASONING_GYM in (here.train, here.validation),
            "neither data.train nor data.validation is reasoning_gym",
        ),
    ] = Field(default_factory=dict)
    """reasoning_gym data sets and their parameters, ``{name: {parameter: value}}``; rows are drawn
    from them in turn. Empty: sums of five one-digit numbers, ``DEFAULT_TASKS``."""
    num_train_rows: Annotated[
        Count,
        OnlyIf(
            lambda here, _: here.train == REASONING_GYM,
            "data.train is a file, whose rows are all used",
        ),
    ] = 4000
    """Rows generated for training (reasoning_gym)."""
    num_validation_rows: Annotated[
        Count,
        OnlyIf(
            lambda here, _: (here.validation or here.train) == REASONING_GYM,
            "validation rows do not come from reasoning_gym",
        ),
    ] = 256
    """Rows generated for validation (reasoning_gym)."""
    system_prompt: str | None = None
    """System message put before conversations that have none. None: no system message."""
    template_switches: dict[str, Switch] = Field(default_factory=dict)
    """Variables of the model's chat template, ``{name: value}``, such as ``{enable_thinking:
    false}``, the same for every conversation. A name that the template does not use is refused."""
    shuffle: bool = True
    """New order every epoch, derived from ``run.seed``."""

    @property
    def has_validation_rows(self) -> bool:
        """Whether there is anything to validate on."""
        return self.validation is not None or self.train == REASONING_GYM


class PromptsConfig(RowsConfig):
    """The prompts."""

    train: str = REASONING_GYM
    """``reasoning_gym`` (tasks below), or a .jsonl file whose rows have ``prompt`` (text) or
    ``messages`` (chat); other fields reach the reward function."""
    overlong: Literal["refuse", "drop"] = "refuse"
    """Prompts that do not fit the model's context with ``generation.max_new_tokens``: ``refuse`` to
    start, or ``drop`` them and say how many."""


class TextsConfig(RowsConfig):
    """Rows that hold both prompts and answers."""

    max_length: Annotated[int | None, Field(ge=2)] = None
    """Most tokens of a row. None: as many as the model's context and
    ``policy.micro_batch_tokens`` hold (half of the latter for each row of a pair)."""
    overlong: OverlongRows = "refuse"
    """Rows above ``max_length``: ``refuse`` to start; ``drop`` them, pairs as a whole; or
    ``truncate``: keep their beginning, and drop those without a trained token in it. The log counts
    what is dropped."""


class ConversationsConfig(TextsConfig):
    """The conversations.

    A .jsonl row has ``messages`` that end with the assistant's; or ``prompt`` (text of a user, or
    messages) and ``completion`` (text of the assistant, or messages); or ``text``, which is used
    without the chat template and trains as a whole.
    """

    train: str = REASONING_GYM
    """A .jsonl file (rows have ``messages``, ``prompt`` and ``completion``, or ``text``), or
    ``reasoning_gym``: the questions of ``tasks``, each with its right answer in the tags
    ``<answer>…</answer>`` that its reward asks for."""
    train_on: TrainOn = "assistant"
    """``assistant``: every turn of the assistant (of the completion, where a row has one), from its
    first token to the one that ends it, without an empty block of thinking that only the template
    wrote; ``last_assistant``: the last of them; ``all``: every token."""


class PairsConfig(TextsConfig):
    """The pairs of a chosen and a rejected completion.

    A .jsonl row has ``prompt``, ``chosen`` and ``rejected`` (text, or messages); or the latter two
    alone, as messages whose common beginning is the prompt; or ``prompt``, two ``completions`` and
    their ``ranks``, of which the lower is chosen. With ``prompt``, the two may also be full
    conversations that begin with it. Pairs whose completions are the same are left out, and counted
    in the log.
    """

    train: str = REASONING_GYM
    """A .jsonl file (rows have ``prompt``, ``chosen`` and ``rejected``; ``chosen`` and
    ``rejected``; or ``prompt``, ``completions`` and ``ranks``), or ``reasoning_gym``: the questions
    of ``tasks``, each with its right answer and one that is wrong, taken from another row."""
