r"""Equality of single expressions: rational numbers exactly, everything else at sample points."""

import functools
import math
import random
import re
from collections.abc import Iterable
from fractions import Fraction
from itertools import accumulate
from typing import Any

import sympy
from latex2sympy2_extended import latex2sympy
from math_verify.grader import sympy_expr_eq

Parsed = sympy.Basic | sympy.MatrixBase
Point = list[tuple[sympy.Basic, sympy.Expr]]

DIGITS = 30
MANY_DIGITS = 120
"""Enough to tell the square root of 10^40 + 1 from 10^20, which have 40 digits in common."""
NUM_POINTS = 4
MAX_DIGITS = 50_000
MAX_EXPONENT_DIGITS = 8
MAX_DEPTH = 12
MAX_TERMS = 1000
# What the parser takes time without end for: x^x^x^x^x^x, \gcd(10^{10^8}, 3), \Gamma(10000000).
ENDLESS = re.compile(
    r"(?:\^ ?\{?\w\}? ?){6}|\\(?:gcd|lcm).*[\^!]|\\(?:Gamma|binom|choose).*\d{5}|\d{5}.*\\choose"
)
OPERATOR = re.compile(r"\\(?:i*int|oint|lim)(?![a-zA-Z])")
PRIMED = re.compile(r"([a-zA-Z])('+)")
MIN_DIGITS_TO_ROUND = 3
"""33.3 stands for 100/3, but 33 and 0.3 do not stand for 100/3 and 1/3."""
MIN_DIGITS_OF_ROUNDED_GOLD = 4
"""A gold of 33.33 may be a rounded number that the answer has more digits of; 12.5 is exact."""
DECIMAL = r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)"
SCIENTIFIC = re.compile(
    rf"({DECIMAL})(?: ?\\(?:times|cdot) ?10 ?\^ ?\{{?([+-]?\d{{1,4}})\}}?|[eE]([+-]?\d{{1,3}}))"
)
FRACTION = re.compile(
    rf"(-?)(?:\\frac ?\{{ ?({DECIMAL}) ?\}} ?\{{ ?({DECIMAL}) ?\}}|({DECIMAL}) ?/ ?({DECIMAL}))"
)
REPEATING = re.compile(r"(-?\d*)\.(\d*)\\(?:overline|bar) ?\{ ?(\d+) ?\}")
LETTER = re.compile(r"(?<![a-zA-Z\\])[a-zA-Z](?![a-zA-Z])")
IMAGINARY = re.compile(r"(?<![a-zA-Z\\])i(?![a-zA-Z])")


def number_of(text: str) -> Fraction | None:
    r"""Exact value of a decimal, a fraction or a number in scientific notation; None for the rest.

    >>> number_of(r"\frac{1}{2}"), number_of("007.50"), number_of(r"\pi")
    (Fraction(1, 2), Fraction(15, 2), None)
    """
    text = re.sub(r"^- ", "-", text.strip())
    if re.fullmatch(DECIMAL, text):
        return Fraction(text)
    if match := SCIENTIFIC.fullmatch(text):
        return Fraction(match[1]) * Fraction(10) ** int(match[2] or match[3])
    if match := REPEATING.fullmatch(text):
        whole, start, period = match.groups()
        tail = Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(start))
        return Fraction(f"{whole or 0}.{start or 0}") + (-tail if whole.startswith("-") else tail)
    if match := FRACTION.fullmatch(text):
        top, bottom = (match[2], match[3]) if match[2] else (match[4], match[5])
        if Fraction(bottom) == 0:
            return None
        return Fraction(top) / Fraction(bottom) * (-1 if match[1] else 1)
    return None


