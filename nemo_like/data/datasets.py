"""Rows of prompts, and how the rows of any run are found and read."""

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from nemo_like.config.data import DEFAULT_TASKS, Overlong, PromptsConfig
from nemo_like.config.sources import REASONING_GYM, DataSet, Part, find
from nemo_like.data.messages import (
    UNSUPPORTED,
    Message,
    prompt_key,
    prompt_messages,
    refuse_unsupported,
    system_of,
    without_nulls,
)
from nemo_like.doors import refuse_special
from nemo_like.errors import UserError

if TYPE_CHECKING:
    from nemo_like.data.chat import ChatTokenizer

logger = logging.getLogger(__name__)

VALIDATION_SEED_OFFSET = 1_000_003
"""From the seed of generated training rows to that of the held-out ones."""
_RESERVED = ("completion",)
_MEANT_FOR_US = ("prompt", "messages", "completion", "system", "tools", *UNSUPPORTED)
"""Entries that count as absent where they are null; others are the reward function's."""


class HasPrompt(Protocol):
    """A row of any kind."""

    @property
    def prompt_key(self) -> str:
        """Key that identifies a row's prompt."""
        ...


R = TypeVar("R", bound=HasPrompt)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One prompt and what the reward function is told about it."""

    index: int
    """Position in its data set."""
    messages: tuple[Message, ...]
    fields: dict[str, Any]
    """Every other entry of the row."""
    is_chat: bool = False
    """Whether its prompt was a list of messages, not a text."""
    part: str = ""
    """Name of its part of a mixture."""
    environment: str = ""
    """Name of its entry in ``environment.tasks``; empty: the run's own environment."""
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

    @property
    def task(self) -> str:
        """Name that groups its metrics and statistics; empty: none."""
        return self.environment or self.part


def load_rows(parts: Sequence[Part], config: PromptsConfig, num_rows: int, seed: int) -> list[Row]:
    """Rows of ``reasoning_gym``, files and data sets, numbered through.

    Raises UserError naming the key and the line for a missing or empty file and for a bad row.
    """
    found = (
        (part, where, record)
        for part in parts
        for where, record in records(part, config.tasks, num_rows, seed)
    )
    return [
        _row(index, part, record, config.system_prompt, where)
        for index, (part, where, record) in enumerate(found)
    ]


