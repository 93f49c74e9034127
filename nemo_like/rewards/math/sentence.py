# ruff: noqa: RUF001 (the signs that look alike are the subject)
r"""Read which choice a sentence makes: "not B but C", "3, which is option (A)", "C: it is odd".

What is rejected or corrected goes first, then the reasons. A choice is what remains: letters alone,
a letter before its answer, or an answer before its letter.
"""

import re

from nemo_like.rewards.math.choices import letters_of
from nemo_like.rewards.math.compare import MAX_CHARACTERS, comparable
from nemo_like.rewards.math.text import join_thousands, tidy

AFTERTHOUGHT = re.compile(
    r"(?<=\S)(?:[,;]?\s+(?:because|since|as|so|which|but|therefore|thus|hence|not|weil|denn|da)\b.*"
    r"|\s*[，,]?因为.*|です$|\s+\((?!mod)[a-zA-Z]{3}[^()$\\]*\)$)",
    re.IGNORECASE,
)
# Option b, (B), or B where the sentence ends or goes on; not A man, A + B or P(A).
LETTER = re.compile(
    r"(?<![a-zA-Z\d\\)}^_])[*_`$]*"
    r"(?:\(?(?i:(?:the\s+)?\b(?:options?|choice|answer|letter)\s+|选项\s*)[*_`$]*[(\[]?(?P<noun>[A-Ja-j])"
    r"(?![a-zA-Z(])[)\]]*|(?<![-+=*/]\s)(?<![-+=*/])[(\[（](?P<round>[A-J])[)\]）]"
    r"|(?P<bare>[A-J])(?=[*_`$]*(?:\s*$|[.,;:)，。（）、而因不和或也で가이]|\s+[-–—(]"
    r"|\s+(?:and|or|nor|but|is|are|not|rather|instead|because|since|as|over|only|und|oder|noch|nicht)"
    r"\b)))[*_`$]*"
)
# Once letters are marked as @B (named a choice) and #B (bare):
_MANY = r"[@#][A-J](?:(?:[\s,、&]|and|or|nor|und|oder|noch|和|或)+[@#][A-J])*"
_IT_IS = r"it(?:\s+is|['’]s)\s+"
REJECTED = re.compile(
    r"[\s,;，(（也]*(?:(?:and|but|is)\s+)?"
    r"(?:\b(?:not|neither|nor|rather\s+than|instead\s+of|over|nicht|weder)\s+|n['’]t\s+|不[是选]\s*)"
    rf"(?:either\s+)?{_MANY}[)）]?(?:[\s,;，]*(?:but|sondern|而是|{_IT_IS}))?"
    rf"|{_MANY}\s*(?:ではなく|[이가]\s*아니라|(?:is|are)\s+(?:not|wrong|incorrect|false|out)\b.*)"
)
CORRECTED = re.compile(
    r".*\b(?:no(?:,|\s+wait)|wait|or\s+rather|I\s+mean|actually|sorry)\b,?\s+"
    rf"(?:{_IT_IS})?(?=[@#][A-J]\W*$)"
)
ANSWER_AND_LETTER = re.compile(
    r"(?P<answer>[^@#]*?[^@#\s,])(?:(?:,\s*|\s+[-–—]\s+|\s+|(?<=[$）]))@|(?:,?\s+(?:which|that)\s+"
    r"(?:is|means|matches)|,\s+(?:so|thus|hence|i\.e\.|that\s+is),?|,?\s+(?:which\s+)?"
    r"correspond(?:s|ing)\s+to|,?\s+matching)\s+[@#]|[,，]\s*即\s*[@#])"
    r"(?P<letter>[A-J])(?:\s+is\s+(?:correct|right))?[\s*$.]*"
)
LETTER_AND_WORDS = re.compile(
    r"[@#](?P<letter>[A-J])(?:\s+only|\s+[-–—]\s[^\d@#]*"
    r"|(?:,\s+(?=\D*$)|\s+[(])(?P<answer>[^@#]*?)\)?)"
)
NAMED = re.compile("@([A-J])")
# Words after which a letter is something else than the choice: 3 for part (A), more than (B).
RELATIVE = re.compile(
    r"\\operatorname\{\w+\}$|,.*[a-zA-Z]{3}|n['’]t\b|\b(?:than|to|of|from|with|like|unlike|near|or|and"
    r"|between|not|no|never|if|for|in|on|at|by|as|under|over|above|below|except|part|case|question"
    r"|point|step)\b"
)
MACRO = re.compile(r"\\text\w*\s*\{([^{}]*\b[A-J]\b[^{}]*)\}|\\(?=[ ,;])")


def chosen(sentence: str) -> str:
    r"""The choice of a sentence in one form; '' if none, and the sentence if it only rejects some.

    >>> chosen("not B but C"), chosen("$3$, which is option (A)"), chosen("4 as A is odd")
    ('C', '(A) $3$', '')
    """
    if len(sentence) > MAX_CHARACTERS:
        return ""
    if letters_of(tidy(sentence))[0]:
        return sentence
    plain = MACRO.sub(r"\1", re.sub("[@#]", "", sentence))
    marked = LETTER.sub(
        lambda m: f"#{m['bare']}" if m["bare"] else f"@{m['noun'] or m['round']}".upper(), plain
    )
    kept = REJECTED.sub("", CORRECTED.sub("", marked)).strip()
    match = ANSWER_AND_LETTER.fullmatch(kept)
    if match and _is_value(match["answer"]):
        return f"({match['letter']}) {match['answer']}"
    short = AFTERTHOUGHT.sub("", kept).strip(" ,;:.-–—")
    if re.fullmatch(_MANY, short) and not re.search("or|oder|或", short):
        return NAMED.sub(r"(\1)", ", ".join(re.findall("[@#][A-J]", short))).replace("#", "")
    if match := LETTER_AND_WORDS.fullmatch(short):
        return f"({match['letter']}) {match['answer']}" if match["answer"] else match["letter"]
    if kept == marked.strip():
        return ""
    return NAMED.sub(r"(\1)", short) if NAMED.search(short) else sentence


def _is_value(text: str) -> bool:
    plain = join_thousands(tidy(text))
    is_more = re.search(r"\d|[a-zA-Z]{3}", plain) and not letters_of(plain)[0]
    return bool(is_more and comparable(plain) and not RELATIVE.search(text))
