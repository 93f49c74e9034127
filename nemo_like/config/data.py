"""Sections ``data``: prompts to sample from, conversations, and pairs."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator
from pydantic_core import PydanticCustomError

from nemo_like.config.section import Count, OnlyIf, Section
from nemo_like.config.sources import REASONING_GYM, Column, Part, Source, parts

TrainOn = Literal["assistant", "last_assistant", "all"]
Overlong = Literal["refuse", "drop", "truncate_left", "truncate_right"]
FORMS = ("prompt", "messages", "completion", "text", "chosen", "rejected", "completions", "ranks")
"""Columns of which a row's form is made, in any kind of run."""


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

    own_columns: ClassVar[tuple[str, ...]] = ()
    """Names that ``columns`` may give; any, if there are none."""

    train: Source = REASONING_GYM
    """``reasoning_gym``, or files of rows; or a mixture of such."""
    validation: Source | None = None
    """Like ``train``, without weights; training rows with the same prompt are left out. None:
    held-out rows of reasoning_gym; no validation for files."""
    columns: Annotated[
        dict[str, Column],
        OnlyIf(
            lambda here, _: not all(part.generates for part in here.all_parts),
            "rows of reasoning_gym have the names that are read",
        ),
    ] = Field(default_factory=dict)
    """Which column of the files is which of ours, ``{prompt: question, answer:
    reward_model.ground_truth}``. A dot leads into an object, or to an entry of a list
    (``messages.0.content``). The texts of several columns, ``[instruction, input]``, are joined by
    an empty line. A column that stands for the same as a named one (``messages`` where ``prompt``
    is named) is left aside. An entry of a mixture may have columns of its own."""
    tasks: Annotated[
        dict[str, Any],
        OnlyIf(
            lambda here, _: any(part.generates for part in here.all_parts),
            "neither data.train nor data.validation is reasoning_gym",
        ),
    ] = Field(default_factory=dict)
    """reasoning_gym data sets and their parameters, ``{name: {parameter: value}}``; rows are drawn
    from them in turn. Empty: sums of five one-digit numbers, ``DEFAULT_TASKS``."""
    num_train_rows: Annotated[
        Count,
        OnlyIf(
            lambda here, _: any(part.generates for part in here.train_parts),
            "data.train is a file, whose rows are all used",
        ),
    ] = 4000
    """Rows generated for training (reasoning_gym)."""
    num_validation_rows: Annotated[
        Count,
        OnlyIf(
            lambda here, _: any(part.generates for part in here.validation_parts),
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
    def mixes(self) -> bool:
        """Whether training rows are drawn from several parts by weight."""
        return isinstance(self.train, dict)

    @property
    def weights(self) -> dict[str, float]:
        """Of the parts of a mixture that have any."""
        return {part.name: part.weight for part in self.train_parts if part.weight}

    @property
    def train_parts(self) -> list[Part]:
        """Where training rows come from."""
        return parts("data.train", self.train, self.columns)

    @property
    def validation_parts(self) -> list[Part]:
        """Where validation rows come from; empty if there are none."""
        given = self.validation
        if given is None and self.train == REASONING_GYM:
            given = REASONING_GYM
        return [] if given is None else parts("data.validation", given, self.columns)

    @property
    def all_parts(self) -> list[Part]:
        """Both."""
        return [*self.train_parts, *self.validation_parts]

    @property
    def has_validation_rows(self) -> bool:
        """Whether there is anything to validate on."""
        return bool(self.validation_parts)

    def rules(self, here: str, run: Any) -> Iterator[str]:
        for part in self.all_parts:
            if part.generates and len(part.sources) > 1:
                yield f"{part.key}: {REASONING_GYM} is a part of its own; make this a mixture."
            if part.environment is not None and self.own_columns:
                yield f"{part.key}.environment would have no effect: no row is sampled from."
            for name in part.columns:
                if self.own_columns and name not in self.own_columns:
                    ours = ", ".join(self.own_columns)
                    yield f"{here}.columns.{name} would have no effect: rows have {ours}."
        if isinstance(self.validation, dict):
            weighted = [name for name, one in self.validation.items() if "weight" in one]
            for name in weighted[:1]:
                yield (
                    f"{here}.validation.{name}.weight would have no effect: every validation row "
                    "counts once; leave it out."
                )


class PromptsConfig(RowsConfig):
    """The prompts."""

    train: Source = REASONING_GYM
    """``reasoning_gym`` (tasks below), or files whose rows have ``prompt`` (text) or ``messages``
    (chat); other fields reach the reward function. Also a folder, a pattern, a list, a data set of
    Hugging Face, or a mixture, ``{name: {path: ..., weight: ...}}``; see docs/data.md."""
    overlong: Overlong = "refuse"
    """Prompts that do not fit the model's context with ``generation.max_new_tokens``: ``refuse`` to
    start; ``drop`` them; or cut their longest message, its beginning (``truncate_left``) or its end
    (``truncate_right``). The log counts what is dropped or cut."""


class TextsConfig(RowsConfig):
    """Rows that hold both prompts and answers."""

    max_length: Annotated[int | None, Field(ge=2)] = None
    """Most tokens of a row. None: as many as the model's context and
    ``policy.micro_batch_tokens`` hold (half of the latter for each row of a pair)."""
    overlong: Overlong = "refuse"
    """Rows above ``max_length``: ``refuse`` to start; ``drop`` them, pairs as a whole; or cut their
    beginning (``truncate_left``, both rows of a pair by as much) or their end (``truncate_right``),
    and drop those without a trained token in what is left. The log counts what is dropped or
    cut."""


class ConversationsConfig(TextsConfig):
    """The conversations.

    A row has ``messages`` that end with the assistant's; or ``prompt`` (text of a user, or
    messages) and ``completion`` (text of the assistant, or messages); or ``text``, which is used
    without the chat template and trains as a whole.
    """

    own_columns: ClassVar[tuple[str, ...]] = (
        *("messages", "prompt", "completion", "text", "system", "tools", "label"),
    )

    train: Source = REASONING_GYM
    """Files (rows have ``messages``, ``prompt`` and ``completion``, or ``text``), a mixture (see
    docs/data.md), or ``reasoning_gym``: the questions of ``tasks``, each with its right answer in
    the tags ``<answer>…</answer>`` that its reward asks for."""
    train_on: TrainOn = "assistant"
    """``assistant``: every turn of the assistant (of the completion, where a row has one), from its
    first token to the one that ends it, without an empty block of thinking that only the template
    wrote; ``last_assistant``: the last of them; ``all``: every token."""


class PairsConfig(TextsConfig):
    """The pairs of a chosen and a rejected completion.

    A row has ``prompt``, ``chosen`` and ``rejected`` (text, or messages); or the latter two
    alone, as messages whose common beginning is the prompt; or ``prompt``, two ``completions`` and
    their ``ranks``, of which the lower is chosen. With ``prompt``, the two may also be full
    conversations that begin with it. Pairs whose completions are the same are left out, and counted
    in the log.
    """

    own_columns: ClassVar[tuple[str, ...]] = (
        *("prompt", "chosen", "rejected", "completions", "ranks", "system", "tools"),
    )

    train: Source = REASONING_GYM
    """Files (rows have ``prompt``, ``chosen`` and ``rejected``; ``chosen`` and ``rejected``; or
    ``prompt``, ``completions`` and ``ranks``), a mixture (see docs/data.md), or ``reasoning_gym``:
    the questions of ``tasks``, each with its right answer and one that is wrong, taken from another
    row."""
