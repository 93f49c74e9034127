"""Rows of prompts from a file or from reasoning_gym."""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from nemo_like.config.data import DEFAULT_TASKS, PromptsConfig, TextsConfig
from nemo_like.config.paths import REASONING_GYM
from nemo_like.data import json_rows
from nemo_like.data.messages import Message, prompt_key, prompt_messages, without_nulls
from nemo_like.data.shapes import UNSUPPORTED, Purpose, how_to_load, refuse_unsupported
from nemo_like.doors import refuse_special
from nemo_like.errors import UserError

if TYPE_CHECKING:
    from nemo_like.data.chat import ChatTokenizer

logger = logging.getLogger(__name__)

VALIDATION_SEED_OFFSET = 1_000_003
"""From the seed of generated training rows to that of the held-out ones."""
_RESERVED = ("completion",)
_MEANT_FOR_US = ("prompt", "messages", "completion", *UNSUPPORTED)
"""Entries that count as absent where they are null; others are the reward function's."""


class HasPrompt(Protocol):
    """A row of any kind."""

    @property
    def prompt_key(self) -> str:
        """Key that identifies a row's prompt."""
        ...


R = TypeVar("R", bound=HasPrompt)
B = TypeVar("B")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One prompt and what the reward function is told about it."""

    index: int
    """Position in its data set."""
    messages: tuple[Message, ...]
    fields: dict[str, Any]
    """Every other entry of the row."""
    prompt_ids: tuple[int, ...] = ()
    """The rendered messages, from ``check_lengths`` on: no step waits for a tokenizer."""

    @property
    def prompt(self) -> str:
        """Text of the last message: what a reward function sees as ``prompt``."""
        return str(self.messages[-1]["content"])

    @property
    def prompt_key(self) -> str:
        """See ``HasPrompt``."""
        return prompt_key(self.messages)


def load_rows(source: str, config: PromptsConfig, num_rows: int, seed: int, key: str) -> list[Row]:
    """Rows of ``source``: ``reasoning_gym``, or a .jsonl file.

    Raises UserError naming ``key`` and the line for a missing or empty file and for a bad row.
    """
    return [
        _row(index, record, config.system_prompt, where)
        for index, (where, record) in enumerate(records(source, config.tasks, num_rows, seed, key))
    ]


def records(
    source: str, tasks: Mapping[str, Any], num_rows: int, seed: int, key: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where each row of ``source`` stands, for messages, and its entries.

    Raises UserError naming ``key``, and the line of what is not a JSON object.
    """
    if source == REASONING_GYM:
        from nemo_like.data.reasoning_gym import rows as generate

        generated = generate(tasks or DEFAULT_TASKS, num_rows, seed)
        found = ((f"row {index}", record) for index, record in enumerate(generated))
    else:
        refuse_special(f"{key}={source}", Path(source))
        if not Path(source).is_file():
            raise UserError(f"{key}={source}: no such file; give a .jsonl file or {REASONING_GYM}.")
        found = json_rows.read(Path(source), key)
    empty = True
    for place, record in found:
        empty = False
        yield f"{key}={source}, {place}", record
    if empty:
        raise UserError(f"{key}={source} has no rows; give a file with at least one.")


def load_both(
    config: TextsConfig,
    read: Callable[[str, int, int, str], list[R]],
    tokenize: Callable[[list[R], str], B],
    *,
    seed: int,
    with_validation: bool,
) -> tuple[B, B | None]:
    """Training rows, and validation rows if there are any and they are asked for.

    ``read(source, num_rows, seed, key)`` gives the rows of one source, ``tokenize(rows, key)`` the
    batch that they make.
    """
    train_rows = read(config.train, config.num_train_rows, seed, "data.train")
    source = config.validation
    if source is None and config.train == REASONING_GYM:
        source = REASONING_GYM
    if source is None or not with_validation:
        return tokenize(train_rows, "data.train"), None
    key, held_out = "data.validation", seed + VALIDATION_SEED_OFFSET
    validation_rows = read(source, config.num_validation_rows, held_out, key)
    train_rows = without_overlap(train_rows, validation_rows)
    return tokenize(train_rows, "data.train"), tokenize(validation_rows, key)


def without_overlap(train_rows: list[R], validation_rows: Sequence[R]) -> list[R]:
    """Training rows whose prompt is in no validation row.

    Raises UserError if none is left, which happens to tasks with few distinct prompts.
    """
    held_out = {row.prompt_key for row in validation_rows}
    kept = [row for row in train_rows if row.prompt_key not in held_out]
    if not kept:
        raise UserError(
            f"Every training prompt is also among the {len(validation_rows)} validation prompts; "
            "use fewer validation rows, or a task with more distinct prompts."
        )
    if len(kept) < len(train_rows):
        logger.info(
            "Left out %d of %d training rows whose prompt is used for validation",
            len(train_rows) - len(kept),
            len(train_rows),
        )
    return kept


def check_lengths(
    rows: Sequence[Row],
    chat: "ChatTokenizer",
    micro_batch_tokens: int,
    context: int,
    max_new_tokens: int,
    config: PromptsConfig,
    key: str,
) -> tuple[list[Row], int]:
    """Render every prompt once; the rows that fit with a completion, and the longest one's tokens.

    Raises UserError for a row whose template fails, and for one that is too long unless
    ``data.overlong=drop``, by its number.
    """
    most = min(context, micro_batch_tokens) - max_new_tokens
    limit = "policy.micro_batch_tokens" if micro_batch_tokens < context else "the model's context"
    kept, longest = [], 0
    for row in rows:
        try:
            prompt_ids = tuple(chat.render(row.messages))
        except UserError as error:
            raise UserError(f"{key}, row {row.index}: {error}") from error
        length = len(prompt_ids)
        if length <= most:
            kept.append(replace(row, prompt_ids=prompt_ids))
            longest = max(longest, length)
        elif config.overlong == "refuse":
            raise UserError(
                f"{key}: the prompt of row {row.index} has {length} tokens, and {limit} leaves "
                f"{most} beside the completion; shorten it, lower generation.max_new_tokens, or "
                "set data.overlong=drop."
            )
    if len(kept) < len(rows):
        dropped = len(rows) - len(kept)
        logger.warning("%s: dropped %d of %d prompts as too long", key, dropped, len(rows))
    if rows and not kept:
        raise UserError(f"{key}: every prompt is longer than {most} tokens.")
    return kept, longest


def fingerprint(rows: Sequence[Row]) -> str:
    """Short hash of all rows: tells whether a data position belongs to this data set."""
    digest = hashlib.blake2b(digest_size=8)
    for row in rows:
        digest.update(json.dumps([row.messages, row.fields], sort_keys=True, default=str).encode())
    return digest.hexdigest()


def _row(index: int, record: dict[str, Any], system_prompt: str | None, where: str) -> Row:
    fields = {
        name: value
        for name, value in record.items()
        if value is not None or name not in _MEANT_FOR_US
    }
    given = [name for name in ("prompt", "messages") if name in fields]
    if len(given) != 1:
        found = ", ".join(without_nulls(record)) or "nothing"
        raise UserError(
            f"{where}: a row needs either 'prompt' or 'messages'; it has {found}"
            f"{how_to_load(fields, Purpose.prompts)}."
        )
    messages = prompt_messages(fields.pop(given[0]), given[0], system_prompt, where)
    refuse_unsupported(record, where)
    for name in _RESERVED:
        if name in fields:
            raise UserError(
                f"{where}: '{name}' is what the model writes; rename that field, or leave it out."
            )
    return Row(index=index, messages=tuple(messages), fields=fields)
