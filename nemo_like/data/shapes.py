"""Rows in other shapes than ours: how to have them read."""

from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

from nemo_like.config.data import FORMS
from nemo_like.data.messages import dialogue
from nemo_like.errors import UserError

_QUESTIONS = ("prompt", "question", "problem", "instruction", "query", "input")
_MORE = ("input", "context")
_ANSWERS = ("completion", "output", "response", "solution", "answer")
_WITHOUT_ANSWER = "rows without an answer are for runs that sample, such as nemo-like grpo"
_CONVERSATIONS = ("conversations", "conversation")


class Purpose(Enum):
    """What rows are read for."""

    answers = auto()
    """One answer of each row trains."""
    pairs = auto()
    """The better of two answers is preferred."""
    prompts = auto()
    """Answers are sampled."""


def refuse_bad_answer(record: Mapping[str, Any], where: str) -> None:
    """Refuse a row for KTO whose answer is marked as a bad one."""
    label = record.get("label")
    # Beside texts a number is a class; elsewhere it may be one, which a new name makes clear.
    bad = ("false",) if "text" in record else ("false", "0", "0.0", "-1", "-1.0")
    if str(label).strip().lower() in bad:
        raise UserError(
            f"{where}: 'label' is {str(label).lower()}, which marks a bad answer (rows for KTO), "
            "and SFT would train on it; keep the rows whose label is true only, or pair both kinds "
            "for nemo-like dpo (rename 'label' if it means something else, such as a class)."
        )


def with_our_names(record: dict[str, Any]) -> dict[str, Any]:
    """A row whose only text is a list of messages under one of their usual other names."""
    for name in _CONVERSATIONS:
        if isinstance(record.get(name), list) and not any(one in record for one in FORMS):
            return {"messages" if key == name else key: one for key, one in record.items()}
    return record


def how_to_load(record: Mapping[str, Any], purpose: Purpose) -> str:
    """What to set or write instead, where the shape is known: the end of a sentence, or ''."""
    known = {Purpose.answers: _answers, Purpose.pairs: _pairs, Purpose.prompts: _prompts}
    remedy = known[purpose](record)
    return f"; {remedy}" if remedy else ""


def _answers(record: Mapping[str, Any]) -> str:
    if "chosen" in record and "rejected" in record:
        is_text = isinstance(dialogue(record["chosen"]), str)
        new = {"prompt": _prompt(record), "completion": "chosen"} if is_text else {}
        return (
            "pairs are for nemo-like dpo and nemo-like rm; to train on the better answers alone, "
            + _columns(**(new or {"messages": "chosen"}))
        )
    prompt = _prompt(record)
    answer = next((name for name in _ANSWERS if name in record), None)
    if answer is None:
        return _WITHOUT_ANSWER if prompt or "prompt" in record else ""
    if not prompt and "prompt" not in record:
        return ""
    if "choices" in record:
        return (
            f"write {prompt or 'prompt'} and choices as one 'prompt' and the right choice in words "
            f"as 'completion' ('{answer}' says which it is)"
        )
    return _columns(prompt=prompt, completion="" if answer == "completion" else answer)


def _pairs(record: Mapping[str, Any]) -> str:
    if "label" in record and "completion" in record:
        return (
            "'label' marks one answer as good or bad (rows for KTO), which no run trains on; put a "
            "good and a bad answer of the same prompt into one row, as 'chosen' and 'rejected'"
        )
    if "chosen" in record and "rejected" in record:
        return _columns(prompt=_prompt(record)) or (
            "give the texts' common beginning as 'prompt', in messages if it has several turns, "
            "and leave it out of both"
        )
    others = ("messages", "text", *_CONVERSATIONS, *_ANSWERS)
    if any(name in record for name in others):
        return "one answer prefers nothing: it is for nemo-like sft"
    return _WITHOUT_ANSWER if "prompt" in record or _prompt(record) else ""


def _prompts(record: Mapping[str, Any]) -> str:
    if "prompt" in record and "messages" in record:
        return "set data.columns.prompt to the one to use, prompt or messages"
    if "choices" in record and (prompt := _prompt(record)):
        return f"write {prompt} and choices as one 'prompt'"
    if columns := _columns(prompt=_prompt(record)):
        return f"{columns}; other entries reach the reward function under their own names"
    for name in _CONVERSATIONS:
        if name in record:
            return (
                f"set data.columns.prompt to what is asked, such as {name}.0.value, or to messages "
                "that end with it"
            )
    if "chosen" in record and "rejected" in record:
        is_list = isinstance(record["chosen"], list)
        question = "; to sample, set data.columns.prompt=chosen.0.content" if is_list else ""
        return f"pairs are for nemo-like dpo and nemo-like rm{question}"
    if "text" in record:
        return "texts are for nemo-like sft"
    return ""


def _prompt(record: Mapping[str, Any]) -> str:
    """The columns of which ``prompt`` can be made; '' where there is one, or nothing."""
    question = next((name for name in _QUESTIONS if name in record), None)
    if question is None or question == "prompt":
        return ""
    more = next((name for name in _MORE if name in record and name != question), None)
    return question if more is None else f"[{question}, {more}]"


def _columns(**columns: str) -> str:
    """The key to set, of those of ours that have a column."""
    named = {name: column for name, column in columns.items() if column}
    inside = ", ".join(f"{name}: {column}" for name, column in named.items())
    return f"set data.columns='{{{inside}}}'" if named else ""
