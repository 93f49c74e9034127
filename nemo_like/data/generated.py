"""Rows with answers, made from reasoning_gym's tasks: nothing to download."""

from collections.abc import Iterator, Sequence
from typing import Any

from nemo_like.data.reasoning_gym import ANSWER_CLOSE, ANSWER_OPEN, reward
from nemo_like.errors import UserError

Located = tuple[str, dict[str, Any]]
"""Where a row stands, for messages, and its entries; see ``datasets.records``."""


def solved(records: Iterator[Located]) -> Iterator[Located]:
    """Each question with its right answer as the completion, in the tags its reward asks for.

    Raises UserError for a task without a single right answer.
    """
    for where, record in records:
        yield where, {"prompt": record["prompt"], "completion": _answer(record, where)}


def with_wrong_answers(records: Sequence[Located]) -> Iterator[Located]:
    """Each question with its right answer, chosen, and a wrong one, rejected.

    The wrong one is that of the next row of the same task which the task's verifier does not give
    full marks here. Raises UserError where there is none.
    """
    answers: dict[str, list[str]] = {}
    positions = []
    for where, record in records:
        of_task = answers.setdefault(record["task"], [])
        positions.append(len(of_task))
        of_task.append(_answer(record, where))
    for position, (where, record) in zip(positions, records, strict=True):
        of_task = answers[record["task"]]
        others = (of_task[(position + i) % len(of_task)] for i in range(1, len(of_task)))
        wrong = next((other for other in others if _is_wrong(other, record)), None)
        if wrong is None:
            raise UserError(
                f"{where}: no other row of data.tasks.{record['task']} has an answer that is wrong "
                "here; generate more rows, or use tasks with more distinct answers."
            )
        yield where, {"prompt": record["prompt"], "chosen": of_task[position], "rejected": wrong}


def _answer(record: dict[str, Any], where: str) -> str:
    if record["answer"] is None:
        raise UserError(
            f"{where}: data.tasks.{record['task']} has no single right answer to train on; use "
            "other tasks."
        )
    return f"{ANSWER_OPEN}{record['answer']}{ANSWER_CLOSE}"


def _is_wrong(completion: str, record: dict[str, Any]) -> bool:
    return reward(completion=completion, **record)["accuracy"] < 1
