"""What an environment is: it opens a conversation, answers each turn, and gives rewards."""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

ENDPOINT = "__endpoint__"
"""Field of a row that has the address and key of its model."""

Message = dict[str, Any]
"""``{"role": ..., "content": ...}``."""


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """One call of a tool in an action."""

    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Action:
    """What the policy said in one turn."""

    text: str
    """Without special tokens and tool calls."""
    tool_calls: Sequence[ToolCall] = ()
    errors: Sequence[str] = ()
    """Error messages for tool calls that could not be parsed."""
    truncated: bool = False
    """It was cut off, and no further turn follows."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """How a conversation begins."""

    messages: Sequence[Message] | None = None
    """In place of the row's own. None: those."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Schemas, in OpenAI format, of functions that the policy may call."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What an action leads to."""

    messages: Sequence[Message] = ()
    """What the policy reads before its next turn; needed unless ``done``."""
    reward: float | None = None
    """Reward of the turn; a trajectory's reward is the sum. If no step has one,
    ``environment.reward`` scores the last turn."""
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers of this step; those of a name are added up."""


def calls_of(message: Message) -> list[ToolCall]:
    """Read the tool calls of an assistant's message, with arguments parsed from JSON text."""
    return [
        ToolCall(
            id=one["id"],
            name=one["function"]["name"],
            arguments=json.loads(one["function"]["arguments"]),
        )
        for one in message.get("tool_calls") or ()
    ]


def called(method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """What a user's method returns; it runs in a thread."""
    try:
        return method(*arguments, **named)
    except StopIteration as error:  # which no future can hold
        raise RuntimeError("StopIteration") from error


class Environment(Protocol):
    """One conversation; a new object is made for each. Methods may be ``async`` or plain."""

    def reset(self, row: Mapping[str, Any]) -> Observation | Awaitable[Observation]:
        """Begin. ``row``: its fields, its ``messages``, and ``prompt``, the last one's text."""
        ...

    def step(self, action: Action) -> StepResult | Awaitable[StepResult]:
        """Answer a turn. What it raises costs this trajectory, which is masked and counted."""
        ...
