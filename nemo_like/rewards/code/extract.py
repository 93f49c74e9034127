"""Which part of a completion is its program."""

import re

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})[^`\n]*$")
_THINKING_ENDS = "</think>"


def program_of(completion: str) -> str | None:
    """The last fenced block that is closed; None if there is none.

    What comes before the last ``</think>``, or after a ``<think>`` that is not closed, does not
    count. The word behind the opening fence may be any. A fence is closed by one of its own kind
    that is at least as long.

    >>> program_of("So:" + chr(10) + "```python" + chr(10) + "print(1)" + chr(10) + "```")
    'print(1)\\n'
    """
    answer = completion.rpartition(_THINKING_ENDS)[2].partition("<think>")[0]
    found, fence, lines = None, "", list[str]()
    for line in answer.splitlines():
        match = _FENCE.match(line)
        if not fence:
            if match:
                fence, lines = match[1], []
        elif match and match[1].startswith(fence) and not line.strip().strip(fence[0]):
            found, fence = "".join(f"{one}\n" for one in lines), ""
        else:
            lines.append(line)
    return found
