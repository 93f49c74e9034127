"""Rows in other shapes than ours: how to write them so that they can be read."""

from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

from nemo_like.errors import UserError

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
_REMEDIES = {
    "system": "write it as the first message of the prompt, {'role': 'system', 'content': ...}",
    "chat_template_kwargs": "set data.template_switches, which are those of every row",
}
_QUESTIONS = ("prompt", "question", "problem", "instruction", "query", "input")
_MORE = ("input", "context")
_ANSWERS = ("completion", "output", "response", "solution", "answer")
_WITHOUT_ANSWER = "rows without an answer are for runs that sample, such as run_grpo.py"
_ONE = "take one of them out"
_SHAREGPT = ("from", "value")


class Purpose(Enum):
    """What rows are read for."""

    answers = auto()
    """One answer of each row trains."""
    pairs = auto()
    """The better of two answers is preferred."""
    prompts = auto()
    """Answers are sampled."""


def refuse_unsupported(record: Mapping[str, Any], where: str) -> None:
    """Raise UserError for an entry that would have no effect."""
    for name in UNSUPPORTED:
        if record.get(name):
            remedy = _REMEDIES.get(name, "write what it adds into the messages")
            raise UserError(
                f"{where}: '{name}' is not supported; {remedy}, or take it out of the row."
            )


def refuse_bad_answer(record: Mapping[str, Any], where: str) -> None:
    """Refuse a row for KTO whose answer is marked as a bad one."""
    label = record.get("label")
    # Beside texts a number is a class; elsewhere it may be one, which a new name makes clear.
    bad = ("false",) if "text" in record else ("false", "0", "0.0", "-1", "-1.0")
    if str(label).strip().lower() in bad:
        raise UserError(
            f"{where}: 'label' is {str(label).lower()}, which marks a bad answer (rows for KTO), "
            "and SFT would train on it; keep the rows whose label is true only, or pair both kinds "
            "for run_dpo.py (rename 'label' if it means something else, such as a class)."
        )


def how_to_load(record: Mapping[str, Any], purpose: Purpose) -> str:
    """What to write instead, where the shape is known: the end of a sentence, or ''."""
    remedy = _conversation(record, purpose) or {
        Purpose.answers: _answers,
        Purpose.pairs: _pairs,
        Purpose.prompts: _prompts,
    }[purpose](record)
    return f"; {remedy}" if remedy else ""


def _conversation(record: Mapping[str, Any], purpose: Purpose) -> str:
    """Messages under other names."""
    for name, value in record.items():
        if not (isinstance(value, list) and value and isinstance(value[0], dict)):
            continue
        shared = all(one in value[0] for one in _SHAREGPT)
        if not shared and not (name == "conversation" and "role" in value[0]):
            continue
        steps = [f"rename '{name}' to 'messages'"]
        if shared:
            steps.append("and in each of them 'from' to 'role' (human is user, gpt is assistant)")
            steps.append("and 'value' to 'content'")
        if purpose is Purpose.prompts:
            steps.append("and leave out the assistant's last one")
        if purpose is Purpose.pairs:
            return "one conversation prefers nothing: it is for run_sft.py, as 'messages'"
        return " ".join(steps)
    return ""


def _answers(record: Mapping[str, Any]) -> str:
    if "chosen" in record and "rejected" in record:
        new = "completion" if isinstance(record["chosen"], str) else "messages"
        beside = " (and take 'prompt' out)" if new == "messages" and "prompt" in record else ""
        return (
            "pairs are for run_dpo.py and run_rm.py; to train on the better answers alone, rename "
            f"'chosen' to '{new}'{beside}"
        )
    prompt = _prompt(record)
    answer = next((name for name in _ANSWERS if name in record), None)
    if answer is None:
        return _WITHOUT_ANSWER if prompt or "prompt" in record else ""
    if not prompt and "prompt" not in record:
        return ""
    if "choices" in record:
        last = f"the right choice in words as 'completion' ('{answer}' says which it is)"
        return f"{prompt} and {last}" if prompt else f"write {last}"
    if answer == "completion":
        return prompt
    last = f"'{answer}' to 'completion'"
    if prompt.startswith("rename"):
        return f"{prompt} and {last}"
    return f"{prompt} and rename {last}" if prompt else f"rename {last}"


def _pairs(record: Mapping[str, Any]) -> str:
    if "label" in record and "completion" in record:
        return (
            "'label' marks one answer as good or bad (rows for KTO), which no run trains on; put a "
            "good and a bad answer of the same prompt into one row, as 'chosen' and 'rejected'"
        )
    if "chosen" in record and "rejected" in record:
        return _prompt(record) or (
            "give the texts' common beginning as 'prompt', in messages if it has several turns, "
            "and leave it out of both"
        )
    if "messages" in record or "text" in record or any(name in record for name in _ANSWERS):
        return "one answer prefers nothing: it is for run_sft.py"
    return _WITHOUT_ANSWER if "prompt" in record or _prompt(record) else ""


def _prompts(record: Mapping[str, Any]) -> str:
    if "prompt" in record and "messages" in record:
        return "take 'messages' out, which has the answer" if _ends(record) else _ONE
    if prompt := _prompt(record):
        return f"{prompt}; other entries reach the reward function under their own names"
    if "chosen" in record and "rejected" in record:
        return "pairs are for run_dpo.py and run_rm.py"
    if "text" in record:
        return "texts are for run_sft.py"
    return ""


def _ends(record: Mapping[str, Any]) -> bool:
    """Whether a row's messages end with an answer."""
    messages = record["messages"]
    last = messages[-1] if isinstance(messages, list) and messages else None
    return isinstance(last, dict) and last.get("role") == "assistant"


def _prompt(record: Mapping[str, Any]) -> str:
    """How to make ``prompt`` of what is called otherwise; '' where there is one, or nothing."""
    question = next((name for name in _QUESTIONS if name in record), None)
    if question is None or question == "prompt":
        return ""
    if "choices" in record:
        return f"write '{question}' and 'choices' as one 'prompt'"
    if "system" in record:
        return f"write 'system' and '{question}' as 'prompt', a list of a system and a user message"
    more = next((name for name in _MORE if name in record and name != question), None)
    if more is not None:
        return f"write '{question}' and '{more}' as one 'prompt'"
    return f"rename '{question}' to 'prompt'"
