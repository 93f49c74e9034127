"""Rows of supervised fine-tuning: conversations and texts, and which of their tokens train."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.config.data import ConversationsConfig, TrainOn
from nemo_like.config.sources import Part
from nemo_like.data import datasets
from nemo_like.data.chat import ChatTokenizer
from nemo_like.data.messages import (
    Message,
    cleaned,
    dialogue,
    fault,
    is_messages,
    opens_with,
    prompt_key,
    prompt_messages,
    refuse_empty,
    refuse_repr,
    refuse_unsupported,
    system_of,
    tools_of,
    with_system_prompt,
    without_nulls,
)
from nemo_like.data.refusals import refuse_message_weights, refuse_row_weight
from nemo_like.data.shapes import (
    Purpose,
    how_to_load,
    refuse_bad_answer,
    with_our_names,
)
from nemo_like.data.token_rows import (
    LengthFilter,
    Limit,
    TokenRow,
    collate,
    load_both,
)
from nemo_like.errors import UserError

_REMEDY = (
    "write what comes before the messages that train as 'prompt' and these as 'completion' (and "
    "leave out what follows them)"
)
_FORMS = ({"messages"}, {"prompt", "completion"}, {"text"})


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """One row: messages that end with the assistant's, or plain text."""

    where: str
    """Key, file and line, for messages."""
    messages: tuple[Message, ...] = ()
    num_prompt_messages: int = 0
    """Messages at the beginning that never train; 0: every turn of the assistant may."""
    tools: Sequence[Any] = ()
    """What the assistant may call, for the template."""
    text: str | None = None

    @property
    def prompt_key(self) -> str:
        """See ``HasPrompt``: what stands before the completion, or before the last answer."""
        if self.text is not None:
            return self.text
        return prompt_key(self.messages[: self.num_prompt_messages or -1])


def read(config: ConversationsConfig, part: Part, num_rows: int, seed: int) -> list[Conversation]:
    """Rows of one part; UserError as in ``load_both``."""
    records = datasets.records(part, config.tasks, num_rows, seed)
    if part.generates:
        from nemo_like.data.reasoning_gym import solved

        records = solved(records)
    return [_conversation(record, config.system_prompt, where) for where, record in records]


def tokenize(
    config: ConversationsConfig,
    rows: Sequence[Conversation],
    chat: ChatTokenizer,
    limit: Limit,
    key: str,
) -> TensorBatch:
    """The rows that fit ``limit``, as ``collate`` makes them; those left out are in the log."""
    train_on = config.train_on
    lengths = LengthFilter(limit=limit)
    kept: list[TokenRow] = []
    everything = train_on == "all"
    remedy = "set data.train_on=assistant" if everything else _REMEDY
    for row in rows:
        refuse_message_weights(row.messages, trained(row, train_on), remedy, row.where)
        kept += lengths.fit([encode(row, chat, train_on)], row.where)
    lengths.report(key, len(rows), "rows")
    return collate(kept)


load = partial(load_both, read, tokenize, rows_per_unit=1)


def trained(row: Conversation, train_on: TrainOn) -> list[bool]:
    """Which messages train."""
    if train_on == "all":
        return [True] * len(row.messages)
    is_last = train_on == "last_assistant"
    first = len(row.messages) - 1 if is_last else row.num_prompt_messages
    return [i >= first and one["role"] == "assistant" for i, one in enumerate(row.messages)]


def encode(row: Conversation, chat: ChatTokenizer, train_on: TrainOn) -> TokenRow:
    """Token ids of a row up to the last that trains: what comes after it has no effect.

    Raises UserError naming the row.
    """
    try:
        _refuse_lost_tools(chat, row.tools)
        if row.text is not None:
            ids = chat.encode_text(row.text)
            mask = [True] * len(ids)
        elif train_on == "all":
            ids, mask = chat.render_conversation(row.messages, len(row.messages), row.tools)
            mask = [True] * len(ids)
        else:
            only_last = train_on == "last_assistant"
            first = len(row.messages) - 1 if only_last else row.num_prompt_messages
            ids, mask = chat.render_conversation(row.messages, first, row.tools)
    except UserError as error:
        raise UserError(f"{row.where}: {error}") from error
    end = len(mask) - mask[::-1].index(True) if any(mask) else len(mask)
    return TokenRow(ids=torch.tensor(ids[:end]), mask=torch.tensor(mask[:end]))


