"""Messages of a row: what counts as one, and what of it says nothing."""

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from nemo_like.errors import UserError

Message = dict[str, Any]
"""``{"role": ..., "content": ...}``, as chat templates take it."""

_OTHER_NAMES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
_SAID_BESIDE = ("tool_calls", "reasoning_content", "reasoning", "thinking")
"""Entries by which a message without content says something."""
_SHAREGPT = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard"), "assistant"),
    **dict.fromkeys(("tool", "observation"), "tool"),
    "system": "system",
}
"""Roles by what ShareGPT's ``from`` calls them."""
_TURN = re.compile(r"\n\n(Human|Assistant):")
_REPR = re.compile(r"\s*\[\s*\{\s*'(role|content|from)'")
_KINDS = {dict: "an object", list: "a list", type(None): "null"}


def cleaned(value: object) -> object:
    """A row's entry; of messages, without entries that are null, and with content as one text.

    Content may be left out beside tool calls, and may be a list of parts that are all text.
    ShareGPT's ``from`` and ``value`` are role and content; a text may be a ``dialogue``.
    """
    value = dialogue(value)
    if not isinstance(value, list):
        return value
    return [_cleaned(one) if isinstance(one, dict) else one for one in value]


def dialogue(value: object) -> object:
    """Messages of a text: JSON, as tables have it, or turns as in HH-RLHF; else as it is.

    >>> dialogue("\\n\\nHuman: Hi\\n\\nAssistant:")
    [{'role': 'user', 'content': 'Hi'}]
    """
    if not isinstance(value, str):
        return value
    if value.lstrip()[:1] == "[":
        return _from_json(value)
    if not value.startswith("\n\nHuman:"):
        return value
    _, *pieces = _TURN.split(value)
    roles = {"Human": "user", "Assistant": "assistant"}
    turns = [
        {"role": roles[who], "content": text.strip()}
        for who, text in zip(pieces[::2], pieces[1::2], strict=True)
    ]
    asks = turns[-1] == {"role": "assistant", "content": ""}
    return turns[:-1] if asks else turns


def _from_json(text: str) -> object:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text
    are_messages = found and all(
        isinstance(one, dict) and ({"role", "content"} <= one.keys() or "from" in one)
        for one in found
    )
    return found if are_messages else text


def system_of(record: Message, default: str | None, where: str) -> str | None:
    """Text of the row's own ``system``, or the ``default``."""
    text = record.get("system")
    if text in (None, ""):
        return default
    for name in ("prompt", "messages", "chosen", "text"):
        first = cleaned(record.get(name))
        own = is_messages(first) and first[0]["role"] == "system" and first[0]["content"] != text
        if not isinstance(text, str) or own or (name == "text" and name in record):
            raise UserError(
                f"{where}: 'system' must be text, and beside messages without a system message of "
                f"their own; take it out of the row, or out of '{name}'."
            )
    return text


def tools_of(record: Message, where: str) -> list[Any]:
    """What the assistant may call: the row's ``tools``, a list or the same as JSON text."""
    tools = record.get("tools") or []
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: 'tools' is text that is not JSON ({error}).") from error
    if not isinstance(tools, list) or not all(isinstance(one, dict) for one in tools):
        raise UserError(f"{where}: 'tools' must be a list of objects, or the same as JSON text.")
    if tools and "text" in record:
        raise UserError(f"{where}: 'tools' has no effect on 'text'; take it out of the row.")
    return tools


def without_nulls(record: Message) -> Message:
    """The entries that say something.

    >>> without_nulls({"a": None, "b": 0})
    {'b': 0}
    """
    return {name: value for name, value in record.items() if value is not None}


def is_messages(value: object) -> TypeGuard[list[Message]]:
    """Whether a row's entry is a list of at least one ``{"role", "content"}``, both text."""
    return isinstance(value, list) and bool(value) and not fault(value)


def prompt_messages(
    content: object, name: str, system_prompt: str | None, where: str
) -> list[Message]:
    """The messages to answer that the entry ``name`` of a row holds, or has as a user's text."""
    content = dialogue(content)
    refuse_repr(content, name, where)
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    messages = cleaned(messages)
    if (
        not is_messages(messages)
        or messages[-1]["role"] == "assistant"
        or all(message["role"] == "system" for message in messages)
    ):
        answered = is_messages(messages) and messages[-1]["role"] == "assistant"
        answer = (
            "; leave out the assistant's last message, or set data.columns.prompt to the first "
        )
        answer += f"question alone, such as {name}.0.content"
        remedy = answer if answered else fault(messages)
        raise UserError(
            f"{where}: '{name}' must be text, or a list of {{'role', 'content'}} messages that "
            f"ends with the one to answer{remedy}."
        )
    refuse_empty(messages, name, where)
    return with_system_prompt(messages, system_prompt)


def refuse_repr(content: object, name: str, where: str) -> None:
    """Raise UserError for messages as Python prints them, which would be one message's text."""
    if isinstance(content, str) and _REPR.match(content):
        raise UserError(
            f"{where}: '{name}' is the text of a Python list of messages; write JSON (json.dumps), "
            "or keep the list itself."
        )


