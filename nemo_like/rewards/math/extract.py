# ruff: noqa: RUF001 (the signs that look alike are the subject)
r"""Find the final answer in a worked solution.

In order: a final statement after the last box (``math_verdict``); the last box; the last ``####``
line, ``<answer>`` tag or phrase such as "the answer is", whichever comes last; the whole response
if it is nothing but one expression. A number that is merely mentioned is no answer, and neither is
a box or a tag that the response did not close.
"""

import re
from collections.abc import Iterator
from enum import Enum, auto
from itertools import chain

from nemo_like.data.thinking import after_thinking
from nemo_like.rewards.math.choices import letters_of, with_answer
from nemo_like.rewards.math.text import tidy
from nemo_like.rewards.math.units import VALUE_WORD, is_words
from nemo_like.rewards.math.verdict import (
    is_answer,
    is_only_choice,
    last_matches,
    statements,
    states_choice,
)

LONG_SPACE = re.compile(r"\s{8,}|(?:\n[ \t#*_]*){8,}(?=\n)")
"""What a model that never stops may write: patterns would look at it from each of its places."""
BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
ESCAPED_BOX = re.compile(r"(?<!\\)\\\\(?:boxed|fbox)(?![a-zA-Z])")
"""With two backslashes, as in text that was escaped once more than it was read."""
BRACES = re.compile(
    rf"(?P<box>{BOX.pattern}\{{)|{BOX.pattern}(?P<bare>[^\s${{}}]+)|\\.|[{{}}]", re.DOTALL
)
GSM8K = re.compile(r"####[ \t]*(?P<line>[^\n]*)")
NUMBER_AT_START = re.compile(r"[-−+]?\s*[$€£]?\s*(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:\s*\\?%)?")
# What follows a number and makes it part of a larger expression: 3/4, 2 1/3, 2x, 3 \cdot 5.
GOES_ON = re.compile(
    r"\s*[-+*/^=_(\\−–×·÷:!<>~≤≥√π²³⁴]|\s+\d|\s*[a-zA-Z](?![a-zA-Z])|\.\d|e[-+]?\d"
    rf"|\s*(?:sqrt|pi)\b|\s*{VALUE_WORD.pattern}|[,;]?\s*(?:and|or|to)\s+[-−\d$\\]"
    r"|\s+(?:hours?|hrs?|minutes?|days?|weeks?|months?|years?|feet|foot|ft|yards?|pounds?|lbs?"
    r"|dollars?|degrees?|k?m|met(?:er|re)s?),?\s+(?:and\s+)?\d",
    re.IGNORECASE,
)
AFTER_MARKER = re.compile(r"[\\$(\[\]{√π±]|[-−][\\$√π(]|[a-zA-Z](?:_\w+|\([a-zA-Z]\))?\s*=\s*\S")
TAG_OPENED = re.compile("<answer>", re.IGNORECASE)
TAG_CLOSED = re.compile("</answer>", re.IGNORECASE)
TAGS_AT_END = re.compile(r"(?:\s*(?:</\w+>|<\|\w+\|>))+\s*$")
PHRASE = re.compile(
    r"\b(?:answer|result|value|solution)s?\b"
    r"(?:\s*(?:\([^()\n]*\))?[\s*_]*[:：=]"
    r"|(?:[^.\n]|\.(?=\d)){0,80}?\s(?:is|are|equals?|would be|will be)\b[\s*_]*:?)",
    re.IGNORECASE,
)
# What makes of the phrase another statement: if the answer is 4; it is false that the answer is 4.
NO_STATEMENT = re.compile(
    r"\b(?:if|suppose|assume|assuming|whether|unless|doubt|false|wrong|incorrect)"
    r"(?:\s+that)?(?:\s+(?:the|our|my))?\s+$",
    re.IGNORECASE,
)
HEADING = re.compile(r"^[#*\s]++(?:final\s+)?answer[*\s]*\n", re.IGNORECASE | re.MULTILINE)
DISPLAY = re.compile(r"\s*[*_]*\s*(?:\$\$(.*?)\$\$|\\\[(.*?)\\\]|```\w*\n(.*?)```)", re.DOTALL)
SENTENCE_END = re.compile(r"[.!?](?:\*\*|[\"')])?(?=\s|$)")
LEAD_IN = re.compile(
    r"^(?:(?:equal to|exactly|simply|just|indeed|therefore|thus|given by|approximately|about|"
    r"roughly)\b|[\s:*_])+",
    re.IGNORECASE,
)
AFTERTHOUGHT = re.compile(
    r"(?<=\S)(?:[,;]?\s+(?:because|since|as|so|which|but|therefore|thus|hence|not)\b.*"
    r"|\s+\((?!mod)[a-zA-Z]{3}[^()$\\]*\)$)",
    re.IGNORECASE,
)
NEXT_PROBLEM = re.compile(
    r"^[^\w\n]*+(?:question|problem|exercise|example|human|user|q)\b[ \t]*\d*[ \t*]*[:.]",
    re.IGNORECASE | re.MULTILINE,
)
"""A model that does not stop may set itself another problem, and answer that."""
BARE_EXPRESSION = re.compile(r"(?!.*[a-zA-Z]{3})|.*\\")


