r"""Answers of several parts: lists, sets, tuples, intervals, unions and inequalities."""

import re
from dataclasses import dataclass
from itertools import accumulate

from nemo_like.rewards.math.text import split_top_level

LIST_SEPARATOR = r"[,;]|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])"
VARIABLE = re.compile("[a-zA-Z]")
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
