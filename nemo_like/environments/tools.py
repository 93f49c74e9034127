"""Functions that the policy calls until it answers; ``environment.reward`` scores the answer.

A turn without a call is the answer. If a call cannot be parsed or fails, the policy gets an error
message, and the call is counted.
"""

import ast
import asyncio
import inspect
import json
import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from transformers.utils.chat_template_utils import get_json_schema

from nemo_like.data.tool_calls import reply_of
from nemo_like.doors import Door, error_text
from nemo_like.environments.protocol import (
    Action,
    Observation,
    StepResult,
    ToolCall,
    called,
    calls_of,
)
from nemo_like.errors import UserError

TOOLS = Door(
    "nemo_like.tools",
    {
        "calculate": "nemo_like.environments.tools.calculate",
        "python": "nemo_like.environments.tools.python",
    },
)
_KEY = "environment.options.tools"
_DESCRIPTION = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
SCHEMAS
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""
"""What the templates of Qwen2.5 and Hermes write."""
Side = Literal["left", "middle", "right"]


class Tools:
    """A conversation with functions."""

    def __init__(
        self,
        tools: Sequence[str | Callable[..., Any]] = ("calculate",),
        ends: Sequence[str] = (),
        max_result_chars: int = 2000,
        cut: Side = "right",
        in_messages: bool = False,
    ) -> None:
        """``tools``: ours by name, or ``file.py:function`` with types and a docstring that says
        what it and each argument are (Google's style); ``ends``: names of those that end the
        conversation when they are called. Of a result longer than ``max_result_chars`` characters
        the ``cut`` side is left out. ``in_messages``, for chat templates without tools: a system
        message describes them, calls are ``<tool_call>`` in the text, and results a user's message.
        """
        self._tools: dict[str, Callable[..., Any]] = {}
        for one in tools:
            tool = TOOLS.load(_KEY, one) if isinstance(one, str) else one
            self._tools[tool.__name__] = tool
        if unknown := set(ends) - self._tools.keys():
            raise UserError(f"ends names {', '.join(sorted(unknown))}, which is none of the tools.")
        self._schemas = [_schema(tool) for tool in self._tools.values()]
        self._ends = frozenset(ends)
        self._most = max_result_chars
        self._cut: Side = cut
        self._in_messages = in_messages

    def reset(self, row: Mapping[str, Any]) -> Observation:
        """The row's own messages, and the tools."""
        if not self._in_messages:
            return Observation(tools=self._schemas)
        schemas = "\n".join(json.dumps(one) for one in self._schemas)
        texts, rest = [_DESCRIPTION.replace("SCHEMAS", schemas)], list(row["messages"])
        if rest[0]["role"] == "system":
            texts.insert(0, rest.pop(0)["content"])
        return Observation(messages=[{"role": "system", "content": "\n\n".join(texts)}, *rest])

    async def step(self, action: Action) -> StepResult:
        """Carry out the calls of a turn; a turn without any is the answer."""
        if self._in_messages:
            action = _with_calls(action, self._schemas)
        metrics = Counter(
            {"tool_calls": len(action.tool_calls), "unreadable_calls": len(action.errors)}
        )
        if not action.tool_calls and not action.errors:
            return StepResult(done=True, metrics=metrics)
        messages = [
            {
                "role": "tool",
                "tool_call_id": f"unread{number:03}",  # some templates demand nine characters
                "content": f"Error: {error}. Write the call again.",
            }
            for number, error in enumerate(action.errors)
        ]
        for call in action.tool_calls:
            result, failed = await self._called(call)
            metrics["failed_calls"] += failed
            content = shortened(result, self._most, self._cut)
            messages.append(
                {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": content}
            )
        if self._in_messages:
            texts = [f"<tool_response>\n{one['content']}\n</tool_response>" for one in messages]
            messages = [{"role": "user", "content": "\n".join(texts)}]
        done = any(call.name in self._ends for call in action.tool_calls)
        return StepResult(messages=messages, done=done, metrics=metrics)

    async def _called(self, call: ToolCall) -> tuple[str, bool]:
        """A call's result as text, and whether it failed."""
        tool = self._tools.get(call.name)
        if tool is None:
            return f"Error: there is no tool {call.name}; use {', '.join(self._tools)}.", True
        try:
            inspect.signature(tool).bind(**call.arguments)
            if inspect.iscoroutinefunction(tool):
                found = await tool(**call.arguments)
            else:
                found = await asyncio.to_thread(called, tool, **call.arguments)
            return found if isinstance(found, str) else json.dumps(found, default=str), False
        except Exception as error:  # the tool's own code, on what the policy wrote
            return f"Error: {error_text(error)}", True


def _with_calls(action: Action, schemas: Sequence[Mapping[str, Any]]) -> Action:
    """The action with the calls that are in its text."""
    reply = reply_of(action.text, action.text, 0, schemas)
    return replace(action, tool_calls=calls_of(reply.message), errors=reply.errors)


def shortened(text: str, most: int, cut: Side) -> str:
    """At most ``most`` characters of a text; ``cut`` is the side that is left out.

    >>> [shortened("ABCDEFGHIJ", 4, side) for side in ("left", "right", "middle")]
    ['GHIJ', 'ABCD', 'AB…IJ']
    """
    if len(text) <= most:
        return text
    if cut == "left":
        return text[len(text) - most :]
    if cut == "right":
        return text[:most]
    head = math.ceil(most / 2)
    return f"{text[:head]}…{text[len(text) - (most - head) :]}"


def _schema(tool: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_json_schema(tool)
    except Exception as error:  # transformers' own errors, by what is missing
        raise UserError(f"{_KEY}: {tool.__name__} cannot be described: {error}") from error


async def python(code: str) -> str:
    """
    Run a Python program, apart from everything else, and read what it prints.

    Args:
        code: The program. It starts afresh each time, without files or a network.
    """
    from nemo_like.rewards.sandbox.program import run_program  # prepares processes

    result = await run_program(code)
    said = result.stdout + result.stderr
    return said if result.reason in ("exit", "signal") else f"{said}\n(ended: {result.reason})"


_OPERATORS: Mapping[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_MOST_CHARS = 200
_MOST_POWER = 1000


def calculate(expression: str) -> str:
    """
    Compute an arithmetic expression.

    Args:
        expression: Numbers, + - * / // % ** and parentheses, such as "2 * (3 + 4)".
    """
    if len(expression) > _MOST_CHARS:
        raise ValueError(f"the expression is longer than {_MOST_CHARS} characters")
    value = _computed(ast.parse(expression.strip(), mode="eval").body)
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return str(value)


def _computed(node: ast.AST) -> Any:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_computed(operand))
        case ast.BinOp(op=ast.Pow(), left=left, right=right):
            base, power = _computed(left), _computed(right)
            if abs(power) > _MOST_POWER or abs(base) > 10**9:
                raise ValueError("the power is too large")
            return base**power
        case ast.BinOp(op=op, left=left, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_computed(left), _computed(right))
    raise ValueError("only numbers, + - * / // % ** and parentheses can be computed")
