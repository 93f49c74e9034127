# ruff: noqa: RUF001 (the signs that look alike are the subject)
r"""Statements that are meant to be final, and so stand above a box that came before them.

After ``\boxed{x^2 - 4}`` a solution may go on to "Final Judgment: B". To stand above a box a
statement must name itself (answer, judgment, verdict, choice ...), must not be supposed, denied or
called wrong, and must give a choice or a whole mathematical answer, or a word such as "yes".
"""

import re
from collections.abc import Callable, Iterator

from nemo_like.rewards.math.compare import MAX_CHARACTERS, comparable
from nemo_like.rewards.math.text import join_thousands, letters_of, tidy, with_answer
from nemo_like.rewards.math.units import is_words, plain_words, strip_units

MOST_STATEMENTS = 20
"""Statements that are looked at, from the last one: a model may repeat itself without end."""
MOST_CHARACTERS = 200
_NOUN = r"(?:answer|judge?ment|verdict|choice|option|selection|decision|conclusion)s?"
_IS_ONE = r"(?:is|(?:should|must)\s+be)(?:\s+(?:therefore|thus|hence|clearly))?"
_IS = (
    r"(?:is(?=n['’]t)|(?:is|are|(?:should|must|has\s+to)\s+be)"
    r"(?:\s+(?:therefore|thus|hence|clearly))?\b)"
)
LABEL = re.compile(
    rf"\b(?P<final>(?:(?:final|correct|right)\s+){{1,3}})?{_NOUN}\b"
    r"(?:,\s+(?:then|therefore|thus|hence),)?"
    r"(?:\s+(?:to|for|of)\s+(?:this|the|our|your)\s+(?:question|problem|exercise|task))?"
    rf"[\s*_`]*+(?:\([^()\n]{{0,40}}\)[\s*_`]*+)?(?:[:：=→]|[-–—](?=\s)|’s\b|'s\b|{_IS})[\s*_`:]*",
    re.IGNORECASE,
)
HEADING = re.compile(
    r"^[#*_\s]++(?:(?:final|correct|right)\s+){0,3}(?:answer|judge?ment|verdict|choice)[*_\s]*\n",
    re.IGNORECASE | re.MULTILINE,
)
FINAL = re.compile(
    r"(?:^[#*_\s]*+|(?<=[.!?]\s)[*_]*)final[\s*_]*[:：][\s*_]*|\bcorrection:\s"
    r"|\b(?:no|wait|actually|sorry)[,:.]?\s+(?:it|that)(?:\s+is|['’]s)\s+(?=[*(-]*[$\\\d])",
    re.IGNORECASE | re.MULTILINE,
)
# So it's C. Hence option C. No, it is C. I choose (C). Final answer D.
CHOICE = re.compile(
    r"(?:\b(?:so|thus|hence|therefore),?|\b(?:no|wait|actually|sorry)(?:[,:]|\.?(?=\s+it)))"
    r"(?:\s+it(?:\s+is|['’]s))?\s"
    r"|(?:^|(?<=[.,:!?*]\s)|\b(?:I|we|to|must|should|will|so|thus|therefore|'ll|let's)\s)"
    r"(?:choose|select|pick|go\s+with|opt\s+for)\s|\b(?:final|correct|the|so)\s+answer\s"
    r"|^[^\w\n]*+answer\s",
    re.IGNORECASE | re.MULTILINE,
)
ELSEWHERE = re.compile(
    r"(?:答案|选项|選項|判断|结论|結論)\s*(?:应该|应|應)?\s*(?:是|为|為|选|選|[:：=]|(?=不是))"
    r"|选(?:择)?\s*[:：]?(?=\s*[*(（]*[A-J])|(?:正解|答え)\s*(?:は|[:：])|답\s*(?:은|는|[:：])"
    r"|\b(?:respuesta|resposta|r[ée]ponse|antwort|risposta|ответ)"
    r"(?:\s+(?:final[ea]?|corre\w+))?[\s*_]*(?:[:：=]|\s(?:es|é|è|est|ist|lautet)\b)[\s*_:]*",
    re.IGNORECASE,
)
_LETTER = (
    r"[(\[*_`$\s]{0,8}(?P<letter>(?-i:[A-J])(?=[^a-zA-Z]|$)|(?<=[(\[])[a-j](?=[)\]]))[)\]*_`$]{0,8}"
)
PICKS = (
    # Option C is correct. (b) is the right answer.
    re.compile(
        r"(?:^|(?<=[.:!?]\s)|\b(?:so|thus|hence|therefore|that)\s|(?P<noun>\b(?:option|choice|answer)\s))"
        rf"{_LETTER}\s+{_IS_ONE}\s+(?:the\s+)?(?:correct|right|(?(noun)(?:best|true)|right))"
        r"(?=\s*[.,;!\n]|\s*$|\s+(?:because|since|as)\b)",
        re.IGNORECASE | re.MULTILINE,
    ),
    re.compile(
        rf"(?<![a-zA-Z\\]){_LETTER}\s+{_IS_ONE}\s+(?:the\s+)?(?:correct|right|best|final)\s+"
        r"(?:answer|option|choice|one)\b",
        re.IGNORECASE,
    ),
    re.compile(rf"{_LETTER}\s*(?:が正解|[이가]\s*정답|(?:是|为)?(?:正确|正確))"),
)
# Words before "answer" that make no other answer of it: a common answer, the first answer.
PLAIN_BEFORE = {
    "the", "my", "our", "so", "thus", "hence", "therefore", "then", "is", "and", "overall", "final",
    "correct", "right", "true", "actual", "best", "desired", "required", "requested", "single",
}  # fmt: skip
SUPPOSED = re.compile(
    r"\b(?:if|suppose|had|were|assum\w+|unless|whether|otherwise|without)\b", re.IGNORECASE
)
DENIED = re.compile(
    r"\b(?:doubt|false|wrong|incorrect|not|never|claims?|claimed|says?|said|guess|seem\w*|may|might|"
    r"could|would|some|many|others|students|people|common|tempting|naive|refuse|"
    r"reject|falsche)\b|(?:不[能应應会會该要]{0,2}|没.{0,3})$",
    re.IGNORECASE,
)
CONCLUSION = re.compile(r".*\b(?:so|thus|hence|therefore)\b", re.IGNORECASE | re.DOTALL)
CLAUSE_START = re.compile(r".*(?:[,:;]\s|\band\s|[，：、])", re.DOTALL)
SENTENCE_START = re.compile(r".*(?:[.!?](?:\*\*)?\s|[\n。；;])", re.DOTALL)
AT_END = re.compile(
    r"(?:[\s*_`]*(?:[✓✔✅∎□■]|\\checkmark|\\blacksquare|\\square)+[\s*_`$]*|\s+[-–—]"
    r"|(?<=[A-J])!|(?<=[A-J][)\]])!)$"
)
ROUNDED = re.compile(r"\s*(?:\$\s*)?(?:approximately|about|around|roughly|nearly|≈|\\approx)")
PLAIN_WORDS = {"yes", "no", "true", "false", "none", "impossible"}
POINTERS = re.compile(r"\b(?:above|below|box\w*|shown|see|given|same|this|that)\b", re.IGNORECASE)

