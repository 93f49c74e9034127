r"""Decide whether two mathematical answers are equal.

Lists, sets, tuples, intervals, equations, units and percentages are taken apart here, as text.
Only single expressions reach math-verify's LaTeX parser (``expression``), and they count only
if it reads them whole: a fragment of an answer never stands for the answer.
"""

import re
from dataclasses import dataclass
from itertools import accumulate

from nemo_like.rewards.math.expression import expressions_equal, number_of, parse, proportional
from nemo_like.rewards.math.text import (
    join_thousands,
    letters_of,
    same_letters,
    split_top_level,
    squash,
    tidy,
    with_answer,
)
from nemo_like.rewards.math.units import is_known_unit, is_words, plain_words, strip_units

MAX_CHARACTERS = 400
"""Longer texts are no answers, but accidents: they are compared as they are."""
MOST_WORDS = 4
"""Longest text that counts as an answer in words; longer prose cannot be scored."""


LIST_SEPARATOR = r"[,;]|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])"
VARIABLE = re.compile("[a-zA-Z]")
_ROUNDED = re.compile(
    r"(.*(?:(?<![_{\w])\d|\\[dt]?frac|\\pi|π).*?)(?:≈|\\approx(?![a-zA-Z])).*", re.DOTALL
)
"""A value, the first group, and what it is rounded to."""
_NAME = re.compile(r"(?!\\(?:sin|cos|tan|log|ln|sqrt))[\\|{]?[a-zA-Z][a-zA-Z\\'|} ]*")
_NAMES = re.compile(r"\( ?[a-zA-Z](?: ?, ?[a-zA-Z])+ ?\)")
_BESIDE_NAME = re.compile(
    r"_\{?\w+\}?|\^\{-1\}|\\mathbb ?"  # indices, inverses, fonts
    r"|(?<=[a-zA-Z}'])(?:\([^()=]*\)|\[[^\[\]=]*\])"  # arguments
    r"|(?<=[a-zA-Z})]) ?\+ ?(?=[a-zA-Z])"  # sums of names
)
RELATION = r"\\le(?![a-zA-Z])|\\ge(?![a-zA-Z])|<|>"


@dataclass(frozen=True)
class Items:
    """A list, set, tuple or interval. ``brackets`` is '', '{}' or an opening and a closing one."""

    brackets: str
    items: list[str]
    variable: str | None = None
    """The unknown, if the interval was written as an inequality."""


def read_items(text: str) -> Items | None:
    """Read a list, set, tuple, interval, union or one-variable inequality; None for the rest."""
    if r"\begin" in text:
        return None
    members = [part for part in split_top_level(text, LIST_SEPARATOR) if part]
    if len(members) > 1:
        return Items("", members)
    pieces = split_top_level(text, r"\\cup(?![a-zA-Z])")
    if len(pieces) > 1:
        return Items("", pieces)
    if text.count(r"\pm") == 1:
        return Items("", [text.replace(r"\pm", sign).strip(" +") for sign in "+-"])
    text = re.sub(r"^[a-zA-Z] ?\\in(?![a-zA-Z]) ?", "", text)
    if text == r"\mathbb{R}":
        return Items("()", [r"-\infty", r"\infty"])
    bracketed = re.fullmatch(r"(\\\{|[(\[])(.*)(\\\}|[)\]])", text)
    if bracketed and split_top_level(text + " , x", ",")[:-1] == [text.strip()]:
        inner = [part for part in split_top_level(bracketed[2], "[,;]") if part]
        if bracketed[1] == r"\{":
            return Items("{}", inner)
        if len(inner) > 1 and _closes_at_end(text):
            return Items(bracketed[1] + bracketed[3], inner)
    return _inequality(text)


def _closes_at_end(text: str) -> bool:
    depths = list(accumulate((c in "([") - (c in ")]") for c in text))
    return 0 in depths and depths.index(0) == len(text) - 1


def _inequality(text: str) -> Items | None:
    r"""``0 < x \le 5`` as the interval (0, 5], ``x \ne 2`` as the two around 2."""
    if hole := re.fullmatch(r"([a-zA-Z]) ?\\ne ?([^,;=]+)", text):
        return Items("", [rf"(-\infty, {hole[2]})", rf"({hole[2]}, \infty)"], hole[1])
    parts = split_top_level(text, RELATION)
    signs = re.findall(RELATION, text)
    if len(signs) != len(parts) - 1 or not 2 <= len(parts) <= 3 or "=" in text:
        return None
    if signs[0] in (">", r"\ge"):
        flip = {">": "<", r"\ge": r"\le", "<": ">", r"\le": r"\ge"}
        parts, signs = parts[::-1], [flip[sign] for sign in reversed(signs)]
    if any(sign in (">", r"\ge") for sign in signs):
        return None
    variable = re.compile(r"[a-zA-Z]|\\[a-z]+")
    if len(parts) == 2 and variable.fullmatch(parts[0]) and not VARIABLE.fullmatch(parts[1]):
        parts, signs = [r"-\infty", *parts], ["<", *signs]
    elif len(parts) == 2:
        parts, signs = [*parts, r"\infty"], [*signs, "<"]
    if not variable.fullmatch(parts[1]):
        return None
    brackets = ("(" if signs[0] == "<" else "[") + (")" if signs[1] == "<" else "]")
    return Items(brackets, [parts[0], parts[2]], parts[1])


