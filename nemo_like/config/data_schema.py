"""Sections of runs that train on given texts; see ``schema``."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class TrainOn(StrEnum):
    """Tokens of a conversation that train."""

    assistant = "assistant"
    last_assistant = "last_assistant"
    all = "all"


class OverlongRows(StrEnum):
    """What happens to a row with too many tokens."""

    refuse = "refuse"
    drop = "drop"
    truncate = "truncate"


class IdenticalPairs(StrEnum):
    """What happens to a pair that prefers nothing."""

    refuse = "refuse"
    drop = "drop"


@dataclass(kw_only=True)
class TextDataConfig:
    """Rows that hold both prompts and answers."""

    train: str = "reasoning_gym"
    """``reasoning_gym`` or a .jsonl file."""
    validation: str | None = None
    """Like ``train``; training rows with the same prompt are left out. None: held-out rows of
    reasoning_gym; no validation for a file."""
    tasks: dict[str, Any] = field(default_factory=dict)
    """reasoning_gym data sets and their parameters, ``{name: {parameter: value}}``; rows are drawn
    from them in turn. Empty: sums of five one-digit numbers, ``DEFAULT_TASKS``."""
    num_train_rows: int = 4000
    """Rows generated for training (reasoning_gym)."""
    num_validation_rows: int = 256
    """Rows generated for validation (reasoning_gym)."""
    system_prompt: str | None = None
    """System message put before conversations that have none. None: no system message."""
    template_switches: dict[str, Any] = field(default_factory=dict)
    """Variables for the model's chat template, ``{name: value}``, such as
    ``{enable_thinking: false}``; the same for every conversation. A name that the template does not
    use is refused."""
    shuffle: bool = True
    """New order every epoch, derived from ``run.seed``."""
    max_length: int | None = None
    """Most tokens of a row. None: as many as the model's context and
    ``policy.micro_batch_tokens`` hold (half of the latter for each row of a pair)."""
    overlong: OverlongRows = OverlongRows.refuse
    """Rows above ``max_length``: ``refuse`` to start; ``drop`` them, pairs as a whole; or
    ``truncate``, which keeps their beginning, and drops those with no trained token in it. What
    is dropped is counted in the log."""


@dataclass(kw_only=True)
class SFTDataConfig(TextDataConfig):
    """The conversations.

    A .jsonl row has ``messages`` that end with the assistant's; or ``prompt`` (text of a user, or
    messages) and ``completion`` (text of the assistant, or messages); or ``text``, which is used
    without the chat template and trains as a whole.
    """

    train: str = "reasoning_gym"
    """A .jsonl file (rows have ``messages``, ``prompt`` and ``completion``, or ``text``), or
    ``reasoning_gym``: the questions of ``tasks``, each with its right answer in the tags
    ``<answer>…</answer>`` that its reward asks for."""
    train_on: TrainOn = TrainOn.assistant
    """``assistant``: every turn of the assistant (of the completion, where a row has one), from its
    first token to the one that ends it, without an empty block of thinking that only the template
    wrote; ``last_assistant``: the last of them; ``all``: every token."""


@dataclass(kw_only=True)
class PreferenceDataConfig(TextDataConfig):
    """The pairs of a chosen and a rejected completion.

    A .jsonl row has ``prompt``, ``chosen`` and ``rejected`` (text, or messages); or the latter two
    alone, as messages whose common beginning is the prompt; or ``prompt``, two ``completions`` and
    their ``ranks``, of which the lower is chosen. With ``prompt``, the two may also be whole
    conversations that begin with it.
    """

    train: str = "reasoning_gym"
    """A .jsonl file (rows have ``prompt``, ``chosen`` and ``rejected``; ``chosen`` and
    ``rejected``; or ``prompt``, ``completions`` and ``ranks``), or ``reasoning_gym``: the questions
    of ``tasks``, each with its right answer and one that is wrong, which is another row's."""
    identical: IdenticalPairs = IdenticalPairs.refuse
    """Pairs whose completions are the same: ``refuse`` to start, or ``drop`` them and say how
    many."""