def extract(response: str, gold: str = "") -> str | None:
    r"""Text of the final answer, or None if the response does not state one.

    ``gold``, the right answer if it is known, says what can be one: where it is the letter of a
    choice, a later "answer: 12" takes nothing back, and neither does "answer: D" where it is 12.

    >>> extract(r"First \boxed{3}, so the count is \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    >>> extract("Most people would expect 7") is None
    True
    """
    visible = after_thinking(LONG_SPACE.sub(_shorter, response))
    if visible is None:
        return None
    if BOX.search(visible):
        answer = _verdict_or_box(visible, _kind_of(gold))
    else:
        answer = _last_statement(visible, _kind_of(gold))
    return (answer or "").strip() or None


class Kind(Enum):
    """What a right answer looks like."""

    choice = auto()
    choices = auto()
    quantity = auto()
    either = auto()

    def takes(self, value: str) -> bool:
        """Whether a statement of ``value`` speaks of what was asked for."""
        if self is Kind.choices:
            return len(letters_of(tidy(value))[0]) > 1
        if self is Kind.choice:
            return states_choice(value)
        return self is Kind.either or not is_only_choice(value)


def _kind_of(gold: str) -> Kind:
    text = tidy(gold[:100])
    letters, variables = letters_of(text)
    if not text or variables or with_answer(text)[0]:
        return Kind.either
    if len(letters) > 1:
        return Kind.choices
    return Kind.choice if letters else Kind.quantity


def _shorter(space: re.Match[str]) -> str:
    return "\n\n" if "\n" in space.group() else " "


def _verdict_or_box(text: str, kind: Kind) -> str | None:
    """The last final statement after the last box, or else the box."""
    box, rest = _box_and_rest(text)
    if goes_on := NEXT_PROBLEM.search(rest):
        rest = rest[: goes_on.start()]
    words = box is not None and is_words(tidy(box[:100]))
    found = [
        (at, value)
        for at, value in chain(statements(rest, _after_phrase), _marked(rest))
        if kind.takes(value) and is_answer(value, words=words)
    ]
    return max(found)[1] if found else box


def _marked(text: str) -> Iterator[tuple[int, str]]:
    """Whole ``####`` lines and closed answer tags."""
    for match in last_matches(GSM8K, text):
        yield match.start(), TAGS_AT_END.sub("", match["line"]).strip(" *`")
    for match in last_matches(TAG_OPENED, text):
        if closed := TAG_CLOSED.search(text, match.end()):
            yield match.start(), text[match.end() : closed.start()].strip()


def last_box(text: str) -> str | None:
    r"""Content of the last outermost ``\boxed`` or ``\fbox``; None if it was not closed."""
    return _box_and_rest(text)[0]