def equal(gold: str, given: str) -> bool:
    """Whether ``given`` is the same answer as ``gold``; some policies depend on which is which."""
    if max(len(gold), len(given)) > MAX_CHARACTERS:
        return squash(gold) == squash(given)
    gold_text, given_text = tidy(gold), tidy(_ROUNDED.sub(r"\1", given))
    if not gold_text or not given_text:
        return False
    joined = join_thousands(gold_text)
    is_number = re.search(r",0\d\d(?!\d)", given_text)  # 1,000 is no list of 1 and 0
    is_list = isinstance(read_items(joined), Items) and not is_number
    if is_list and same_letters(joined, given_text) is None and _equal(joined, given_text):
        return True  # 100,200,300 is a list where a list is wanted
    return _choices_equal(joined, join_thousands(given_text))


def _choices_equal(gold: str, given: str) -> bool:
    """Compare answers that may begin with the letter of a choice, as in (A) 5, or be just that."""
    same = same_letters(gold, given)
    if same is not None:
        return same
    (gold_letter, gold_rest), (given_letter, given_rest) = with_answer(gold), with_answer(given)
    if gold_letter and given_letter:
        return gold_letter == given_letter and _equal(gold_rest, given_rest)
    gold_only, given_only = letters_of(gold)[0], letters_of(given)[0]
    if given_letter and (gold_only or VARIABLE.fullmatch(gold)):
        return gold_only == given_letter
    if gold_letter and (given_only or VARIABLE.fullmatch(given)):
        return given_only == gold_letter
    return _equal(gold_rest, given_rest) or (given_rest != given and _equal(gold, given))


def comparable(gold: str) -> bool:
    """Whether an answer can be told from other answers: every part is read whole, or is a word."""
    text = join_thousands(tidy(gold)) if len(gold) <= MAX_CHARACTERS else ""
    return bool(text) and _comparable(text)


def _comparable(text: str) -> bool:
    items = read_items(text)
    if items is not None:
        return all(_comparable(item) for item in items.items)
    if text == r"\ldots" or re.fullmatch(r"[\d:]+", text):
        return True
    sides = split_top_level(text, rf"(?<!\\)=|{RELATION}")
    if len(sides) > 1:
        return all(side and _comparable(side) for side in sides)
    core, _, _ = strip_units(text)
    if is_words(core):
        return len(core.split()) <= MOST_WORDS and not re.search(r"[\\{}^_]", core)
    return number_of(core) is not None or parse(_strip_base(core)[0]) is not None


def _equal(gold: str, given: str) -> bool:
    if squash(gold) == squash(given):
        return True
    gold_items, given_items = read_items(gold), read_items(given)
    if gold_items or given_items:
        return _items_equal(gold, gold_items, given, given_items)
    gold_name, gold_value = _assignment(gold)
    given_name, given_value = _assignment(given)
    if gold_name and given_name and _same_name(gold_name, given_name):
        return _equal(gold_value, given_value)
    gold_sides, given_sides = (split_top_level(text, r"(?<!\\)=") for text in (gold, given))
    if len(gold_sides) == len(given_sides) == 2:
        return proportional(gold_sides, given_sides)
    if gold_name and len(given_sides) == 1:
        return _equal(gold_value, given)
    if given_name is not None and len(gold_sides) == 1:
        return _equal(gold, given_value)
    return len(gold_sides) == len(given_sides) == 1 and _scalars_equal(gold, given)


def _same_name(gold: str, given: str) -> bool:
    """Whether two unknowns are one: x_1 and x_2 may be the solutions x, but are not each other."""
    names = [squash(gold), squash(given)]
    if not all("_" in name for name in names):
        names = [re.sub(r"_\{?\d\}?", "", name) for name in names]
    return names[0] == names[1]


