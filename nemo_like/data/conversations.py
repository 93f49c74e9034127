"""Rows of supervised fine-tuning: conversations and texts, as token ids and which of them train.

Legend: ``T`` tokens of a row, ``B`` rows, ``N`` tokens of all rows.
"""

import json
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nemo_like.batch import keys
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.config.data_schema import OverlongRows, SFTDataConfig, TextDataConfig, TrainOn
from nemo_like.data import datasets
from nemo_like.data.chat import ChatTokenizer, Message
from nemo_like.environments.reasoning_gym_reward import ANSWER_CLOSE, ANSWER_OPEN
from nemo_like.errors import UserError

logger = logging.getLogger(__name__)

_FORMS = ({"messages"}, {"prompt", "completion"}, {"text"})
_UNSUPPORTED = ("tools", "chat_template_kwargs", "images")
_NOTHING_TRAINS = "no token that trains is left of them"


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """One row: messages that end with the assistant's, or plain text."""

    where: str
    """Key, file and line, for messages."""
    messages: tuple[Message, ...] = ()
    num_prompt_messages: int = 0
    """Messages at the beginning that never train; 0: every turn of the assistant may."""
    text: str | None = None

    @property
    def prompt_key(self) -> str:
        """See ``HasPrompt``: what stands before the completion, or before the last answer."""
        if self.text is not None:
            return self.text
        return json.dumps(self.messages[: self.num_prompt_messages or -1])


@dataclass(frozen=True, kw_only=True)
class TokenRow:
    """One row as token ids."""

    ids: Tensor
    """int64 [T]."""
    mask: Tensor
    """bool [T]: tokens that train."""


@dataclass(frozen=True, kw_only=True)
class Limit:
    """Most tokens of a row, and what happens to a longer one."""

    num_tokens: int
    key: str
    """What sets the number, for messages."""
    overlong: OverlongRows

    def fit(self, row: TokenRow, where: str, dropped: Counter[str]) -> TokenRow | None:
        """The row, cut if need be; None, and counted by reason, if it is to be left out.

        Raises UserError for a row that is too long and to be refused.
        """
        length = len(row.ids)
        if length > self.num_tokens and self.overlong is OverlongRows.refuse:
            raise UserError(
                f"{where}: the row has {length} tokens, and {self.key} allows {self.num_tokens}; "
                "shorten it, raise the limit, or set data.overlong to drop or truncate."
            )
        if length > self.num_tokens and self.overlong is OverlongRows.drop:
            dropped[f"they have more than {self.num_tokens} tokens"] += 1
            return None
        row = TokenRow(ids=row.ids[: self.num_tokens], mask=row.mask[: self.num_tokens])
        if not row.mask.any():
            dropped[_NOTHING_TRAINS] += 1
            return None
        return row


def load(
    config: SFTDataConfig,
    chat: ChatTokenizer,
    *,
    micro_batch_tokens: int,
    context: int,
    seed: int,
    with_validation: bool,
) -> tuple[TensorBatch, TensorBatch | None]:
    """All training rows and, if asked for and there are any, all validation rows; see ``collate``.

    Raises UserError, with key, file and line, for files and rows that break a rule.
    """
    limit = length_limit(config, context=context, micro_batch_tokens=micro_batch_tokens)
    train = read(config.train, config, config.num_train_rows, seed, "data.train")
    held_out = None
    source = validation_source(config) if with_validation else None
    if source is not None:
        offset_seed = seed + datasets.VALIDATION_SEED_OFFSET
        rows = read(source, config, config.num_validation_rows, offset_seed, "data.validation")
        train = datasets.without_overlap(train, rows)
        held_out = tokenize(rows, chat, config.train_on, limit, "data.validation")
    return tokenize(train, chat, config.train_on, limit, "data.train"), held_out


def read(
    source: str, config: SFTDataConfig, num_rows: int, seed: int, key: str
) -> list[Conversation]:
    """Rows of ``reasoning_gym`` or of a .jsonl file; UserError as in ``load``."""
    records = datasets.records(source, config.tasks, num_rows, seed, key)
    if source == datasets.REASONING_GYM:
        records = _solved(records)
    return [_conversation(record, config.system_prompt, where) for where, record in records]


def tokenize(
    rows: Sequence[Conversation], chat: ChatTokenizer, train_on: TrainOn, limit: Limit, key: str
) -> TensorBatch:
    """The rows that fit ``limit``, as ``collate`` makes them; those left out are in the log."""
    dropped: Counter[str] = Counter()
    fitting = (limit.fit(encode(row, chat, train_on), row.where, dropped) for row in rows)
    kept = [row for row in fitting if row is not None]
    report_dropped(key, dropped, len(rows))
    return collate(kept)


def encode(row: Conversation, chat: ChatTokenizer, train_on: TrainOn) -> TokenRow:
    """Token ids of a row up to the last that trains: what comes after it has no effect.

    The first token never trains, because nothing predicts it. Raises UserError naming the row.
    """
    if row.text is not None:
        ids = chat.encode_text(row.text)
        mask = [True] * len(ids)
    else:
        first = row.num_prompt_messages
        if train_on is TrainOn.last_assistant:
            first = len(row.messages) - 1
        try:
            ids, mask = chat.render_conversation(row.messages, from_message=first)
        except UserError as error:
            raise UserError(f"{row.where}: {error}") from error
        if train_on is TrainOn.all:
            mask = [True] * len(ids)
    mask[0] = False
    end = len(mask) - mask[::-1].index(True) if True in mask else len(mask)
    return TokenRow(ids=torch.tensor(ids[:end]), mask=torch.tensor(mask[:end]))


