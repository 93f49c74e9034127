# ruff: noqa: RUF001 (the signs that look alike are the subject)
r"""Amounts of money and numbers whose digits are grouped, as an answer's whole text."""

import re

CURRENCIES = {
    "dollar": r"(?:US)?\\?[$]|USD",
    "euro": "€|EUR",
    "pound": r"£|GBP|\\pounds(?![a-zA-Z])",
    "yen": "¥|JPY",
    "rupee": r"₹|Rs\.?|INR",
    "cent": "¢",
}
NUMBER = r"-?(?:\d|\.\d)(?:[\d.,' ]*\d)?"
MONEY = tuple(
    (re.compile(rf"(-?)\s*(?:{sign})\s*({NUMBER})|({NUMBER})\s*(?:{sign})"), name)
    for name, sign in CURRENCIES.items()
)
# Where neither a decimal point nor a list can be meant: 1.234.567, 1'234, 1_234 and 1.234,56.
POINTS = re.compile(r"-?[1-9]\d{0,2}(?:\.\d{3}){2,}")
SIGNS = re.compile(r"-?[1-9]\d{0,2}(?:(?:['’]\d{3})+|(?:\\?_\d{3})+)(?:\.\d+)?")
DECIMAL_COMMA = re.compile(r"-?[1-9]\d{0,2}(?:\.\d{3})+,\d\d?")


def plain_amount(text: str) -> str:
    r"""The text, or an amount with its digits in one piece and the name of its currency after it.

    >>> plain_amount(r"\$1'200"), plain_amount("1.234,56 €"), plain_amount("x + 1")
    ('1200 dollar', '1234.56 euro', 'x + 1')
    """
    for pattern, name in MONEY:
        if match := pattern.fullmatch(text.strip()):
            sign, after, before = match.groups()
            return f"{sign or ''}{_in_one_piece(after or before)} {name}"
    return _in_one_piece(text)


def _in_one_piece(number: str) -> str:
    if POINTS.fullmatch(number):
        return number.replace(".", "")
    if SIGNS.fullmatch(number):
        return re.sub(r"['’]|\\?_", "", number)
    if DECIMAL_COMMA.fullmatch(number):
        return number.replace(".", "").replace(",", ".")
    return number
