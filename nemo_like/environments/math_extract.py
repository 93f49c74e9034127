r"""Find the final answer in a worked solution.

In order: the last box; the last ``####`` line or ``<answer>`` tag or phrase such as "the answer is",
whichever comes last; the whole response if it is nothing but one expression. A number that is
merely mentioned is no answer, and neither is a box or a tag that the response did not close.
"""

import re

from nemo_like.environments.thinking import after_thinking

BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
GSM8K = re.compile(r"####[ \t]*(?P<line>[^\n]*)")
NUMBER_AT_START = re.compile(r"[-−+]?\s*[$€£]?\s*(?:\d[\d,]*(?:\.\d+)?|\.\d+)\s*\\?%?")
# What follows a number and makes it part of a larger expression: 3/4, 2 1/3, 2x, 3 \cdot 5.
GOES_ON = re.compile(r"\s*[-+*/^=_(\\−×·÷:]|\s+\d|\s*[a-zA-Z](?![a-zA-Z])|\.\d")
ANSWER_TAG = re.compile(r"<answer>(?P<tagged>.*?)</answer>|(?P<unclosed><answer>)", re.DOTALL)
PHRASE = re.compile(
    r"\b(?:answer|result|value|solution)s?\b"
    r"(?:\s*(?:\([^()\n]*\))?[\s*_]*[:=]"
    r"|(?:[^.\n]|\.(?=\d)){0,80}?\s(?:is|are|equals?|would be|will be)\b[\s*_]*:?)",
    re.IGNORECASE,
)
HEADING = re.compile(r"^[#*\s]+(?:final\s+)?answer[*\s]*\n", re.IGNORECASE | re.MULTILINE)
DISPLAY = re.compile(r"\s*[*_]*\s*(?:\$\$(.*?)\$\$|\\\[(.*?)\\\])", re.DOTALL)
SENTENCE_END = re.compile(r"[.!?](?:\*\*|[\"')])?(?=\s|$)")
LEAD_IN = re.compile(
    r"^(?:(?:equal to|exactly|simply|just|indeed|therefore|thus|given by|approximately|about|"
    r"roughly)\b|[\s:*_])+",
    re.IGNORECASE,
)
BARE_EXPRESSION = re.compile(r"(?!.*[a-zA-Z]{3})|.*\\")


def extract(response: str) -> str | None:
    r"""Text of the final answer, or None if the response does not state one.

    >>> extract(r"First \boxed{3}, so the count is \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    >>> extract("Most people would expect 7") is None
    True
    """
    visible = after_thinking(response)
    if visible is None:
        return None
    if BOX.search(visible):
        answer = last_box(visible)
    else:
        answer = _last_statement(visible)
    return answer.strip() or None if answer is not None else None


def last_box(text: str) -> str | None:
    r"""Content of the last outermost ``\boxed`` or ``\fbox``; None if it was not closed."""
    content: str | None = None
    position = 0
    while match := BOX.search(text, position):
        content, position = _argument(text, match.end())
    return None if content is None else _unbox(content)


def gold_answer(gold: str) -> str:
    """The answer that a data set's field states, which may be a whole worked solution."""
    if "####" in gold:
        return gold.rpartition("####")[2].strip()
    if BOX.search(gold):
        return (last_box(gold) or "").strip()
    return gold.strip()


def _argument(text: str, start: int) -> tuple[str | None, int]:
    """The TeX argument at ``start`` and the place to search on from; None if it is not closed."""
    if text[start : start + 1] != "{":
        match = re.compile(r"[^\s${}]+").match(text, start)
        return (match.group().rstrip(".,;"), match.end()) if match else (None, start)
    depth = 0
    position = start
    while position < len(text):
        character = text[position]
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[start + 1 : position], position + 1
        position += 2 if character == "\\" else 1  # an escaped brace does not count
    return None, start + 1


def _unbox(content: str) -> str:
    while match := BOX.search(content):
        inner, end = _argument(content, match.end())
        content = content[: match.start()] + (inner or "") + content[end:]
    return content


def _last_statement(text: str) -> str | None:
    found: list[tuple[int, str | None]] = []
    for match in GSM8K.finditer(text):
        if (answer := _after_marker(match["line"])) is not None:
            found.append((match.start(), answer))
    for match in ANSWER_TAG.finditer(text):
        found.append((match.start(), None if match["unclosed"] else match["tagged"]))
    for pattern in (PHRASE, HEADING):
        found += [(m.start(), _after_phrase(text[m.end() :])) for m in pattern.finditer(text)]
    if found:
        return max(found, key=lambda item: item[0])[1]
    line = text.strip()
    is_expression = "\n" not in line and len(line) <= 100 and BARE_EXPRESSION.match(line)
    return line if is_expression and re.search(r"\d", line) else None


def _after_marker(line: str) -> str | None:
    """Read ``#### 42``; None for a Markdown heading of the fourth level."""
    line = line.strip().strip("*")
    number = NUMBER_AT_START.match(line)
    if number is None:
        return line if re.match(r"[\\$(\[]", line) else None
    rest = line[number.end() :]
    if re.match(r"[.)]\s+[A-Za-z*]", rest) and not number.group().strip().isdigit():
        return None
    return line if GOES_ON.match(rest) else number.group().rstrip(",")


def _after_phrase(text: str) -> str:
    display = DISPLAY.match(text)
    if display:
        return display.group(1) or display.group(2) or ""
    line = LEAD_IN.sub("", text.lstrip()).partition("\n")[0]
    end = SENTENCE_END.search(line)
    while end and end.group() == "!" and line[end.start() - 1 : end.start()].isalnum():
        end = SENTENCE_END.search(line, end.end())  # a factorial, not an exclamation
    return line[: end.start()] if end else line
