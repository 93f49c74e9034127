# ruff: noqa: RUF001 (the signs that look alike are the subject)
r"""Money, grouped digits, units, which may be left out, and words that are the answer."""

import re

MATH_WORDS = {"mod", "gcd", "lcm", "max", "min"}
# Words that change a number's value rather than name its unit: "3 million", "5 minus 2".
VALUE_WORD = re.compile(
    r"\b(?:plus|minus|times|over|divided|multiplied|squared|cubed|hundred|thousand|million|billion|"
    r"trillion|dozen|half|less|more|than|not|to|factorial|choose|power|base)\b",
    re.IGNORECASE,
)
UNITS = {
    "millimeter": "mm", "millimetre": "mm", "centimeter": "cm", "centimetre": "cm", "meter": "m",
    "metre": "m", "kilometer": "km", "kilometre": "km", "inch": "in", "inche": "in", "foot": "ft",
    "feet": "ft", "yard": "yd", "mile": "mi", "gram": "g", "kilogram": "kg", "pound": "lb",
    "second": "sec", "minute": "min", "hour": "hr", "liter": "l", "litre": "l", "dollar": "dollar",
    "cent": "cent", "day": "day", "week": "week", "month": "month", "year": "year", "munit": "m",
    "gunit": "g", "sunit": "sec", "hunit": "hr", "lunit": "l", "junit": "joule",
    "nunit": "newton", "wunit": "watt", "vunit": "volt", "milliliter": "ml",
    "millilitre": "ml", "milligram": "mg", "millisecond": "ms", "celsiu": "celsius",
    "fahrenheit": "fahrenheit", "mph": "mi/hr", "kph": "km/hr", "kmh": "km/hr",
    "gigabyte": "gbyte", "megabyte": "mbyte", "kilobyte": "kbyte", "terabyte": "tbyte",
    "watt": "watt", "kilowatt": "kwatt", "joule": "joule", "newton": "newton", "volt": "volt",
    "hertz": "hz", "mole": "mol", "pascal": "pascal", "degree": "degree", "radian": "rad",
    "euro": "euro", "yen": "yen", "rupee": "rupee", "bit": "bit", "byte": "byte",
}  # fmt: skip
OF_CASE = {
    "GB": "gbyte", "MB": "mbyte", "KB": "kbyte", "kB": "kbyte", "TB": "tbyte", "Gb": "gbit",
    "Mb": "mbit", "kb": "kbit", "Hz": "hz", "kHz": "khz", "MHz": "megahz", "GHz": "gigahz",
    "kW": "kwatt", "MW": "megawatt", "mW": "milliwatt", "kWh": "kwh", "kJ": "kjoule",
    "kN": "knewton", "Pa": "pascal", "kPa": "kpascal", "MPa": "megapascal", "mV": "millivolt",
    "kV": "kvolt", "mA": "milliamp", "USD": "dollar", "EUR": "euro", "GBP": "pound", "INR": "rupee",
}  # fmt: skip
"""Units that differ by the case of a letter, or that lower case would make another word of."""
UNITS |= {unit: unit for unit in OF_CASE.values()}
KNOWN_UNITS = {unit for unit in UNITS.values() if "/" not in unit}
OF_LETTER = {"s": "sec", "h": "hr", "m": "m", "g": "g", "l": "l"}
"""What a letter stands for where it can be no variable: below the line of a unit."""
POWERS = {"square": "2", "sq": "2", "cubic": "3"}
# Signs beside which short words are products of variables: xy + 1, 2xy.
ALGEBRA = re.compile(r"[+^=_\\{}-]|\d[a-z]")
WORD = re.compile(r"(?<![a-zA-Z\\])[a-zA-Z]{2,}")
BARE_PRODUCT = re.compile(r"[abc]{2,3}|[b-df-hj-np-tv-z]{2,3}")
"""Two or three letters that spell no word: xy, but not on, which would be no."""
QUANTITY = re.compile(
    r"(?P<value>.*\d.*?)(?P<gap>\s*)(?P<unit>(?<=[\d)}\s])[a-zA-Z][a-zA-Z\s/.^{}\d-]*)"
)
RATE = re.compile(r"[mgl]/(?:s|h|min|ml|l)(?![a-zA-Z])")
PERCENT = re.compile(r"\s*(?:%|(?<![a-zA-Z])per ?cent(?:age)?(?: points?)?)\s*$", re.IGNORECASE)
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