def _refuse_lost_tools(chat: ChatTokenizer, tools: Sequence[Any]) -> None:
    """Raise UserError if the template takes no ``tools``, and there are some."""
    if not tools:
        return
    probe = [{"role": "user", "content": "x"}]
    if chat.text(probe, to_answer=True, tools=tools) == chat.text(probe, to_answer=True):
        raise UserError("the model's chat template takes no tools; describe them in a message.")


def completion_messages(content: object, name: str, where: str) -> list[Message]:
    """The assistant's messages that the entry ``name`` of a row holds, or has as text."""
    content = dialogue(content)
    refuse_repr(content, name, where)
    messages = [{"role": "assistant", "content": content}] if isinstance(content, str) else content
    messages = cleaned(messages)
    if not is_messages(messages) or any(messages[i]["role"] != "assistant" for i in (0, -1)):
        raise UserError(
            f"{where}: '{name}' must be text, or a list of {{'role', 'content'}} messages that "
            "begins and ends with one of the assistant; what comes before it is the prompt"
            f"{fault(messages)}."
        )
    refuse_empty(messages, name, where)
    return messages


def form_of(
    record: dict[str, Any],
    forms: Sequence[set[str]],
    description: str,
    purpose: Purpose,
    where: str,
) -> set[str]:
    """The one of ``forms`` whose entries a row has; UserError if it has those of none, or more."""
    given = set().union(*forms) & record.keys()
    if given not in forms:
        found = ", ".join(record) or "nothing"
        raise UserError(
            f"{where}: a row needs {description}, and only one of these forms; it has {found}"
            f"{how_to_load(record, purpose)}."
        )
    refuse_unsupported(record, where)
    refuse_row_weight(record, where)
    return given


def _conversation(record: dict[str, Any], system_prompt: str | None, where: str) -> Conversation:
    record = with_our_names(without_nulls(record))
    if "completion" not in record and _is_id_of(record.get("prompt"), record.get("messages")):
        del record["prompt"]
    description = "'messages', or 'prompt' and 'completion', or 'text'"
    given = form_of(record, _FORMS, description, Purpose.answers, where)
    refuse_bad_answer(record, where)
    tools, system = tools_of(record, where), system_of(record, system_prompt, where)
    if "text" in given:
        if not isinstance(record["text"], str) or not record["text"].strip():
            raise UserError(f"{where}: 'text' must be text of at least one character.")
        return Conversation(where=where, text=record["text"])
    if "prompt" in given:
        prompt = prompt_messages(record["prompt"], "prompt", system, where)
        completion = completion_messages(record["completion"], "completion", where)
        return Conversation(
            where=where,
            messages=(*prompt, *completion),
            num_prompt_messages=len(prompt),
            tools=tools,
        )
    messages = cleaned(record["messages"])
    if not is_messages(messages) or len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise UserError(
            f"{where}: 'messages' must be a list of at least two {{'role', 'content'}} messages "
            "that ends with one of the assistant; take out what comes after it"
            f"{fault(messages)}."
        )
    refuse_empty(messages, "messages", where)
    messages = with_system_prompt(messages, system)
    return Conversation(where=where, messages=tuple(messages), tools=tools)


def _is_id_of(prompt: object, messages: object) -> bool:
    """Whether the text ``prompt`` only repeats what the user says first in ``messages``."""
    messages = cleaned(messages)
    return isinstance(prompt, str) and is_messages(messages) and opens_with(messages, prompt)
