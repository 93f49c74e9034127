# ruff: noqa: RUF001 (the signs that look alike are the subject)
r"""One spelling for mathematical text: LaTeX, plain text and Unicode become one kind of LaTeX.

Only spelling changes here. What is equal is decided in ``compare``.
"""

import re
import unicodedata

from nemo_like.rewards.math.units import plain_amount

SYMBOLS = {
    "−": "-", "–": "-", "—": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ",
    "÷": "/", "‐": "-", "‑": "-", "‒": "-", "―": "-",
    "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "√": r"\sqrt ",
    "°": r"^\circ ", "∪": r"\cup ", "∈": r"\in ", "±": r"\pm ", "…": r"\ldots ", "⁄": "/",
    "π": r"\pi ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ",
    "λ": r"\lambda ", "μ": r"\mu ", "φ": r"\phi ", "ω": r"\omega ", "≈": "=",
    "º": r"^\circ ", "˚": r"^\circ ", "⩽": r"\le ", "⩾": r"\ge ", "∨": r"\lor ",
    "€": "", "£": "", "¥": "", "ℝ": r"\mathbb{R}", "∅": r"\emptyset ",
}  # fmt: skip
INVISIBLE = re.compile("[\u200b-\u200f\u2060\ufeff]")
QUOTED = re.compile(r"^(?:[$](?=\\?[$])|[\"“'‘])(.*)[\"”'’$]$", re.DOTALL)
VULGAR = re.compile("[¼-¾⅐-⅞]")
SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")
SUBSCRIPT = re.compile("[₀-₉]+")
MACROS = (
    "mathrm|text|mathbf|textbf|mbox|operatorname|mathit|textit|textrm|mathsf|texttt|boldsymbol|"
    "emph|bm|textnormal"
)
FUNCTIONS = (
    "pi|sqrt|sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|sinh|cosh|tanh|ln|log|exp|infty|"
    "theta|alpha|beta|gamma|lambda"
)
NOT_LETTER = r"(?![a-zA-Z])"
ENDS = r"([^\s,;[\]()][^[\]()]*[,;][^[\]()]*[^\s,;[\]()])"
"""The two ends of an interval, whichever brackets are around them."""
DEGREE = r"(?:\^\s*\{?\s*\\circ\s*\}?|\\degree\b)"

