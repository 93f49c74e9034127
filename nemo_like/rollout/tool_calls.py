"""Tool calls in the text of a completion, as Qwen and Hermes, Llama 3 and Mistral write them.

Nothing that looks like a call is dropped in silence: what cannot be read is an error that goes back
to the model.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from nemo_like.data.messages import Message


class UnreadableCallError(Exception):
    """Text that begins like a tool call and is none; the message says what is wrong with it."""


@dataclass(frozen=True)
class Reply:
    """A completion as an assistant's message."""

    message: Message
    errors: tuple[str, ...] = field(default=())
    """Of calls that could not be read."""


_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_LLAMA = re.compile(
    r"\A\s*(?:<\|python_tag\|>)?\s*(\{\s*\"(?:name|type|function)\".*)\Z", re.DOTALL
)


def reply_of(text: str, whole: str | None, number: int) -> Reply:
    """The message that a completion is; ``number`` makes the ids of its calls unique.

    ``whole`` is ``text`` with its special tokens, which calls are looked for in; None: there are no
    tools, and all is content.
    """
    if whole is None:
        return Reply({"role": "assistant", "content": text})
    content, raw = _split(whole)
    calls: list[dict[str, Any]] = []
    errors: list[str] = []
    for one in raw:
        try:
            name, arguments = one()
        except UnreadableCallError as error:
            errors.append(str(error))
            continue
        calls.append(
            {
                "id": f"call_{number}_{len(calls)}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
            }
        )
    if not calls:
        return Reply({"role": "assistant", "content": text}, tuple(errors))
    return Reply({"role": "assistant", "content": content, "tool_calls": calls}, tuple(errors))


_Read = Callable[[], tuple[str, dict[str, Any]]]


def _split(text: str) -> tuple[str, list[_Read]]:
    """The text before the calls, and each call to be read."""
    if "<tool_call>" in text:
        found = [match[1] for match in _HERMES.finditer(text)]
        return text.partition("<tool_call>")[0].rstrip("\n"), [_reader(one) for one in found]
    if "[TOOL_CALLS]" in text:
        return text.partition("[TOOL_CALLS]")[0], [*_mistral(text)]
    if match := _LLAMA.match(text.replace("<|eom_id|>", "")):
        return "", [_reader(one) for one in match[1].split("; ")]
    return text, []


def _reader(text: str) -> _Read:
    return lambda: _call(_json(text))


def _mistral(text: str) -> Iterator[_Read]:
    for part in text.split("[TOOL_CALLS]")[1:]:
        part = part.strip()
        if not part.startswith("["):  # name[ARGS]{...}, as later versions write it
            name, _, arguments = part.partition("[ARGS]")
            if not arguments:
                name, brace, rest = part.partition("{")
                arguments = brace + rest
            yield lambda name=name, arguments=arguments: _call(
                {"name": name.strip(), "arguments": _json(arguments)}
            )
            continue
        try:
            calls = _json(part)
        except UnreadableCallError as error:
            yield _failing(error)
            continue
        yield from (lambda one=one: _call(one) for one in calls)


def _failing(error: UnreadableCallError) -> _Read:
    def read() -> tuple[str, dict[str, Any]]:
        raise error

    return read


def _json(text: str) -> Any:
    try:
        # Models write raw line breaks in strings; JSON asks for escapes.
        return json.loads(text.strip(), strict=False)
    except (ValueError, RecursionError) as error:
        raise UnreadableCallError(f"the tool call is not valid JSON: {error}") from error


def _call(found: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(found, dict) and isinstance(found.get("function"), dict):
        found = found["function"]
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        raise UnreadableCallError("the tool call has no name")
    arguments = found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _json(arguments)
    if not isinstance(arguments, dict):
        raise UnreadableCallError(f"the arguments of {found['name']} are not an object")
    return found["name"], arguments
