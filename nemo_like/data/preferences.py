"""Pairs of a chosen and a rejected completion of one prompt, as token ids."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any, TypeGuard

from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.config.data import PairsConfig
from nemo_like.config.sources import Part
from nemo_like.data import conversations, datasets
from nemo_like.data.chat import ChatTokenizer
from nemo_like.data.conversations import Conversation
from nemo_like.data.messages import (
    Message,
    cleaned,
    fault,
    is_messages,
    opens_with,
    prompt_messages,
    system_of,
    tools_of,
    without_nulls,
)
from nemo_like.data.refusals import refuse_contrary_scores, refuse_message_weights
from nemo_like.data.shapes import Purpose, how_to_load
from nemo_like.data.token_rows import (
    LengthFilter,
    Limit,
    TokenRow,
    collate,
    load_both,
)
from nemo_like.errors import UserError

_FORMS = (
    {"prompt", "chosen", "rejected"},
    {"chosen", "rejected"},
    {"prompt", "completions", "ranks"},
)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two conversations with one beginning, of which the first is preferred."""

    chosen: Conversation
    rejected: Conversation

    @property
    def prompt_key(self) -> str:
        """See ``HasPrompt``."""
        return self.chosen.prompt_key


def read(config: PairsConfig, part: Part, num_rows: int, seed: int) -> list[Pair]:
    """Pairs of one part; UserError as in ``load_both``."""
    records = datasets.records(part, config.tasks, num_rows, seed)
    if part.generates:
        from nemo_like.data.reasoning_gym import with_wrong_answers

        records = with_wrong_answers(list(records))
    return [_pair(record, config.system_prompt, where) for where, record in records]


def tokenize(
    config: PairsConfig, pairs: Sequence[Pair], chat: ChatTokenizer, limit: Limit, key: str
) -> TensorBatch:
    """Both rows of the pairs that fit ``limit``; pairs left out are in the log.

    Row 2i is the chosen completion of pair i, row 2i + 1 the rejected one.
    """
    lengths = LengthFilter(limit=limit)
    kept: list[TokenRow] = []
    for pair in pairs:
        where = pair.chosen.where
        if pair.chosen.messages != pair.rejected.messages:
            both = (pair.chosen, pair.rejected)
            for one in both:
                trains = conversations.trained(one, "assistant")
                refuse_message_weights(one.messages, trains, "take the row out", where)
            unit = [conversations.encode(one, chat, "assistant") for one in both]
            kept += lengths.fit(unit, where)
        else:
            lengths.dropped["of two completions that are the same"] += 1
    lengths.report(key, len(pairs), "pairs")
    return collate(kept)


load = partial(load_both, read, tokenize, rows_per_unit=2)


def _pair(record: dict[str, Any], system_prompt: str | None, where: str) -> Pair:
    description = (
        "'prompt', 'chosen' and 'rejected'; or 'chosen' and 'rejected' as messages; or 'prompt', "
        "'completions' and 'ranks'"
    )
    record = without_nulls(record)
    given = conversations.form_of(record, _FORMS, description, Purpose.pairs, where)
    names, first = ("chosen", "rejected"), None
    if "ranks" in given:
        first = _first_by_rank(record["completions"], record["ranks"], where)
        names = (f"completions[{first}]", f"completions[{1 - first}]")
        chosen, rejected = (cleaned(record["completions"][i]) for i in (first, 1 - first))
    else:
        chosen, rejected = cleaned(record["chosen"]), cleaned(record["rejected"])
    prompt = cleaned(record.get("prompt"))
    if "prompt" not in given:
        if isinstance(chosen, str) or isinstance(rejected, str):
            raise UserError(
                f"{where}: without 'prompt', 'chosen' and 'rejected' must be lists of {{'role', "
                f"'content'}} messages, and not text{how_to_load(record, Purpose.pairs)}."
            )
        prompt, chosen, rejected = _split_prompt(chosen, rejected, names, where)
    elif _is_whole(chosen) and _is_whole(rejected):
        prompt, chosen, rejected = _without_prompt(prompt, chosen, rejected, names, where)
    refuse_contrary_scores(record, first, where)
    system, tools = system_of(record, system_prompt, where), tools_of(record, where)
    messages = prompt_messages(prompt, "prompt", system, where)
    both = (
        Conversation(
            where=where,
            messages=(*messages, *conversations.completion_messages(completion, name, where)),
            num_prompt_messages=len(messages),
            tools=tools,
        )
        for completion, name in zip((chosen, rejected), names, strict=True)
    )
    return Pair(chosen=next(both), rejected=next(both))


def _is_whole(completion: object) -> TypeGuard[list[Message]]:
    """Whether a completion is a conversation that begins with what is answered."""
    return is_messages(completion) and completion[0]["role"] != "assistant"


def _without_prompt(
    prompt: object,
    chosen: list[Message],
    rejected: list[Message],
    names: tuple[str, str],
    where: str,
) -> tuple[list[Message], list[Message], list[Message]]:
    """Prompt and completions of whole conversations whose prompt is given beside them.

    A text is what the user says first in both, which have the whole prompt. Messages are it.
    """
    if not (opens_with(chosen, prompt) and opens_with(rejected, prompt)):
        without = "take 'prompt' out (the prompt is then what both begin with), or correct it"
        raise UserError(
            f"{where}: '{names[0]}' and '{names[1]}' are whole conversations, and 'prompt' is "
            "neither what the user says first in both nor the messages that both begin with; "
            f"{without if names[0] == 'chosen' else 'correct it'}."
        )
    if isinstance(prompt, str):
        return _split_prompt(chosen, rejected, names, where)
    assert isinstance(prompt, list)
    return prompt, chosen[len(prompt) :], rejected[len(prompt) :]


def _split_prompt(
    chosen: object, rejected: object, names: tuple[str, str], where: str
) -> tuple[list[Message], list[Message], list[Message]]:
    """The messages that both begin with, at least one short of either, and what follows them."""
    if not (is_messages(chosen) and is_messages(rejected)):
        raise UserError(
            f"{where}: without 'prompt', '{names[0]}' and '{names[1]}' must be lists of {{'role', "
            f"'content'}} messages{fault(chosen) or fault(rejected)}."
        )
    both = zip(chosen[:-1], rejected[:-1], strict=False)
    num_common = sum(1 for _ in takewhile(lambda two: two[0] == two[1], both))
    while num_common and chosen[num_common - 1]["role"] == "assistant":
        num_common -= 1  # a prompt ends with the message to answer
    if num_common == 0:
        raise UserError(
            f"{where}: '{names[0]}' and '{names[1]}' have no message in common at their beginning "
            "that could be the prompt; give 'prompt'."
        )
    return chosen[:num_common], chosen[num_common:], rejected[num_common:]


def _first_by_rank(completions: object, ranks: object, where: str) -> int:
    """Index of the completion of lower rank."""
    if not (isinstance(completions, list) and len(completions) == 2):
        count = f"{len(completions)} in it" if isinstance(completions, list) else "something else"
        raise UserError(
            f"{where}: 'completions' must be a list of two, of which one is preferred; there is "
            f"{count}; make a row of each pair."
        )
    if not (
        isinstance(ranks, list)
        and len(ranks) == 2
        and all(type(rank) in (int, float) for rank in ranks)
        and ranks[0] != ranks[1]
    ):
        raise UserError(
            f"{where}: 'ranks' must be two different numbers, one for each completion (the lower "
            f"is chosen), and is {ranks}; take the row out if none is preferred."
        )
    return 0 if ranks[0] < ranks[1] else 1
