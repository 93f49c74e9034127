"""The tests of a row, in the forms that data sets have them in."""

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_like.errors import UserError

_FORMS = (
    "write {inputs: [...], outputs: [...]}, a list of {input, output}, or a list of assert "
    "statements"
)


@dataclass(frozen=True)
class Printed:
    """A whole program: what it reads and should print."""

    stdin: str
    stdout: str


@dataclass(frozen=True)
class Returned:
    """A function of the program: its arguments and what it should return."""

    name: str
    arguments: list[Any]
    value: Any


@dataclass(frozen=True)
class Asserted:
    """Statements that run after the program, and should not raise."""

    code: str


Case = Printed | Returned | Asserted


def cases_of(tests: Any, fn_name: str | None = None) -> list[Case]:
    """Read a row's ``tests``, or the JSON text of them; UserError if there are none to pass."""
    if isinstance(tests, str):
        tests = _read(tests)
    if isinstance(tests, Mapping):
        fn_name = tests.get("fn_name") or fn_name
        inputs, outputs = tests.get("inputs"), tests.get("outputs")
        if not isinstance(inputs, list) or not isinstance(outputs, list):
            raise UserError(f"tests are an object without lists of inputs and outputs; {_FORMS}.")
        if len(inputs) != len(outputs):
            raise UserError(f"tests have {len(inputs)} inputs and {len(outputs)} outputs.")
        tests = [{"input": one, "output": two} for one, two in zip(inputs, outputs, strict=True)]
    if not isinstance(tests, list):
        raise UserError(f"tests are a {type(tests).__name__}; {_FORMS}.")
    if not tests:
        raise UserError("the row has no tests: nothing could be passed or failed.")
    return [_case(one, fn_name, index) for index, one in enumerate(tests)]


def _case(test: Any, fn_name: str | None, index: int) -> Case:
    if isinstance(test, str):
        try:
            tree = ast.parse(test)
        except (SyntaxError, ValueError) as error:
            raise UserError(f"test {index} is not valid Python: {error}.") from error
        if not tree.body:
            raise UserError(f"test {index} is empty.")
        return Asserted(test)
    if not isinstance(test, Mapping) or not {"input", "output"} <= test.keys():
        raise UserError(f"test {index} has no input and output; {_FORMS}.")
    given, wanted = test["input"], test["output"]
    name = test.get("fn_name") or fn_name
    if name is None:
        return Printed(_text(given, index), _text(wanted, index))
    if isinstance(given, str):  # an argument a line, as LiveCodeBench has them
        arguments = [_value(line, index) for line in given.splitlines()]
        return Returned(name, arguments, _value(wanted, index))
    if not isinstance(given, list):
        raise UserError(f"test {index}: the input of {name} is not a list of its arguments.")
    return Returned(name, given, wanted)


def _text(value: Any, index: int) -> str:
    """Text, or a list of lines."""
    if isinstance(value, Sequence) and all(isinstance(line, str) for line in value):
        return value if isinstance(value, str) else "\n".join(value)
    raise UserError(
        f"test {index} has a {type(value).__name__} where a program reads or prints text; set "
        "fn_name to test a function."
    )


def _value(value: Any, index: int) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise UserError(f"test {index}: {value[:40]!r} is not a value of JSON.") from error


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(f"tests are a text that is not JSON; {_FORMS}.") from error
