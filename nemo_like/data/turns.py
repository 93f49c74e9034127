"""The next turn of a conversation whose tokens so far are known."""

import re
from collections.abc import Sequence
from typing import Any

from nemo_like.data.chat import ChatTokenizer
from nemo_like.data.messages import Message
from nemo_like.data.templates import without_space
from nemo_like.errors import UserError


class RewrittenHistoryError(UserError):
    """The template renders earlier turns in another way once others follow."""


def tokens_after(
    chat: ChatTokenizer,
    turn_ids: Sequence[int],
    before: Sequence[Message],
    added: Sequence[Message],
    tools: Sequence[Any] = (),
) -> list[int]:
    """Token ids that follow a sampled turn when messages are ``added``, up to the next answer.

    ``turn_ids`` were sampled for the last message of ``before``; they stay, whatever text they
    make. What the template writes after that turn begins with its end token if the turn was cut
    off. Raises RewrittenHistoryError if it renders ``before`` in another way than before.
    """
    messages = chat.as_taken([*before, *added])
    text = chat.text(messages, to_answer=True, tools=tools)
    so_far = _beginning(chat, text, messages[: len(before)], chat.decode_whole(turn_ids), tools)
    chat.check(messages, text, tools, len(before) - 1)
    end = chat.ends.search(so_far) if chat.ends else None
    mark = end[1] if end else ""
    # Behind the end token, as in the whole text: some tokenizers begin a text with a space.
    ids = chat.cuts.ids(mark + text[len(so_far) :])
    if turn_ids[-1] not in chat.eos_token_ids:
        return ids
    if mark:
        return ids[len(chat.cuts.ids(mark)) :]
    # Some templates end a turn with the mark that begins the next.
    return ids[1:] if ids[:1] == list(turn_ids[-1:]) else ids


def _beginning(
    chat: ChatTokenizer, text: str, before: Sequence[Message], said: str, tools: Sequence[Any]
) -> str:
    """The part of ``text`` that is ``before``, up to the end token of its last turn.

    Some templates write an empty thinking block in the last answer only. History counts as
    unchanged if the answer still appears as it was ``said``. Others drop the thinking of every
    answer.
    """
    so_far = chat.up_to_end(chat.text(before, to_answer=False, tools=tools))
    if text.startswith(so_far) and without_space(before[-1]["content"]) in without_space(so_far):
        return so_far
    prompt = chat.text(before[:-1], to_answer=True, tools=tools)
    end = re.compile("|".join(map(re.escape, chat.end_tokens))).search(text, len(prompt))
    if (
        text.startswith(prompt)
        and end is not None
        and without_space(text[len(prompt) : end.start()]) == without_space(said)
    ):
        return text[: end.end()]
    raise RewrittenHistoryError(
        "the template renders earlier turns in another way once others follow (it may strip "
        "<think> blocks)."
    )