def is_words(text: str) -> bool:
    """Whether the text holds a word that is no name of a function, and no product as in xy + 1."""
    if r"\begin" in text:
        return False
    words = [word for word in WORD.findall(text) if word.lower() not in MATH_WORDS]
    if not all(_is_product(word) for word in words):
        return True
    return bool(words) and not (ALGEBRA.search(text) or BARE_PRODUCT.fullmatch(text.strip()))


def plain_words(text: str) -> str:
    """Words without case, signs and articles.

    >>> plain_words("The Fox!"), plain_words("45 p.m.")
    ('fox', '45 pm')
    """
    text = re.sub(r"[^\w\s.:/+-]", " ", text).casefold()
    text = re.sub(r"(?<![a-z])([ap])\.m\.?(?![a-z])", r"\1m", text)
    return " ".join(word for word in text.split() if word not in ("the", "a", "an"))


def _is_product(word: str) -> bool:
    return len(word) <= 3 and word.islower() and word not in KNOWN_UNITS


def is_known_unit(unit: str) -> bool:
    """Whether units of this name, from ``strip_units``, can differ from others."""
    return all(part.rstrip("^23") in KNOWN_UNITS for part in unit.split("/"))


def _unit_name(text: str) -> str:
    """One name for all spellings of a unit; the first word if the others are not known.

    >>> _unit_name("kilometers per hour"), _unit_name("square feet"), _unit_name("cm of wire")
    ('km/hr', 'ft^2', 'cm')
    """
    first, *below = re.split(r"/|(?<![a-z])per(?![a-z])", text.lower())
    factors = [_factor(first, {}), *(_factor(one, OF_LETTER) for one in below)]
    known = [one for one in factors if one is not None]
    return "/".join(known) if len(known) == len(factors) else _singular(text)


def _factor(text: str, letters: dict[str, str]) -> str | None:
    tokens = re.findall(r"[a-z]+|[23]", text)
    powers = [POWERS.get(token, token) for token in tokens if token in POWERS or token.isdigit()]
    words = [token for token in tokens if token not in POWERS and not token.isdigit()]
    if len(words) != 1 or len(powers) > 1:
        return None
    name = letters.get(words[0], _singular(words[0]))
    if not is_known_unit(name):
        return None
    return f"{name}^{powers[0]}" if powers else name


def _singular(text: str) -> str:
    word: str = re.findall("[a-z]+", text.lower())[0].removesuffix("s")
    return UNITS.get(word, word)


def strip_units(text: str) -> tuple[str, str, bool]:
    """Split a quantity into its value, its unit ('' if none) and whether it is a percentage."""
    percent = PERCENT.search(text)
    if percent and percent.start() > 0:
        return text[: percent.start()].strip(), "", True
    match = QUANTITY.fullmatch(text)
    if match is None:
        return text, "", False
    value, gap = match["value"], match["gap"]
    unit = re.sub("[a-zA-Z]+", lambda word: OF_CASE.get(word[0], word[0]), match["unit"])
    first = re.findall("[a-zA-Z]+", unit)[0].lower()
    # Letters that touch a number are a product (2xyz), unless they spell a unit (35cm).
    is_known = is_known_unit(_singular(unit)) or first in POWERS
    is_unit = (gap and (len(first) >= 3 or RATE.match(unit))) or (is_known and len(first) >= 2)
    has_digits = re.search(r"\d", re.sub(r"\^\{?[23]\}?", "", unit))
    is_torn = value.count("{") != value.count("}")
    if not is_unit or is_torn or has_digits or VALUE_WORD.search(unit) or is_words(value):
        return text, "", False
    return value.strip(), _unit_name(unit), False


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
