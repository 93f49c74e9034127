"""Procedural tasks of the reasoning_gym package: their rows, and their own verifiers as the reward.

reasoning_gym works with tuples and dictionaries whose keys are numbers, which JSON does not have;
``pack`` and ``unpack`` carry them through it, so that every verifier sees what its task made.
"""

import difflib
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields as dataclass_fields
from typing import Any

import reasoning_gym
from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.factory import DATASETS

from nemo_like.data.thinking import after_thinking
from nemo_like.errors import UserError

ANSWER_OPEN, ANSWER_CLOSE = "<answer>", "</answer>"
TUPLE_TAG, PAIRS_TAG = "__tuple__", "__pairs__"
OURS = ("seed", "size")
"""Parameters of every task that follow from the run's seed and its number of rows."""
Located = tuple[str, dict[str, Any]]
"""Where a row stands, for messages, and its entries; see ``datasets.records``."""


def reward(
    prompt: str,
    completion: str,
    task: str,
    answer: str | None,
    metadata: Mapping[str, Any],
    parameters: Mapping[str, Any] | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """Score the completion's last ``<answer>…</answer>`` with the verifier of ``task``.

    The score may be partial credit, as the task defines it; ``accuracy`` counts full marks only.
    Without an answer both are 0: some verifiers pay a little for any text at all. ``answered`` says
    whether there was one.
    """
    given = extract_answer(completion)
    if given is None:
        return {"reward": 0.0, "accuracy": 0.0, "answered": 0.0, "answer": None}
    verifier = _verifier(task, json.dumps(parameters or {}, sort_keys=True))
    entry = {"question": prompt, "answer": answer, "metadata": unpack(metadata)}
    score = float(verifier.score_answer(given, entry))
    full = float(score >= 1)
    return {"reward": score, "accuracy": full, "answered": 1.0, "answer": given}


def extract_answer(completion: str) -> str | None:
    """Text of the last answer tag; None if there is none, or the last one was not closed.

    >>> extract_answer("<answer>3</answer> no: <answer> 4 </answer>")
    '4'
    """
    visible = after_thinking(completion)
    if visible is None:
        return None
    _, opened, rest = visible.rpartition(ANSWER_OPEN)
    text, closed, _ = rest.partition(ANSWER_CLOSE)
    return text.strip() if opened and closed else None


def rows(
    tasks: Mapping[str, Mapping[str, Any] | None], num_rows: int, seed: int
) -> Iterator[dict[str, Any]]:
    """Yield ``num_rows`` rows that JSON can hold, drawn from the tasks in turn, as they are needed.

    A row has ``prompt`` (the task's question), ``task``, ``answer`` (None where a task has many
    right ones), ``metadata`` and ``parameters``. UserError names an unknown task or parameter.
    """
    if not tasks:
        raise UserError("data.tasks is empty; name at least one reasoning_gym task.")
    size = -(-num_rows // len(tasks))
    datasets = {
        task: _dataset(task, dict(parameters or {}), _stream(seed, task), max(1, size))
        for task, parameters in tasks.items()
    }
    return _in_turn(datasets, tasks, num_rows)


def solved(records: Iterator[Located]) -> Iterator[Located]:
    """Each question with its right answer as the completion, in the tags its reward asks for.

    Raises UserError for a task without a single right answer.
    """
    for where, record in records:
        yield where, {"prompt": record["prompt"], "completion": _tagged(record, where)}


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
        of_task.append(_tagged(record, where))
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


def pack(value: Any) -> Any:
    """Replace what JSON cannot hold by tagged lists; undone by ``unpack``.

    >>> pack({"board": (1, 2)})
    {'board': {'__tuple__': [1, 2]}}
    """
    if isinstance(value, tuple):
        return {TUPLE_TAG: [pack(item) for item in value]}
    if isinstance(value, list):
        return [pack(item) for item in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {str(key): pack(item) for key, item in value.items()}
        return {PAIRS_TAG: [[pack(key), pack(item)] for key, item in value.items()]}
    if value is None or type(value) in (bool, int, float, str):
        return value
    return value.tolist() if hasattr(value, "tolist") else str(value)  # NumPy's; fractions, dates


def unpack(value: Any) -> Any:
    """Undo ``pack``."""
    if isinstance(value, list):
        return [unpack(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    if TUPLE_TAG in value:
        return tuple(unpack(item) for item in value[TUPLE_TAG])
    if PAIRS_TAG in value:
        return {unpack(key): unpack(item) for key, item in value[PAIRS_TAG]}
    return {key: unpack(item) for key, item in value.items()}


def _in_turn(
    datasets: Mapping[str, ProceduralDataset],
    tasks: Mapping[str, Mapping[str, Any] | None],
    num_rows: int,
) -> Iterator[dict[str, Any]]:
    names = list(datasets)
    for index in range(num_rows):
        turn, position = divmod(index, len(names))
        task = names[position]
        entry = datasets[task][turn]
        yield {
            "prompt": entry["question"],
            "task": task,
            "answer": entry["answer"],
            "metadata": pack(entry["metadata"]),
            "parameters": dict(tasks[task] or {}),
        }


def _stream(seed: int, task: str) -> int:
    """A seed far from those of other runs: entry i of a task is made from its seed plus i, so
    that neighbouring seeds share almost all entries."""
    digest = hashlib.sha256(f"{seed}/{task}".encode()).digest()
    return int.from_bytes(digest[:4]) // 2  # NumPy's generators take 32 bits, the index included


def _dataset(task: str, parameters: dict[str, Any], seed: int, size: int) -> ProceduralDataset:
    if task not in DATASETS:
        raise UserError(f"data.tasks.{task} is no reasoning_gym task{_nearest(task, DATASETS)}")
    known = [field.name for field in dataclass_fields(DATASETS[task][1])]
    for name in parameters:
        key = f"data.tasks.{task}.{name}"
        if name in OURS:
            raise UserError(f"{key} cannot be set; run.seed and data.num_train_rows decide it.")
        if name not in known:
            valid = [field for field in known if field not in OURS]
            raise UserError(f"{key} is no parameter of the task{_nearest(name, valid)}")
    try:
        return reasoning_gym.create_dataset(task, **parameters, seed=seed, size=size)
    except (AssertionError, ValueError, TypeError) as error:
        reason = f"{error}" or type(error).__name__
        raise UserError(f"data.tasks.{task} refuses {parameters}: {reason}.") from error


def _nearest(name: str, valid: Mapping[str, Any] | list[str]) -> str:
    near = difflib.get_close_matches(name, valid, n=1, cutoff=0.0)
    return f"; did you mean {near[0]}?" if near else "; it has none."


@functools.lru_cache(maxsize=256)
def _verifier(task: str, parameters: str) -> ProceduralDataset:
    return _dataset(task, json.loads(parameters), seed=0, size=1)


def _tagged(record: dict[str, Any], where: str) -> str:
    if record["answer"] is None:
        raise UserError(
            f"{where}: data.tasks.{record['task']} has no single right answer to train on; use "
            "other tasks."
        )
    return f"{ANSWER_OPEN}{record['answer']}{ANSWER_CLOSE}"


def _is_wrong(completion: str, record: dict[str, Any]) -> bool:
    return reward(completion=completion, **record)["accuracy"] < 1
