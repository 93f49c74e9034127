# ruff: noqa: RUF001 (the signs that look alike are the subject)
r"""Find the final answer in a worked solution.

In order: a final statement after the last box (``statements``); the last box; the last ``####``
line, ``<answer>`` tag or phrase such as "the answer is", whichever comes last; the whole response
if it is nothing but one expression. A number that is merely mentioned is no answer, and neither is
a box or a tag that the response did not close.
"""

import re
from collections.abc import Iterator
from enum import Enum, auto
from itertools import chain

from nemo_like.data.thinking import after_thinking
from nemo_like.rewards.math.statements import (
    AFTERTHOUGHT,
    HEADING,
    SENTENCE_START,
    chosen,
    is_answer,
    is_meant,
    is_only_choice,
    last_matches,
    statements,
    states_choice,
)
from nemo_like.rewards.math.text import letters_of, tidy, with_answer
from nemo_like.rewards.math.units import VALUE_WORD, is_words

LONG_SPACE = re.compile(r"\s{8,}|(?:\n[ \t#*_]*){8,}(?=\n)")
"""What a model that never stops may write: patterns would look at it from each of its places."""
BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
INNER_BOX = re.compile(rf"{BOX.pattern}\{{([^{{}}]*)\}}")  # of x=\boxed{5}, which is x=5
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
DISPLAY = re.compile(r"\s*[*_]*\s*(?:\$\$(.*?)\$\$|\\\[(.*?)\\\]|```\w*\n(.*?)```)", re.DOTALL)
SENTENCE_END = re.compile(r"(?<!i\.e)[.!?](?:\*\*|[\"')])?(?=\s|$)|[。！？；]")
LEAD_IN = re.compile(
    r"^(?:(?:equal to|exactly|simply|just|indeed|therefore|thus|given by|approximately|about|"
    r"roughly|both|only|probably|clearly)\b|[\s:*_])+",
    re.IGNORECASE,
)
NEXT_PROBLEM = re.compile(
    r"^[^\w\n]*+(?:question|problem|exercise|example|human|user|q)\b[ \t]*\d*[ \t*]*[:.]",
    re.IGNORECASE | re.MULTILINE,
)
"""A model that does not stop may set itself another problem, and answer that."""
TAKEN_BACK = re.compile(
    r"(?<=[.!?])\s+(?:(?:no|wait|but|hmm|actually|sorry)\b[,.]?\s+)*(?:that|this|it)(?:\s+answer)?"
    r"(?:\s+(?:is|was)|['’]s)\s+(?:wrong|incorrect|not\s+(?:right|correct)|a\s+mistake)[.!]*$",
    re.IGNORECASE,
)
"""A last sentence about the one before it."""
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
    visible = after_thinking(LONG_SPACE.sub(lambda m: "\n\n" if "\n" in m[0] else " ", response))
    if visible is None:
        return None
    if taken_back := TAKEN_BACK.search(visible.rstrip()):
        before = visible[: taken_back.start()]
        last = _read(SENTENCE_START.sub("", before), gold)
        if last is not None and last == _read(before, gold):
            return None
    return _read(visible, gold)


def _read(text: str, gold: str) -> str | None:
    read = _statement_or_box if BOX.search(text) else _last_statement
    return (read(text, _kind_of(gold)) or "").strip() or None


class Kind(Enum):
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
        return self is not Kind.quantity or not is_only_choice(value)


def _kind_of(gold: str) -> Kind:
    text = tidy(gold[:100])
    letters, variables = letters_of(text)
    if not text or variables or with_answer(text)[0]:
        return Kind.either
    if len(letters) > 1:
        return Kind.choices
    return Kind.choice if letters else Kind.quantity


def _statement_or_box(text: str, kind: Kind) -> str | None:
    """The last final statement after the last box, or else the box."""
    box, rest = _box_and_rest(text)
    if box is not None:
        box = _with_letter(box, rest)
    if goes_on := NEXT_PROBLEM.search(rest):
        rest = rest[: goes_on.start()]
    words = box is not None and is_words(tidy(box[:100]))
    found = [
        (at, value)
        for at, value in chain(statements(rest, _after_phrase), _marked(rest))
        if kind.takes(value) and is_answer(value, words=words)
    ]
    return max(found)[1] if found else box