def expressions_equal(gold: str, given: str) -> bool:
    """Whether two single expressions have the same value, wherever both are defined."""
    a, b = number_of(gold), number_of(given)
    if a is not None and b is not None:
        return a == b or _rational_roundings_equal(a, gold.strip(), b, given.strip())
    if OPERATOR.search(given) and not OPERATOR.search(gold):
        return False  # an integral that is still to be taken is the question, not its answer
    letters, others = set(LETTER.findall(gold)), set(LETTER.findall(given))
    if letters != others and {c.lower() for c in letters} == {c.lower() for c in others}:
        return False  # the parser takes X for x
    left, right = parse(gold), parse(given)
    if left is None or right is None:
        return False
    same = _agree(left, right)
    if same is None:  # matrices, sets and other things without a value
        return _equal_for_math_verify(left, right)
    return same or _constant_rounds_to(left, given) or _constant_rounds_to(right, gold)


def proportional(gold_sides: list[str], given_sides: list[str]) -> bool:
    """Whether two equations are one: their differences of sides are a constant multiple."""
    parsed = [parse(side) for side in (*gold_sides, *given_sides)]
    sides = [side for side in parsed if isinstance(side, sympy.Expr)]
    if len(sides) < len(parsed):
        return False
    a, b = sides[0] - sides[1], sides[2] - sides[3]
    if a.free_symbols != b.free_symbols or not a.free_symbols:
        return False
    values = [(_value(a, point), _value(b, point)) for point in _points(a.free_symbols)]
    ratios = [top / bottom for top, bottom in values if top and bottom]
    return len(ratios) >= 2 and all(_close(ratio, ratios[0]) for ratio in ratios)


@functools.lru_cache(maxsize=256)
def parse(text: str) -> Parsed | None:
    """Parse the whole text, or nothing; "2 3" and 45' (minutes, feet) are not taken for numbers."""
    if (number := number_of(text)) is not None:
        return sympy.Rational(number.numerator, number.denominator)
    if re.search(r"\d \d|(?<!_)\d ?'", text) or _depth(text) > MAX_DEPTH or ENDLESS.search(text):
        return None
    text = PRIMED.sub(lambda m: f"{m[1]}_{{{'p' * len(m[2])}}}", text)  # else f'(x) is f(x)
    is_complex = IMAGINARY.search(text) is not None
    try:
        expression = latex2sympy(
            text, is_real=not is_complex, convert_degrees=False, normalization_config=None
        )
        if not isinstance(expression, (sympy.Basic, sympy.MatrixBase)):
            return None
        if not isinstance(expression, sympy.Expr):
            return expression
        if not _num_digits(expression) <= MAX_DIGITS:
            return None
        floats = {value: sympy.Rational(str(value)) for value in expression.atoms(sympy.Float)}
        units = {s: sympy.I for s in expression.free_symbols if is_complex and str(s) == "i"}
        return expression.xreplace(floats | units)
    except Exception:  # the parser's own are bare ones, and sympy has no \max of a complex i
        return None


def _depth(text: str) -> int:
    return max(accumulate((c in "({[") - (c in ")}]") for c in text), default=0)


def _num_digits(expression: Any) -> float:
    """Upper bound of the digits that evaluating takes, without evaluating: towers are infinite."""
    if isinstance(expression, (sympy.Sum, sympy.Product)):
        bounds = [bound for _, *ends in expression.limits for bound in ends]
        if any(not (bound.is_Integer and abs(bound) <= MAX_TERMS) for bound in bounds):
            return math.inf
    if isinstance(expression, sympy.Rational):
        return len(str(expression.p)) + len(str(expression.q)) - 1
    if isinstance(expression, (sympy.Pow, sympy.exp, sympy.factorial, sympy.gamma, sympy.binomial)):
        is_binomial = isinstance(expression, sympy.binomial)
        argument: Any = expression.args[0 if is_binomial else -1]
        if _num_digits(argument) > MAX_EXPONENT_DIGITS:
            return math.inf
        try:
            size = abs(complex(argument.subs([(s, 2) for s in argument.free_symbols]).evalf(8)))
        except (OverflowError, TypeError, ValueError):  # f(x)! has no size
            return math.inf
        each = _num_digits(expression.base) if isinstance(expression, sympy.Pow) else len(f"{size}")
        return each * max(1.0, size)
    return 1 + sum(_num_digits(argument) for argument in expression.args)


