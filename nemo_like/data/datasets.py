"""Rows of prompts from a file or from reasoning_gym."""

import hashlib
import json
import logging
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, TypeVar

from nemo_like.config.data import DEFAULT_TASKS, PromptsConfig, TextsConfig
from nemo_like.config.paths import REASONING_GYM
from nemo_like.data import json_rows
from nemo_like.errors import UserError

if TYPE_CHECKING:
    from nemo_like.data.chat import ChatTokenizer

logger = logging.getLogger(__name__)

Message = dict[str, Any]
"""``{"role": ..., "content": ...}``, as chat templates take it."""

VALIDATION_SEED_OFFSET = 1_000_003
"""From the seed of generated training rows to that of the held-out ones."""
_RESERVED = ("completion",)
UNSUPPORTED = (
    "tools",
    "functions",
    "system",
    "chat_template",
    "chat_template_kwargs",
    "images",
    "videos",
    "audios",
)
"""Entries of a row that change what a template renders elsewhere, and would have no effect here."""
_OTHER_NAMES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}


class HasPrompt(Protocol):
    """A row of any kind."""

    @property
    def prompt_key(self) -> str:
        """What no two rows share that have different prompts."""
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


def prompt_key(messages: Sequence[Message]) -> str:
    """The same for messages that read the same, in whatever order and Unicode form they are kept.

    >>> prompt_key([{"role": "user", "content": "a b"}])
    '[["user", "a b", null]]'
    """
    parts = [
        (
            message["role"],
            " ".join(unicodedata.normalize("NFC", message["content"]).split()),
            message.get("tool_calls"),
        )
        for message in messages
    ]
    return json.dumps(parts, sort_keys=True, ensure_ascii=False)


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

    Raises UserError naming ``key``, and the line of what is no JSON object.
    """
    if source == REASONING_GYM:
        from nemo_like.environments.reasoning_gym_reward import rows as generate

        generated = generate(tasks or DEFAULT_TASKS, num_rows, seed)
        found = ((f"row {index}", record) for index, record in enumerate(generated))
    else:
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
    ``data.overlong_prompts=drop``, by its number.
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
        elif config.overlong_prompts == "refuse":
            raise UserError(
                f"{key}: the prompt of row {row.index} has {length} tokens, and {limit} leaves "
                f"{most} beside the completion; shorten it, lower generation.max_new_tokens, or "
                "set data.overlong_prompts=drop."
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
    fields = dict(record)
    given = [name for name in ("prompt", "messages") if name in fields]
    if len(given) != 1:
        found = ", ".join(record) or "nothing"
        raise UserError(f"{where}: a row needs either 'prompt' or 'messages'; it has {found}.")
    messages = prompt_messages(fields.pop(given[0]), given[0], system_prompt, where)
    refuse_unsupported(record, where)
    for name in _RESERVED:
        if name in fields:
            raise UserError(f"{where}: '{name}' is what the model writes; rename that field.")
    return Row(index=index, messages=tuple(messages), fields=fields)


def refuse_unsupported(record: Mapping[str, Any], where: str) -> None:
    """Raise UserError for an entry that would have no effect."""
    for name in UNSUPPORTED:
        if record.get(name):
            raise UserError(
                f"{where}: '{name}' is not supported; write what it adds into the messages, or "
                "take it out of the row."
            )


def prompt_messages(
    content: object, name: str, system_prompt: str | None, where: str
) -> list[Message]:
    """The messages to answer that the entry ``name`` of a row holds, or has as a user's text."""
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    if (
        not is_messages(messages)
        or messages[-1]["role"] == "assistant"
        or all(message["role"] == "system" for message in messages)
    ):
        raise UserError(
            f"{where}: '{name}' must be text, or a list of {{'role', 'content'}} messages that "
            f"ends with the one to answer{fault(messages)}."
        )
    return with_system_prompt(messages, system_prompt)


def with_system_prompt(messages: list[Message], system_prompt: str | None) -> list[Message]:
    """The messages, with a system message before them if they have none."""
    if system_prompt is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]


def is_messages(value: object) -> TypeGuard[list[Message]]:
    """Whether a row's entry is a list of at least one ``{"role", "content"}``, both text."""
    return isinstance(value, list) and bool(value) and not fault(value)


def fault(messages: object) -> str:
    """What is wrong with the first message that cannot serve: the end of a sentence, or ''."""
    if not isinstance(messages, list):
        return ""
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            return f" (message {index} is no object)"
        for name in ("role", "content"):
            if not isinstance(message.get(name), str):
                kind = {dict: "an object", list: "a list", type(None): "null"}
                what = kind.get(type(message.get(name)), "no text")
                return f" (the '{name}' of message {index} is {what}, not text)"
        role = message["role"]
        known = _OTHER_NAMES.get(role.lower(), role.lower())
        if role != known and known in ("system", "user", "assistant", "tool"):
            return f" (the role of message {index} is '{role}', which must be '{known}')"
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            return f" (the 'tool_calls' of message {index} are no list of objects)"
        for name in ("weight", "train", "trainable", "loss"):
            if message.get(name, 1) != 1:
                return f" (the '{name}' of message {index} is not supported)"
    return ""