def _box_and_rest(text: str) -> tuple[str | None, str]:
    """Content of the last box, and the text after it: after its line, if it was not closed."""
    escaped = list(ESCAPED_BOX.finditer(text))
    if escaped and not BOX.search(text, escaped[-1].end()):
        text = text.replace(r"\\", "\\")
    last: tuple[int, str | None, int] = (-1, None, 0)
    open_braces: list[int | None] = []  # where its box begins, or None for an ordinary brace
    for token in BRACES.finditer(text):
        if token["bare"]:
            last = (token.start(), token["bare"].rstrip(".,;"), token.end())
        elif token["box"]:
            open_braces.append(token.start())
        elif token.group() == "{":
            open_braces.append(None)
        elif token.group() == "}" and open_braces:
            start = open_braces.pop()
            if start is not None:  # an outer box closes after its inner ones, and replaces them
                content = text[start : token.start()]
                last = (start, BOX.sub("", content, count=1)[1:], token.end())
    unclosed = [start for start in open_braces if start is not None]
    if unclosed and unclosed[-1] >= last[0]:
        return None, text[unclosed[-1] :].partition("\n")[2]
    return None if last[1] is None else _unbox(last[1]), text[last[2] :]


def gold_answer(gold: str) -> str:
    """The answer that a data set's field states, which may be a whole worked solution."""
    if "####" in gold:
        return gold.rpartition("####")[2].strip()
    if BOX.search(gold):
        return (last_box(gold) or "").strip()
    return gold.strip()


def _unbox(content: str) -> str:
    r"""Drop the boxes inside a box: ``x=\boxed{5}`` is ``x=5``."""
    return re.sub(rf"{BOX.pattern}\{{([^{{}}]*)\}}", r"\1", content)


def _last_statement(text: str, kind: Kind) -> str | None:
    found: list[tuple[int, str | None]] = []
    for match in reversed(list(GSM8K.finditer(text))):
        if (answer := _after_marker(match["line"])) is not None:
            found.append((match.start(), answer))
            break
    if tags := list(TAG_OPENED.finditer(text)):
        start, end = tags[-1].span()
        closed = TAG_CLOSED.search(text, end)
        found.append((start, text[end : closed.start()] if closed else None))
    for pattern in (PHRASE, HEADING):
        matches = [m for m in pattern.finditer(text) if _states(text, m)]
        if matches:
            found.append((matches[-1].start(), _after_phrase(text[matches[-1].end() :])))
    stated = list(statements(text, _after_phrase))
    found += [one for one in stated if kind is Kind.choice or is_answer(one[1], words=True)]
    if kind is Kind.choice:
        found = [one for one in found if one[1] and states_choice(one[1])] or found
    if found:
        return max(found, key=lambda item: item[0])[1]
    display = DISPLAY.fullmatch(text.strip())
    line = _content(display) if display else text.strip()
    if "\n" in line or len(line) > 100:
        return None
    if kind is not Kind.quantity and is_only_choice(line):
        return line
    return line if BARE_EXPRESSION.match(line) and re.search(r"\d", line) else None


def _after_marker(line: str) -> str | None:
    """Read ``#### 42``; None for a Markdown heading of the fourth level."""
    line = TAGS_AT_END.sub("", line).strip().strip("*`")
    number = NUMBER_AT_START.match(line)
    if number is None:
        return line if AFTER_MARKER.match(line) else None
    rest = line[number.end() :]
    if re.match(r"[.)]\s+[A-Za-z*]", rest) and not number.group().strip().isdigit():
        return None
    return line if GOES_ON.match(rest) else number.group().rstrip(",")


def _states(text: str, phrase: re.Match[str]) -> bool:
    start = phrase.start()
    return NO_STATEMENT.search(text[max(0, start - 40) : start]) is None


def _content(display: re.Match[str]) -> str:
    return next((content for content in display.groups() if content), "").strip()


def _after_phrase(text: str) -> str | None:
    display = DISPLAY.match(text)
    if display:
        return _content(display)
    line = LEAD_IN.sub("", text.lstrip()).partition("\n")[0]
    end = SENTENCE_END.search(line)
    while end and end.group() == "!" and line[end.start() - 1 : end.start()].isalnum():
        end = SENTENCE_END.search(line, end.end())  # a factorial, not an exclamation
    if end and end.group().startswith("?"):
        return None  # a question
    line = TAGS_AT_END.sub("", line[: end.start()] if end else line)
    return AFTERTHOUGHT.sub("", line)