def _items_equal(gold: str, a: Items | None, given: str, b: Items | None) -> bool:
    if a is None or b is None:
        one, other = (b, gold) if a is None else (a, given)
        assert one is not None
        if one.brackets == "{}" and len(one.items) == 1:
            return _equal(one.items[0], other)
        name, value = _assignment(other)
        if name is None or value == other:
            return False
        return _equal(gold, value) if a is not None else _equal(value, given)
    goes_on = any(r"\ldots" in item for item in a.items + b.items)
    if a.brackets == b.brackets == "{}" and not goes_on:
        return _same_set(a.items, b.items)
    if len(a.items) != len(b.items):
        return False
    if a.variable and b.variable and a.variable != b.variable:
        return False
    kinds = {a.brackets, b.brackets}
    if kinds <= {"", "{}"} and not goes_on:
        return _same_members(a.items, b.items)
    alike = len(kinds) == 1 or kinds <= {"", "{}"} or kinds == {"", "()"}
    return alike and all(_equal(x, y) for x, y in zip(a.items, b.items, strict=True))


def _same_members(gold: list[str], given: list[str]) -> bool:
    rest = list(given)
    for item in gold:
        match = next((other for other in rest if _equal(item, other)), None)
        if match is None:
            return False
        rest.remove(match)
    return True


def _same_set(gold: list[str], given: list[str]) -> bool:
    """Whether each member of one is in the other: a set may name one twice."""
    return all(any(_equal(x, y) for y in given) for x in gold) and all(
        any(_equal(x, y) for x in gold) for y in given
    )


def _assignment(text: str) -> tuple[str | None, str]:
    """Split ``f(2) = 5`` or ``m + n = 5`` into name and value, ``2 + 3 = 5`` into '' and value."""
    sides = split_top_level(text, r"(?<!\\)=")
    if len(sides) < 2 or not all(sides):
        return None, text
    name, value = sides[0], sides[-1]
    bare = _BESIDE_NAME.sub("", name)
    if _NAMES.fullmatch(name) or _NAME.fullmatch(bare):
        return name, value
    if VARIABLE.fullmatch(value) and number_of(name) is not None:
        return value, name
    if all(_scalars_equal(value, side) for side in sides[:-1]):
        return "", value
    return None, text


def _scalars_equal(gold: str, given: str) -> bool:
    if ":" in gold or ":" in given:
        parts = [[part.strip() for part in text.split(":")] for text in (gold, given)]
        same = len(parts[0]) == len(parts[1])
        return same and all(_equal(a, b) for a, b in zip(*parts, strict=True))
    residue, modulus = _strip_modulus(gold)
    if modulus:
        given, given_modulus = _strip_modulus(given)
        return given_modulus in ("", modulus) and _scalars_equal(residue, given)
    gold, gold_unit, gold_percent = strip_units(gold)
    given, given_unit, given_percent = strip_units(given)
    if gold_unit != given_unit and is_known_unit(gold_unit) and is_known_unit(given_unit):
        return False
    gold, given = _matching_base(gold, given)
    if is_words(gold) or is_words(given):
        return plain_words(gold) == plain_words(given)
    if gold_percent or given_percent:
        return _percentages_equal(gold, gold_percent, given, given_percent)
    return expressions_equal(gold, given)


def _strip_modulus(text: str) -> tuple[str, str]:
    r"""Split ``5 \mod 7`` into the residue and the modulus."""
    match = re.fullmatch(r"(.*\S) ?\\mod (\d+)", text)
    return (match[1], match[2]) if match else (text, "")


def _percentages_equal(gold: str, gold_percent: bool, given: str, given_percent: bool) -> bool:
    if expressions_equal(gold, given):
        value = number_of(gold)
        # 28% against 28: the question asked "in percent". 0.28% against a gold of 0.28: it did not.
        return gold_percent or value is None or abs(value) > 1
    if gold_percent and given_percent:
        return False
    if gold_percent:
        return expressions_equal(_hundredth(gold), given)
    return expressions_equal(gold, _hundredth(given))


def _hundredth(text: str) -> str:
    """A decimal stays one, so that 33.3% is 1/3, rounded."""
    decimal = re.fullmatch(r"(-?)(\d*)\.(\d+)", text)
    if decimal is None:
        return rf"\frac{{{text}}}{{100}}"
    sign, whole, places = decimal.groups()
    return f"{sign}{whole.zfill(3)[:-2]}.{whole.zfill(2)[-2:]}{places}"


def _strip_base(text: str) -> tuple[str, str]:
    match = re.fullmatch(r"\(?(\d[\dA-F]*)\)?_ ?\{? ?(\w+) ?\}?", text)
    return (match[1], match[2]) if match else (text, "")


def _matching_base(gold: str, given: str) -> tuple[str, str]:
    """Drop a base that only one side states (101_2 against 101); keep two that differ."""
    (gold_digits, gold_base), (given_digits, given_base) = _strip_base(gold), _strip_base(given)
    if gold_base and given_base and gold_base != given_base:
        return gold, "different base"
    return gold_digits, given_digits