def collate(rows: Sequence[TokenRow]) -> TensorBatch:
    """Columns ``INPUT_IDS`` and ``LOSS_MASK`` [N]; ``SAMPLE_MASK`` and ``NUM_LOSS_TOKENS`` [B]."""
    return TensorBatch(
        lengths=torch.tensor([len(row.ids) for row in rows], dtype=torch.int64),
        tokens={
            keys.INPUT_IDS: torch.cat([row.ids for row in rows]),
            keys.LOSS_MASK: torch.cat([row.mask for row in rows]),
        },
        rows={
            keys.SAMPLE_MASK: torch.ones(len(rows), dtype=torch.bool),
            keys.NUM_LOSS_TOKENS: torch.tensor([int(row.mask.sum()) for row in rows]),
        },
    )


def length_limit(
    config: TextDataConfig, *, context: int, micro_batch_tokens: int, rows_per_unit: int = 1
) -> Limit:
    """The smallest of the bounds on a row's tokens.

    ``rows_per_unit`` rows share a micro-batch. Raises UserError if ``data.max_length`` exceeds a
    bound that it cannot change.
    """
    share = "policy.micro_batch_tokens"
    if rows_per_unit > 1:
        share += f" for {rows_per_unit} rows"
    bounds = {"the model's context": context, share: micro_batch_tokens // rows_per_unit}
    key = min(bounds, key=bounds.__getitem__)
    num_tokens = bounds[key]
    if config.max_length is not None:
        if config.max_length > num_tokens:
            raise UserError(
                f"data.max_length={config.max_length} is above the {num_tokens} tokens that {key} "
                "allows; use at most that."
            )
        key, num_tokens = "data.max_length", config.max_length
    return Limit(num_tokens=num_tokens, key=key, overlong=config.overlong)


def validation_source(config: TextDataConfig) -> str | None:
    """Where validation rows come from; None: there are none."""
    if config.validation is None and config.train == datasets.REASONING_GYM:
        return config.train
    return config.validation


def report_dropped(key: str, dropped: Counter[str], num_rows: int, noun: str = "rows") -> None:
    """Log what was left out and why; UserError if nothing is left."""
    for reason, count in dropped.items():
        logger.warning("%s: dropped %d of %d %s, as %s", key, count, num_rows, noun, reason)
    if dropped.total() == num_rows:
        reasons = "; ".join(f"{count}, as {reason}" for reason, count in dropped.items())
        raise UserError(f"{key}: none of the {num_rows} {noun} is left (dropped {reasons}).")


def refuse_unsupported(record: dict[str, Any], where: str) -> None:
    """Raise UserError for entries that would change how a row is rendered."""
    for name in _UNSUPPORTED:
        if record.get(name):
            raise UserError(
                f"{where}: '{name}' is not supported; write what it adds into the messages, or "
                "take it out of the row."
            )


def answer_of(record: dict[str, Any], where: str) -> str:
    """A generated row's right answer, in the tags that its reward asks for."""
    if record["answer"] is None:
        raise UserError(
            f"{where}: data.tasks.{record['task']} has no single right answer to train on; use "
            "other tasks."
        )
    return f"{ANSWER_OPEN}{record['answer']}{ANSWER_CLOSE}"


def completion_messages(content: object, name: str, where: str) -> list[Message]:
    """The assistant's messages that the entry ``name`` of a row holds, or has as text."""
    messages = [{"role": "assistant", "content": content}] if isinstance(content, str) else content
    if (
        not datasets.is_messages(messages)
        or messages[0]["role"] != "assistant"
        or messages[-1]["role"] != "assistant"
    ):
        raise UserError(
            f"{where}: '{name}' must be text, or a list of {{'role', 'content'}} messages that "
            "begins and ends with one of the assistant; what comes before it is the prompt."
        )
    return messages


def _solved(
    records: Iterator[tuple[str, dict[str, Any]]],
) -> Iterator[tuple[str, dict[str, Any]]]:
    for where, record in records:
        yield where, {"prompt": record["prompt"], "completion": answer_of(record, where)}


def _conversation(record: dict[str, Any], system_prompt: str | None, where: str) -> Conversation:
    refuse_unsupported(record, where)
    given = {"messages", "prompt", "completion", "text"} & record.keys()
    if given not in _FORMS:
        found = ", ".join(record) or "nothing"
        raise UserError(
            f"{where}: a row needs 'messages', or 'prompt' and 'completion', or 'text', and only "
            f"one of these forms; it has {found}."
        )
    if "text" in given:
        if not isinstance(record["text"], str) or not record["text"]:
            raise UserError(f"{where}: 'text' must be text of at least one character.")
        return Conversation(where=where, text=record["text"])
    if "prompt" in given:
        prompt = datasets.prompt_messages(record["prompt"], "prompt", system_prompt, where)
        completion = completion_messages(record["completion"], "completion", where)
        return Conversation(
            where=where,
            messages=(*prompt, *completion),
            num_prompt_messages=len(prompt),
        )
    messages = record["messages"]
    if (
        not datasets.is_messages(messages)
        or len(messages) < 2
        or messages[-1]["role"] != "assistant"
    ):
        raise UserError(
            f"{where}: 'messages' must be a list of at least two {{'role', 'content'}} messages "
            "that ends with one of the assistant; take out what comes after it."
        )
    return Conversation(
        where=where, messages=tuple(datasets.with_system_prompt(messages, system_prompt))
    )
