"""Letters of multiple choice: alone, in brackets, before an answer, or several of them."""

import re

from nemo_like.rewards.math.text import split_top_level

_NOUN = r"(?:(?:option|choice|answer|letter) ?)?"
LETTER = re.compile(rf"{_NOUN}(?:([A-J])[.:)]?|[(\[{{] ?([A-J]) ?[)\]}}][.:]?)", re.IGNORECASE)
# A letter and what it stands for. In lower case the letter needs a bracket and a space, since
# (a)(b) is a product; a bare one needs a full stop or a colon.
WITH_ANSWER = re.compile(
    r"(?:(?i:option|choice|answer) )?(?:\((?P<round>[A-J])\) ?|(?P<low>\([a-j]\)|[a-j]\)) "
    r"|(?P<bare>[A-J])(?:[).] ?|: ))(?P<rest>(?!.*(?<![a-zA-Z])\(?[A-J]\))\S.*)"
)
SEPARATOR = r"[,;&/]|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])"


def letters_of(text: str) -> tuple[str, bool]:
    """The letters that the text is nothing but, in order, and whether they may be variables.

    >>> letters_of("(b)"), letters_of("C, A"), letters_of("b"), letters_of("B) 5")
    (('B', False), ('AC', False), ('B', True), ('', False))
    """
    if re.fullmatch("[A-J]{2,}", text) and list(text) == sorted(set(text)):
        return text, False
    matches = [LETTER.fullmatch(part) for part in split_top_level(text, SEPARATOR) if part]
    if not matches or not all(matches):
        return "", False
    found = [match for match in matches if match]
    letters = {next(letter for letter in match.groups() if letter).upper() for match in found}
    # Alone and in lower case: sides of a triangle, say.
    variables = all(len(match.group()) == 1 and match.group().islower() for match in found)
    return "".join(sorted(letters)), variables


def with_answer(text: str) -> tuple[str, str]:
    """The letter of a choice before its answer, and the answer; '' and the text if there is none.

    >>> with_answer("(A) 5"), with_answer("b) 5"), with_answer("(a)(b)")
    (('A', '5'), ('B', '5'), ('', '(a)(b)'))
    """
    match = WITH_ANSWER.fullmatch(text)
    if match is None:
        return "", text
    letter = match["round"] or match["bare"] or match["low"].strip("()").upper()
    return letter, match["rest"]


def same_letters(gold: str, given: str) -> bool | None:
    """Whether both name the same choices; None unless both are nothing but letters.

    The case does not matter for a choice, but b and B are two variables where ``gold`` is b.
    """
    (wanted, variables), (stated, _) = letters_of(gold), letters_of(given)
    if not wanted or not stated:
        return None
    if re.search(r"\bor\b", given) and not re.search(r"\bor\b", gold):
        return False
    if variables and re.search(r"(?<![a-zA-Z(\[{])[A-Z](?![)\]}.:a-zA-Z])", given):
        return False
    return wanted == stated