REWRITES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^[*_`\s]+|[*_`\s]+$", ""),
        (r"\\[$]|[$]|(?<!\\)\\[()\[\]]", " "),
        (rf"\\(?:left|right|[bB]igg?[lr]?){NOT_LETTER}\s*\.?", ""),
        (rf"\\(?:display|text)style{NOT_LETTER}|\\limits{NOT_LETTER}|(?<!\\)\\!", ""),
        # Alone, 0{,}5 and 3{,}14 have a decimal comma; 1{,}234 is a thousand.
        (r"^(\s*-?(?:0|\d+(?=\{,\}(?!\d{3}\s*$))))\{,\}(?=\d+\s*$)", r"\1."),
        (r"\{,\}", ","),
        (r"\\\\\[-?[\d.]+ ?(?:pt|em|ex|mm|cm)\]", r"\\\\"),
        (r"^\{(?!\d{1,3}(?:,\d{3})+\}$)([^{}]*,[^{}]*)\}$", r"\\{\1\\}"),
        (rf"\\(?:lor|vee){NOT_LETTER}", " or "),
        (r"^(\d+) to (\d+)$", r"\1:\2"),
        (rf"(?<!\\)\\[,;: ]|\\q?quad{NOT_LETTER}|~", " "),
        (rf"\\(?:[dtcs]|nice)frac{NOT_LETTER}", r"\\frac"),
        (rf"\\lbrace{NOT_LETTER}", r"\\{"),
        (rf"\\rbrace{NOT_LETTER}", r"\\}"),
        (rf"\\[lr]?vert{NOT_LETTER}", "|"),
        (rf"<=|\\leq(?:slant)?{NOT_LETTER}", r"\\le "),
        (rf">=|\\geq(?:slant)?{NOT_LETTER}", r"\\ge "),
        (rf"\\neq{NOT_LETTER}|\\not ?=|(?<!\d)!=", r"\\ne "),
        (rf"\\lt{NOT_LETTER}", "<"),
        (rf"\\gt{NOT_LETTER}", ">"),
        (rf"\\colon{NOT_LETTER}", ":"),
        (rf"\\approx{NOT_LETTER}", "="),
        (rf"\\varnothing{NOT_LETTER}|\\\{{\s*\\\}}", r"\\emptyset "),
        (rf"\\mathbb\s*\{{?\s*R\s*\}}?|\\R{NOT_LETTER}", r"\\mathbb{R}"),
        (r"\\%", "%"),
        (rf"\\equiv{NOT_LETTER}", "="),
        (rf"\(?\s*\\[pb]?mod{NOT_LETTER}\s*(?:\{{\s*(\d+)\s*\}}|(\d+))\s*\)?", r"\\mod \1\2"),
        # Brackets that look away from an open end: ]0, 1[.
        (rf"\]\s*{ENDS}\s*\[", r"(\1)"),
        (rf"\]\s*{ENDS}\s*\]", r"(\1]"),
        (rf"\[\s*{ENDS}\s*\[", r"[\1)"),
        (r"\+/-", r"\\pm "),
        (r"\\[cld]?dots|\.\.\.+", r"\\ldots "),
        # A letter set as text after a number is a unit: 3\text{ m}, 5\mathrm{m/s}.
        (rf"([\d)}}]\s*)\\(?:{MACROS})\s*\{{\s*([msghLlNJWV])\s*(?=[}}/])", r"\1\\text{\2unit"),
        (rf"\\(?:{MACROS})\s*\{{\s*([a-zA-Z]|[\d.,]+)\s*\}}", r"\1"),
        (rf"\\(?:{MACROS})\s*\{{([^{{}}]*)\}}", r" \1 "),
        (r"\{\\rm\s+([^{}]*)\}", r"\1"),
        (rf"{DEGREE}\s*C{NOT_LETTER}", " celsius "),
        (rf"{DEGREE}\s*F{NOT_LETTER}", " fahrenheit "),
        (
            rf"(\\(?:sin|cos|tan|cot|sec|csc)(?:\^\{{?\d\}}?)?)\s*([({{]?)\s*([\d.]+)\s*{DEGREE}",
            r"\1\2(\\frac{\3\\pi}{180})",
        ),
        (rf"(?<=[\d)}}]){DEGREE}$", " degree"),
        (DEGREE, ""),
        (r"\*\*", "^"),
        (r"\*", r"\\cdot "),
        (r"(?<=\d)\s*[xX]\s*(?=10\s*\^)", r"\\times "),
        (r"(?<![\\a-zA-Z])(?:infinity|inf)(?![a-zA-Z])", r"\\infty "),
        (rf"(?<![\\a-zA-Z])({FUNCTIONS}){NOT_LETTER}", r"\\\1 "),
        (r"(?<![\\a-zA-Z])sqrt(?=\d)", r"\\sqrt "),
        (r"\\sqrt\s*(\[\d+\])?\s*(\d+|(?<=\s)[a-zA-Z])", r"\\sqrt\1{\2}"),
        # The real root, where a parser would take the principal one of three.
        (r"\\sqrt\s*\[(\d*[13579])\]\s*\{\s*-\s*([\d./]+)\s*\}", r"(-\\sqrt[\1]{\2})"),
        (r"\\log\s*_\s*(\w)\s*(?=[\w\\])", r"\\log_{\1} "),
        (r"\\frac(?:\s*(?=\d)|\s+)([\da-zA-Z])\s*([\da-zA-Z])", r"\\frac{\1}{\2}"),
        (r"\\frac\s*\{((?:[^{}]|\{[^{}]*\})*)\}\s*(\d)", r"\\frac{\1}{\2}"),
        (r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{"),
        (r"\\frac\s+\{", r"\\frac{"),
        (r"\^\s*(-?\d+)", r"^{\1}"),
        (r"\+\s*-|-\s*\+", "-"),
        (r"-\s*-", "+"),
        (r"(^|[(\[,;={])\s*\+", r"\1"),
        # Mixed numbers. A parser would read the first as a product and the second as 2, then 2/3.
        (r"(?<![\w.^}])(\d+)\s*\\frac\{(\d+)\}\{(\d+)\}", r"(\1+\\frac{\2}{\3})"),
        (r"(?<![\w.^}])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\w.])", r"(\1+\\frac{\2}{\3})"),
        (r"(?<=\d)\s*\((?=[^()]*\))", r"\\cdot ("),
        (r"\s+", " "),
        (r"^ ?(?:= ?)?| ?[.;,]? ?$", ""),
    )
)
THOUSANDS = re.compile(r"(?<![\d,.])(?:[1-9]\d{0,2}(?:,\d{3})+|[1-9]\d?(?:,\d\d)+,\d{3})(?!\d|,\d)")
SPACED_THOUSANDS = re.compile(r"-?[1-9]\d{0,2}(?: \d{3})+(?:\.\d+|,\d\d?)?")