def records(
    part: Part, tasks: Mapping[str, Any], num_rows: int, seed: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where each row of ``part`` stands, for messages, and its entries under our names.

    Raises UserError naming the key, and the line of what is not a row.
    """
    for source in part.sources if part.weight else ():
        empty = True
        for place, record in _read(source, part.key, tasks, num_rows, seed):
            empty = False
            where = f"{part.key}={source}, {place}"
            if not part.generates:
                from nemo_like.data.columns import renamed

                record = renamed(record, part, where)
            yield where, record
        if empty:
            raise UserError(f"{part.key}={source} has no rows; give a file with at least one.")


def _read(
    source: str, key: str, tasks: Mapping[str, Any], num_rows: int, seed: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each row's place in ``source``, and its entries."""
    if source == REASONING_GYM:
        from nemo_like.data.reasoning_gym import rows as generate

        generated = generate(tasks or DEFAULT_TASKS, num_rows, seed)
        yield from ((f"row {index}", record) for index, record in enumerate(generated))
        return
    found = find(key, source)
    if isinstance(found, DataSet):
        from nemo_like.data.tables import read_data_set

        yield from read_data_set(found, key, source)
        return
    if len(found) > 1:
        logger.info("%s=%s: %d files, %s to %s", key, source, len(found), found[0], found[-1])
    for path in found:
        before = f"{path.name}, " if len(found) > 1 else ""
        refuse_special(f"{key}={source}", path)
        yield from ((f"{before}{place}", record) for place, record in _read_file(path, key))


def _read_file(path: Path, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open("rb") as file:
        is_parquet = file.read(4) == b"PAR1"
    is_csv = path.name.removesuffix(".gz").endswith((".csv", ".tsv"))
    if not is_parquet and not is_csv:
        from nemo_like.data import json_rows

        return json_rows.read(path, key)
    from nemo_like.data.tables import read_csv, read_parquet

    return read_parquet(path, key) if is_parquet else read_csv(path, key)


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
    longest_completion: tuple[str, int],
    config: PromptsConfig,
    key: str,
) -> tuple[list[Row], int]:
    """Render every prompt once; the rows that fit with a completion, and the longest one's tokens.

    Raises UserError for a row whose template fails, and for one that is too long unless
    ``data.overlong=drop``, by its number.
    """
    limiting, most_new = longest_completion
    most = min(context, micro_batch_tokens) - most_new
    limit, remedy = "the model's context", ""
    if micro_batch_tokens < context:
        limit, remedy = "policy.micro_batch_tokens", "raise it, "
    kept, longest, num_cut = [], 0, 0
    for row in rows:
        try:
            prompt_ids = tuple(chat.render(row.messages))
            length = len(prompt_ids)
            if length > most and config.overlong.startswith("truncate"):
                row, prompt_ids = _shortened(row, prompt_ids, chat, most, config.overlong)
                num_cut += bool(prompt_ids)
        except UserError as error:
            raise UserError(f"{key}, row {row.index}: {error}") from error
        if length > most and config.overlong == "refuse":
            raise UserError(
                f"{key}: the prompt of row {row.index} has {length} tokens (the first row is 0), "
                f"and {limit} leaves {most} beside the completion; {remedy}shorten it, lower "
                f"{limiting}, or set data.overlong to drop, truncate_left or truncate_right."
            )
        if 0 < len(prompt_ids) <= most:
            kept.append(replace(row, prompt_ids=prompt_ids))
            longest = max(longest, len(prompt_ids))
    if num_cut:
        logger.warning("%s: cut %d of %d prompts to %d tokens", key, num_cut, len(rows), most)
    if len(kept) < len(rows):
        dropped = len(rows) - len(kept)
        logger.warning("%s: dropped %d of %d prompts as too long", key, dropped, len(rows))
    if rows and not kept:
        raise UserError(f"{key}: every prompt is longer than {most} tokens.")
    return kept, longest


def _shortened(
    row: Row, prompt_ids: tuple[int, ...], chat: "ChatTokenizer", most: int, overlong: Overlong
) -> tuple[Row, tuple[int, ...]]:
    """A row whose longest message lacks as many tokens as are too many; no ids if it has fewer."""
    lengths = [len(one["content"]) for one in row.messages]
    index = lengths.index(max(lengths))
    while len(prompt_ids) > most:
        message = row.messages[index]
        text = chat.cuts.without_tokens(
            message["content"], len(prompt_ids) - most, at_start=overlong == "truncate_left"
        )
        if not text.strip():
            return row, ()
        before, after = row.messages[:index], row.messages[index + 1 :]
        row = replace(row, messages=(*before, {**message, "content": text}, *after))
        prompt_ids = tuple(chat.render(row.messages))
    return row, prompt_ids


def fingerprint(rows: Sequence[Row]) -> str:
    """Short hash of all rows: tells whether a data position belongs to this data set."""
    digest = hashlib.blake2b(digest_size=8)
    for row in rows:
        digest.update(json.dumps([row.messages, row.fields], sort_keys=True, default=str).encode())
    return digest.hexdigest()


def _row(
    index: int, part: Part, record: dict[str, Any], system_prompt: str | None, where: str
) -> Row:
    fields = {
        name: value
        for name, value in record.items()
        if value is not None or name not in _MEANT_FOR_US
    }
    given = [name for name in ("prompt", "messages") if name in fields]
    if len(given) != 1:
        from nemo_like.data.shapes import Purpose, how_to_load

        found = ", ".join(without_nulls(record)) or "nothing"
        raise UserError(
            f"{where}: a row needs either 'prompt' or 'messages'; it has {found}"
            f"{how_to_load(fields, Purpose.prompts)}."
        )
    system = system_of(fields, system_prompt, where)
    prompt = fields.pop(given[0])
    messages = prompt_messages(prompt, given[0], system, where)
    refuse_unsupported(record, where)
    if fields.pop("tools", None):
        raise UserError(
            f"{where}: 'tools' has no effect here: what a model that samples may call comes from "
            "its environment; describe it in a system message, or take it out of the row."
        )
    fields.pop("system", None)
    for name in _RESERVED:
        if name in fields:
            raise UserError(
                f"{where}: '{name}' is what the model writes; set data.columns.reference={name}, "
                "and the reward function gets it as 'reference'."
            )
    return Row(
        index=index,
        messages=tuple(messages),
        fields=fields,
        is_chat=not isinstance(prompt, str),
        part=part.name,
        environment=_environment(fields.get("environment"), part, where),
    )


def _environment(given: Any, part: Part, where: str) -> str:
    if not isinstance(given, str | None):
        raise UserError(
            f"{where}: 'environment' must be a name of environment.tasks; set "
            "data.columns.place=environment, and the reward function gets it as 'place'."
        )
    return given or part.environment or ""