def with_system_prompt(messages: list[Message], system_prompt: str | None) -> list[Message]:
    """The messages, with a system message before them if they have none."""
    if system_prompt is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]


def refuse_empty(messages: Sequence[Message], name: str, where: str) -> None:
    """Refuse a question or an answer that says nothing, in the entry ``name`` of a row."""
    for message in messages:
        says = message["content"].strip() or any(message.get(one) for one in _SAID_BESIDE)
        if message["role"] in ("user", "assistant") and not says:
            raise UserError(
                f"{where}: the {message['role']}'s message in '{name}' is empty; give it text, or "
                "take the row out."
            )


def prompt_key(messages: Sequence[Message]) -> str:
    """The same for messages that read the same, in whatever order and Unicode form they are kept.

    >>> prompt_key([{"role": "user", "content": "a b"}])
    '[["user", "a b", null]]'
    """
    parts = [
        (message["role"], same_text(message["content"]), message.get("tool_calls"))
        for message in messages
    ]
    return json.dumps(parts, sort_keys=True, ensure_ascii=False)


def same_text(text: str) -> str:
    """The same for texts that read the same.

    >>> same_text(" a  b")
    'a b'
    """
    return " ".join(unicodedata.normalize("NFC", text).split())


def opens_with(messages: Sequence[Message], prompt: object) -> bool:
    """Whether ``prompt`` is the first user message (as text), or the messages at the beginning."""
    if isinstance(prompt, str):
        first = next((one for one in messages if one["role"] == "user"), None)
        return first is not None and same_text(first["content"]) == same_text(prompt)
    if not is_messages(prompt):
        return False
    return prompt_key(messages[: len(prompt)]) == prompt_key(prompt)


def fault(messages: object) -> str:
    """What is wrong with the first message that cannot serve: the end of a sentence, or ''."""
    if not isinstance(messages, list):
        return ""
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            return f" (message {index} is not an object)"
        if not {"role", "content"} & message.keys() and "from" in message:
            return f" (message {index} is from '{message['from']}', which is no known role)"
        for name in ("role", "content"):
            if not isinstance(message.get(name), str):
                return f" (the '{name}' of message {index} {_not_text(message.get(name))})"
        role = message["role"]
        known = _OTHER_NAMES.get(role.lower(), role.lower())
        if role != known and known in ("system", "user", "assistant", "tool"):
            return f" (the role of message {index} is '{role}', which must be '{known}')"
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list) or not all(map(_is_function_call, calls)):
            return f" (the 'tool_calls' of message {index} are no list of objects)"
        if not all(map(_is_call, calls)):
            return f" (the arguments of a tool call of message {index} are text that is not JSON)"
    return ""


def _is_function_call(call: object) -> bool:
    return isinstance(call, dict) and isinstance(call.get("function", call), dict)


def _is_call(call: Message) -> bool:
    """Whether arguments that are text are JSON."""
    function = call.get("function")
    given = (function if isinstance(function, dict) else call).get("arguments")
    try:
        json.loads(given if isinstance(given, str) else "null")
    except (ValueError, RecursionError):
        return False
    return True


def _not_text(value: object) -> str:
    if isinstance(value, list):
        kinds = [part.get("type") for part in value if isinstance(part, dict)]
        other = next((kind for kind in kinds if kind not in (None, "text")), None)
        if other is not None:
            return f"has a part of type '{other}', and only text is read"
    return f"is {_KINDS.get(type(value), 'no text')}, not text"


def _cleaned(message: Message) -> Message:
    kept = without_nulls(message)
    if "role" not in kept and "value" in kept and kept.get("from") in _SHAREGPT:
        kept = {"role": _SHAREGPT[kept.pop("from")], "content": kept.pop("value"), **kept}
    calls = kept.get("tool_calls")
    if isinstance(calls, list):
        kept["tool_calls"] = [_cleaned_call(one) for one in calls]
        if not calls:
            del kept["tool_calls"]
        else:
            kept.setdefault("content", "")
    content = kept.get("content")
    if isinstance(content, list) and content:
        texts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
            for part in content
        ]
        if all(isinstance(text, str) for text in texts):
            kept["content"] = "".join(map(str, texts))
    return kept


def _cleaned_call(call: object) -> object:
    if not isinstance(call, dict):
        return call
    kept = without_nulls(call)
    if isinstance(kept.get("function"), dict):
        kept["function"] = without_nulls(kept["function"])
    return kept


UNSUPPORTED = ("functions", "chat_template", "chat_template_kwargs", "images", "videos", "audios")
"""Entries of a row that change what a template renders elsewhere, and would have no effect here."""
_REMEDIES = {"chat_template_kwargs": "set data.template_switches, which are those of every row"}


def refuse_unsupported(record: Mapping[str, Any], where: str) -> None:
    """Raise UserError for an entry that would have no effect."""
    for name in UNSUPPORTED:
        if record.get(name):
            remedy = _REMEDIES.get(name, "write what it adds into the messages")
            raise UserError(
                f"{where}: '{name}' is not supported; {remedy}, or take it out of the row."
            )
