"""Pairs of a chosen and a rejected completion of one prompt, as token ids."""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch

from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.config.data_schema import IdenticalPairs, PreferenceDataConfig, TrainOn
from nemo_like.data import conversations, datasets
from nemo_like.data.chat import ChatTokenizer, Message
from nemo_like.data.conversations import Conversation, Limit, TokenRow
from nemo_like.environments import reasoning_gym_reward
from nemo_like.errors import UserError

logger = logging.getLogger(__name__)

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


def load(
    config: PreferenceDataConfig,
    chat: ChatTokenizer,
    *,
    micro_batch_tokens: int,
    context: int,
    seed: int,
    with_validation: bool,
) -> tuple[TensorBatch, TensorBatch | None]:
    """All training pairs and, if asked for and there are any, all validation pairs.

    Row 2i is the chosen completion of pair i, row 2i + 1 the rejected one; columns are those of
    ``conversations.collate``. A micro-batch holds both rows of a pair, so each has half of
    ``micro_batch_tokens`` at most. Raises UserError, with key, file and line, for files and rows
    that break a rule.
    """
    limit = conversations.length_limit(
        config, context=context, micro_batch_tokens=micro_batch_tokens, rows_per_unit=2
    )
    train = read(config.train, config, config.num_train_rows, seed, "data.train")
    held_out = None
    source = conversations.validation_source(config) if with_validation else None
    if source is not None:
        offset_seed = seed + datasets.VALIDATION_SEED_OFFSET
        rows = read(source, config, config.num_validation_rows, offset_seed, "data.validation")
        train = datasets.without_overlap(train, rows)
        held_out = tokenize(rows, chat, config.identical, limit, "data.validation")
    return tokenize(train, chat, config.identical, limit, "data.train"), held_out


def read(
    source: str, config: PreferenceDataConfig, num_rows: int, seed: int, key: str
) -> list[Pair]:
    """Pairs of ``reasoning_gym`` or of a .jsonl file; UserError as in ``load``."""
    records = datasets.records(source, config.tasks, num_rows, seed, key)
    if source == datasets.REASONING_GYM:
        records = _answered(list(records))
    return [_pair(record, config.system_prompt, where) for where, record in records]


def tokenize(
    pairs: Sequence[Pair], chat: ChatTokenizer, identical: IdenticalPairs, limit: Limit, key: str
) -> TensorBatch:
    """Both rows of the pairs that fit ``limit``; pairs left out are in the log."""
    dropped: Counter[str] = Counter()
    kept: list[TokenRow] = []
    for pair in pairs:
        if pair.chosen.messages == pair.rejected.messages:
            if identical is IdenticalPairs.refuse:
                raise UserError(
                    f"{pair.chosen.where}: both completions are the same, so that none is "
                    "preferred; take the row out, or set data.identical=drop."
                )
            dropped["their completions are the same"] += 1
            continue
        kept += _fit(pair, chat, limit, dropped)
    conversations.report_dropped(key, dropped, len(pairs), "pairs")
    return conversations.collate(kept)


def _fit(pair: Pair, chat: ChatTokenizer, limit: Limit, dropped: Counter[str]) -> list[TokenRow]:
    """Both rows of a pair, or none."""
    of_pair: Counter[str] = Counter()
    rows = [
        limit.fit(conversations.encode(one, chat, TrainOn.assistant), one.where, of_pair)
        for one in (pair.chosen, pair.rejected)
    ]
    fitting = [row for row in rows if row is not None]
    if len(fitting) < 2:
        dropped[next(iter(of_pair))] += 1
        return []
    if torch.equal(fitting[0].ids, fitting[1].ids):
        dropped["their completions have the same tokens"] += 1
        return []
    return fitting


def _pair(record: dict[str, Any], system_prompt: str | None, where: str) -> Pair:
    conversations.refuse_unsupported(record, where)
    given = {"prompt", "chosen", "rejected", "completions", "ranks"} & record.keys()
    if given not in _FORMS:
        found = ", ".join(record) or "nothing"
        raise UserError(
            f"{where}: a row needs 'prompt', 'chosen' and 'rejected'; or 'chosen' and 'rejected' "
            f"as messages; or 'prompt', 'completions' and 'ranks'; it has {found}."
        )
    if "prompt" not in given:
        prompt, chosen, rejected = _split_prompt(record["chosen"], record["rejected"], where)
    else:
        prompt = record["prompt"]
        ranked = "ranks" in given
        chosen, rejected = (
            _by_rank(record["completions"], record["ranks"], where)
            if ranked
            else (record["chosen"], record["rejected"])
        )
    messages = datasets.prompt_messages(prompt, "prompt", system_prompt, where)
    return Pair(
        chosen=_with_completion(messages, chosen, "chosen", where),
        rejected=_with_completion(messages, rejected, "rejected", where),
    )


def _with_completion(
    prompt: list[Message], completion: object, name: str, where: str
) -> Conversation:
    messages = conversations.completion_messages(completion, name, where)
    return Conversation(where=where, messages=(*prompt, *messages), num_prompt_messages=len(prompt))


def _split_prompt(
    chosen: object, rejected: object, where: str
) -> tuple[list[Message], list[Message], list[Message]]:
    """The messages that both begin with, at least one short of either, and what follows them."""
    if not (datasets.is_messages(chosen) and datasets.is_messages(rejected)):
        raise UserError(
            f"{where}: without 'prompt', 'chosen' and 'rejected' must be lists of {{'role', "
            "'content'}} messages; give 'prompt' beside texts."
        )
    both = zip(chosen[:-1], rejected[:-1], strict=False)
    num_common = sum(1 for _ in takewhile(lambda two: two[0] == two[1], both))
    if num_common == 0:
        raise UserError(
            f"{where}: 'chosen' and 'rejected' have no message in common at their beginning that "
            "could be the prompt; give 'prompt'."
        )
    return chosen[:num_common], chosen[num_common:], rejected[num_common:]


def _by_rank(completions: object, ranks: object, where: str) -> tuple[object, object]:
    """The completion of lower rank, and the other."""
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
    first, second = completions
    return (first, second) if ranks[0] < ranks[1] else (second, first)


def _answered(
    records: Sequence[tuple[str, dict[str, Any]]],
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each generated row's right answer and, of its task's, the next that is wrong for it."""
    answers: dict[str, list[str]] = {}
    place = []
    for where, record in records:
        of_task = answers.setdefault(record["task"], [])
        place.append(len(of_task))
        of_task.append(conversations.answer_of(record, where))
    for at, (where, record) in zip(place, records, strict=True):
        of_task = answers[record["task"]]
        others = of_task[at + 1 :] + of_task[:at]
        wrong = next((one for one in others if _is_wrong(one, record)), None)
        if wrong is None:
            raise UserError(
                f"{where}: no other row of data.tasks.{record['task']} has an answer that is wrong "
                "here; generate more rows, or use tasks with more distinct answers."
            )
        yield where, {"prompt": record["prompt"], "chosen": of_task[at], "rejected": wrong}


def _is_wrong(completion: str, record: dict[str, Any]) -> bool:
    return reasoning_gym_reward.reward(completion=completion, **record)["accuracy"] < 1