def _with_letter(box: str, rest: str) -> str:
    """The choice of a box and of the sentence that it stands in, or else the box."""
    choice = chosen(box + SENTENCE_END.split(rest.partition("\n")[0])[0])
    is_clear = choice and (states_choice(choice) or is_only_choice(box))
    return choice if is_clear else chosen(box) or box


def _marked(text: str) -> Iterator[tuple[int, str]]:
    """Whole ``####`` lines and closed answer tags."""
    end = _end(text)
    for match in last_matches(GSM8K, text):
        line = TAGS_AT_END.sub("", match["line"]).strip(" *`")
        if match.end() >= end or not states_choice(line):  # "#### B" may be a heading
            yield match.start(), chosen(line) or line
    for match in last_matches(TAG_OPENED, text):
        if content := _in_tag(text, match):
            yield match.start(), content


def _end(text: str) -> int:
    return len(TAGS_AT_END.sub("", text).rstrip())


def _in_tag(text: str, opened: re.Match[str]) -> str | None:
    closed = TAG_CLOSED.search(text, opened.end())
    content = text[opened.end() : closed.start()].strip() if closed else ""
    return chosen(content) or content or None


def _box_and_rest(text: str) -> tuple[str | None, str]:
    """Content of the last outermost box, and the text after it: after its line if it is open."""
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
    return None if last[1] is None else INNER_BOX.sub(r"\1", last[1]), text[last[2] :]


def gold_answer(gold: str) -> str:
    """The answer that a data set's field states, which may be a whole worked solution."""
    if "####" in gold:
        return gold.rpartition("####")[2].strip()
    if BOX.search(gold):
        return (_box_and_rest(gold)[0] or "").strip()
    return gold.strip()


def _last_statement(text: str, kind: Kind) -> str | None:
    found: list[tuple[int, str | None]] = []
    end = _end(text)
    for match in last_matches(GSM8K, text):
        if (answer := _after_marker(match["line"], match.end() >= end)) is not None:
            found.append((match.start(), answer))
            break
    if tags := list(TAG_OPENED.finditer(text)):
        found.append((tags[-1].start(), _in_tag(text, tags[-1])))
    for pattern in (PHRASE, HEADING):
        for match in last_matches(pattern, text):
            if is_meant(text, match, whole="would" in match[0]):
                found.append((match.start(), _after_phrase(text[match.end() :])))
                break
    stated = list(statements(text, _after_phrase))
    found += [one for one in stated if kind is Kind.choice or is_answer(one[1], words=True)]
    if kind is not Kind.quantity:  # of (A) 5, a letter that is stated must be the right one
        found = [one for one in found if one[1] and states_choice(one[1])] or found
    if found:
        return max(found, key=lambda item: item[0])[1]
    display = DISPLAY.fullmatch(text.strip())
    line = _content(display) if display else text.strip()
    if "\n" in line or len(line) > 100:
        return None
    choice = chosen(line) or line
    if kind is not Kind.quantity and states_choice(choice):
        return choice
    return line if BARE_EXPRESSION.match(line) and re.search(r"\d", line) else None


def _after_marker(line: str, at_end: bool) -> str | None:
    """Read ``#### 42``; None for a heading, such as a letter with more text below it."""
    line = TAGS_AT_END.sub("", line).strip().strip("*`")
    choice = chosen(line) or line
    if states_choice(choice):
        return choice if at_end else None
    number = NUMBER_AT_START.match(line)
    if number is None:
        return line if AFTER_MARKER.match(line) else None
    rest = line[number.end() :]
    if re.match(r"[.)]\s+[A-Za-z*]", rest) and not number.group().strip().isdigit():
        return None
    return line if GOES_ON.match(rest) else number.group().rstrip(",")


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
    if end and end.group()[0] in "?？":
        return None  # a question
    line = TAGS_AT_END.sub("", line[: end.start()] if end else line)
    return chosen(line) or AFTERTHOUGHT.sub("", line)
