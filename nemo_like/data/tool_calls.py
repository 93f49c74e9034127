"""Arguments of tool calls, which some templates write as JSON themselves and others take as text.

An API gives them as JSON text. A template that writes JSON would write that text as a JSON string.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from nemo_like.data.messages import Message
from nemo_like.errors import UserError


def as_template_takes(
    messages: Sequence[Message], render: Callable[[Sequence[Message]], str]
) -> Sequence[Message]:
    """The messages with arguments as objects, or as JSON text if the template writes only that.

    Text that is not a JSON object is left as it is. ``render`` gives a template's whole text, or
    raises UserError.
    """
    if not any(_calls(message) for message in messages):
        return messages
    objects = [_with_arguments(message, _as_object) for message in messages]
    try:
        as_python = [str(given) for given in _objects(objects)]
        text = render(objects)
        if not any(written in text for written in as_python):
            return objects
    except UserError:
        pass
    texts = [_with_arguments(message, _as_text) for message in objects]
    try:
        render(texts)
    except UserError:
        return objects  # the template's own words are about what it was given first
    return texts


def _calls(message: Message) -> list[Any]:
    return message.get("tool_calls") or []


def _objects(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """All arguments that are objects with anything in them."""
    found = [_function(call).get("arguments") for one in messages for call in _calls(one)]
    return [given for given in found if isinstance(given, dict) and given]


def _function(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    return function if isinstance(function, dict) else call


def _with_arguments(message: Message, change: Callable[[Any], Any]) -> Message:
    if not _calls(message):
        return message
    return {**message, "tool_calls": [_changed(call, change) for call in _calls(message)]}


def _changed(call: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    function = _function(call)
    if "arguments" not in function:
        return call
    changed = {**function, "arguments": change(function["arguments"])}
    return changed if function is call else {**call, "function": changed}


def _as_object(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments


def _as_text(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
