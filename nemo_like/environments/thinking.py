"""Which part of a completion counts as its answer when the model thinks aloud first."""


def after_thinking(completion: str) -> str | None:
    """Text after the last ``</think>``, or None if a ``<think>`` block was never closed.

    A chat template may open the block inside the prompt, so a closing tag alone is fine.

    >>> after_thinking("<think>2+2?</think>4")
    '4'
    """
    visible = completion.rpartition("</think>")[2]
    return None if "<think>" in visible else visible