def _agree(a: Parsed, b: Parsed) -> bool | None:
    """Compare at sample points; None if the two cannot be evaluated, as matrices and sets."""
    if a == b:
        return True
    if not isinstance(a, sympy.Expr) or not isinstance(b, sympy.Expr):
        return None
    symbols = a.free_symbols | b.free_symbols
    compared = 0
    for point in _points(symbols):
        digits = DIGITS if compared else MANY_DIGITS
        x, y = _value(a, point, digits), _value(b, point, digits)
        if x is None or y is None:
            continue
        is_real = x.is_real and y.is_real
        if not is_real and any(value.is_negative for _, value in point):
            continue  # roots of negative numbers: equal for positive arguments is equal
        compared += 1
        if not _close(x, y, digits):
            return False
    return True if compared else None


def _equal_for_math_verify(a: Parsed, b: Parsed) -> bool:
    try:
        return bool(sympy_expr_eq(a, b, float_rounding=12, numeric_precision=DIGITS))
    except Exception:  # one comparison: sympy raises anything for odd mixtures of sets and tuples
        return False


def _points(symbols: Iterable[sympy.Basic]) -> list[Point]:
    """Positive points, then negative ones; one empty point where there is no symbol."""
    if not symbols:
        return [[]]
    rng = random.Random(0)
    ordered = sorted(symbols, key=str)
    return [
        [(symbol, sympy.Rational(sign * rng.randint(20, 400), 97)) for symbol in ordered]
        for sign in (1, -1)
        for _ in range(NUM_POINTS)
    ]


def _value(expression: sympy.Expr, point: Point, digits: int = DIGITS) -> sympy.Expr | None:
    try:
        value = expression.subs(point).doit()
        value = value if value.is_Rational else value.evalf(digits, maxn=3 * digits)
        if not all(part.is_Number for part in value.as_real_imag()):
            return None  # sympy could not evaluate it: i mod 10
    except Exception:  # sympy raises anything, RecursionError included
        return None
    return value if value.is_number and value.is_finite else None


def _close(a: sympy.Expr, b: sympy.Expr, digits: int = DIGITS) -> bool:
    if a.is_Rational and b.is_Rational:
        return bool(a == b)
    tolerance = sympy.Float(f"1e-{digits - 8}", digits)
    return bool(abs(a - b) <= tolerance * max(abs(a), abs(b)))


def _is_rounding_of(value: Fraction, decimal: str, min_digits: int) -> bool:
    """Whether ``decimal`` is ``value`` rounded to enough significant digits."""
    if not re.fullmatch(r"[+-]?\d*\.\d+", decimal):
        return False
    digits = re.sub(r"\D", "", decimal).lstrip("0")
    places = len(decimal.partition(".")[2])
    is_near = abs(value - Fraction(decimal)) <= Fraction(1, 2 * 10**places)
    return is_near and len(digits) >= min_digits


def _never_ends(value: Fraction) -> bool:
    """Whether the decimal expansion is infinite: 100/3, but not 1/8."""
    return pow(10, value.denominator.bit_length(), value.denominator) != 0


def _rational_roundings_equal(gold: Fraction, gold_text: str, given: Fraction, text: str) -> bool:
    if _never_ends(gold):
        return _is_rounding_of(gold, text, MIN_DIGITS_TO_ROUND)
    if _never_ends(given):
        return _is_rounding_of(given, gold_text, MIN_DIGITS_TO_ROUND)
    is_finer = "." in text and len(text.partition(".")[2]) > len(gold_text.partition(".")[2])
    return is_finer and _is_rounding_of(given, gold_text, MIN_DIGITS_OF_ROUNDED_GOLD)


def _constant_rounds_to(constant: Parsed, decimal: str) -> bool:
    """Whether ``decimal`` is the rounded value of a constant such as sqrt(2) / 3."""
    if not isinstance(constant, sympy.Expr) or constant.free_symbols:
        return False
    value = _value(constant, [])
    if value is None or not value.is_real:
        return False
    exact = Fraction(str(value.evalf(DIGITS)))
    ends = exact == round(exact, DIGITS // 2)
    return not ends and _is_rounding_of(exact, decimal.strip(), MIN_DIGITS_TO_ROUND)