Read = Callable[[str], str | None]
"""What a statement gives, of the text after its label."""


def statements(text: str, after_label: Read) -> Iterator[tuple[int, str]]:
    """Where final statements stand in ``text`` and what they give, for each kind the last first."""
    for pattern in (LABEL, HEADING, FINAL, ELSEWHERE, CHOICE):
        for match in last_matches(pattern, text):
            value = after_label(text[match.end() :]) if is_meant(text, match) else None
            if not value or ROUNDED.match(text, match.end()) or len(value) > MOST_CHARACTERS:
                continue
            value = AT_END.sub("", value).strip()
            if pattern is not CHOICE or is_only_choice(value):
                yield match.start(), value
    for pattern in PICKS:
        for match in last_matches(pattern, text):
            if is_meant(text, match):
                yield match.start("letter"), match["letter"].upper()


def is_answer(value: str, *, words: bool) -> bool:
    """Whether a stated value is a choice, a whole mathematical answer, or a plain yes or no.

    ``words``: whether other answers in words will do too.
    """
    if len(value) > MOST_CHARACTERS:
        return False
    text = tidy(value)
    if states_choice(value) or plain_words(text) in PLAIN_WORDS:
        return True
    if is_words(strip_units(text)[0]):
        return (
            words and comparable(text) and not re.search(r"\d", text) and not POINTERS.search(text)
        )
    return comparable(text) and not re.match(r"[a-zA-Z]{3,} |\d+[.)] [a-zA-Z]", text)


def states_choice(value: str) -> bool:
    """Whether a stated value is or begins with the letter of a choice."""
    text = join_thousands(tidy(value))
    return bool(letters_of(text)[0] or with_answer(text)[0])


def is_only_choice(value: str) -> bool:
    """Whether a stated value is a choice, without what it stands for."""
    return bool(letters_of(tidy(value))[0])


def last_matches(pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
    """The last few matches, backwards."""
    return reversed(list(pattern.finditer(text))[-MOST_STATEMENTS:])


def is_meant(text: str, match: re.Match[str], *, whole: bool = True) -> bool:
    """Whether the sentence states it, and does not suppose or deny it, or speak of another one.

    ``whole``: "if" before a comma counts too, as in "if we add both, the answer is 5".
    """
    before = text[max(0, match.start() - 200) : match.start()]
    sentence = SENTENCE_START.sub("", before)
    if match.re is LABEL and not match["final"]:
        word = re.search(r"([a-zA-Z]+)[\s*_`(\"]*$", sentence)
        if word and word[1].lower() not in PLAIN_BEFORE:
            return False
    concluded = CONCLUSION.sub("", sentence)
    clause = CLAUSE_START.sub("", concluded)
    supposed = SUPPOSED.search(concluded if whole else clause)
    return supposed is None and DENIED.search(clause) is None


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
