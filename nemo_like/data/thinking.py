"""Thinking aloud: what of a completion is its answer, and empty blocks that templates write.

A template may write an empty block where a row has no thinking. A model that thinks would not write
it, and one that is told not to finds it in its prompt: it is no part of an answer.
"""

import re
from collections.abc import Sequence
from typing import Protocol

from nemo_like.data.messages import Message
from nemo_like.errors import UserError

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Entries that some templates write before a message's content."""

EMPTY = re.compile(
    r"""\s*+(?:
        (?P<open>[^\w\s]{1,3})(?P<name>[\w ]+)(?P<close>[^\w\s]{1,3}?)\s*
        (?P=open)/\s*(?P=name)(?P=close)       # <think></think>, [THINK][/THINK]
      | (?P<left>[^\w\s]{1,3})(?:begin|start)(?P<what>[_ ]\w+)(?P<right>[^\w\s]{1,3}?)\s*
        (?P=left)end(?P=what)(?P=right)        # <|begin_of_thought|><|end_of_thought|>
    )""",
    re.VERBOSE | re.IGNORECASE,
)
# As DeepSeek and Qwen, Mistral and Kimi write them, and as prompts ask for them.
OPENED = re.compile(r"<(?i:think(?:ing)?|reasoning)\s*>|\[THINK\]|◁think▷")
CLOSED = re.compile(r"</(?i:think(?:ing)?|reasoning)\s*>|\[/THINK\]|◁/think▷")
_ANSWER = "the answer"
_THOUGHT = "a thought"


def after_thinking(completion: str) -> str | None:
    """Text after the last ``</think>``, or None if a ``<think>`` block was never closed.

    A chat template may open the block inside the prompt, so a closing tag alone is fine.

    >>> after_thinking("<think>2+2?</think>4")
    '4'
    """
    visible = CLOSED.split(completion)[-1]
    return None if OPENED.search(visible) else visible


class Render(Protocol):
    """A template: the text of messages, up to where the assistant answers if ``to_answer``."""

    def __call__(self, messages: Sequence[Message], *, to_answer: bool) -> str: ...


def template_block(render: Render) -> str:
    """What the template writes between its header and an answer without thinking; '' if nothing.

    It must be an empty block: an opening and its closing, or what is left of the text around a
    thought when the thought is taken out. (Other templates write a channel's name there, which the
    model writes itself when it samples.)
    """
    question: Message = {"role": "user", "content": "a question"}
    answer: Message = {"role": "assistant", "content": _ANSWER}
    try:
        asked = render([question], to_answer=True)
        block = _before_answer(render([question, answer], to_answer=False), asked)
    except UserError:
        return ""  # each row will say why
    if not block.strip() or _is_empty(block):
        return block if block.strip() else ""
    for name in REASONING:
        try:
            whole = render([question, {**answer, name: _THOUGHT}], to_answer=False)
        except UserError:
            continue
        around = _before_answer(whole, asked)
        if _THOUGHT in around and _same(around.replace(_THOUGHT, ""), block):
            return block
    return ""


def _before_answer(whole: str, asked: str) -> str:
    if not whole.startswith(asked):
        return ""
    before, answer, _ = whole[len(asked) :].partition(_ANSWER)
    return before if answer else ""


def _is_empty(block: str) -> bool:
    found = EMPTY.match(block)
    return found is not None and not block[found.end() :].strip()


def _same(one: str, other: str) -> bool:
    return "".join(one.split()) == "".join(other.split())