def tidy(text: str) -> str:
    r"""Rewrite one answer in the common spelling.

    >>> tidy(r"$\left( 3, \dfrac{\pi}{2} \right)$")
    '( 3, \\frac{\\pi}{2} )'
    """
    text = plain_amount(QUOTED.sub(r"\1", INVISIBLE.sub("", text).strip()))
    text = VULGAR.sub(lambda m: " " + unicodedata.normalize("NFKC", m.group()), text)
    text = SUPERSCRIPT.sub(lambda m: f"^{{{unicodedata.normalize('NFKC', m.group())}}}", text)
    text = SUBSCRIPT.sub(lambda m: f"_{{{unicodedata.normalize('NFKC', m.group())}}}", text)
    for symbol, replacement in SYMBOLS.items():
        text = text.replace(symbol, replacement)
    text = unicodedata.normalize("NFKC", text).replace("−", "-").replace("⁄", "/")
    for pattern, replacement in REWRITES:
        text = pattern.sub(replacement, text)
    text = _round_to_curly(text)
    if SPACED_THOUSANDS.fullmatch(text):
        text = text.replace(" ", "").replace(",", ".")
    return text


def join_thousands(text: str) -> str:
    """Drop the commas of 1,234, but not inside brackets: (1,234) is a pair.

    >>> join_thousands("1,234 and (1,234)")
    '1234 and (1,234)'
    """
    parts, depth, start = [], 0, 0
    for match in re.finditer(r"\\[{}]|[()\[\]]", text):
        piece = text[start : match.start()]
        parts.append((piece if depth else _without_commas(piece)) + match.group())
        depth = max(0, depth + (1 if match.group()[-1] in "([{" else -1))
        start = match.end()
    rest = text[start:]
    return "".join(parts) + (_without_commas(rest) if depth == 0 else rest)


def _without_commas(text: str) -> str:
    return THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)


def squash(text: str) -> str:
    """Drop the spaces that do not matter: all but those between two digits."""
    return re.sub(r"(?<!\d) +| +(?!\d)", "", text)


def split_top_level(text: str, separator: str) -> list[str]:
    """Split where the pattern ``separator`` matches outside of all brackets."""
    token = re.compile(
        rf"(?P<cut>{separator})|(?P<open>\\\{{|[(\[{{])|(?P<close>\\\}}|[)\]}}])|\\."
    )
    parts, depth, start = [], 0, 0
    for match in token.finditer(text):
        if match["open"]:
            depth += 1
        elif match["close"]:
            depth = max(0, depth - 1)
        elif match["cut"] and depth == 0:
            parts.append(text[start : match.start()])
            start = match.end()
    return [part.strip() for part in [*parts, text[start:]]]


def _round_to_curly(text: str) -> str:
    r"""``\sqrt(2)`` and ``x^(1/2)`` as their authors meant them: ``\sqrt{2}``, ``x^{1/2}``."""
    position = 0
    while match := re.compile(r"(\\sqrt|\^)\s*\(").search(text, position):
        start = match.end()
        end, depth = start, 1
        while end < len(text) and depth:
            depth += (text[end] == "(") - (text[end] == ")")
            end += 1
        if depth:
            return text
        text = f"{text[: match.start()]}{match[1]}{{{text[start : end - 1]}}}{text[end:]}"
        position = match.start() + len(match[1])
    return text


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
