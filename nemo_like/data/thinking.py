"""Which part of a completion counts as its answer when the model thinks aloud first."""

import re

# As DeepSeek and Qwen, Mistral and Kimi write them, and as prompts ask for them.
OPENED = re.compile(r"<(?i:think(?:ing)?|reasoning)\s*>|\[THINK\]|◁think▷")
CLOSED = re.compile(r"</(?i:think(?:ing)?|reasoning)\s*>|\[/THINK\]|◁/think▷")


def after_thinking(completion: str) -> str | None:
    """Text after the last ``</think>``, or None if a ``<think>`` block was never closed.

    A chat template may open the block inside the prompt, so a closing tag alone is fine.

    >>> after_thinking("<think>2+2?</think>4")
    '4'
    """
    visible = CLOSED.split(completion)[-1]
    return None if OPENED.search(visible) else visible
