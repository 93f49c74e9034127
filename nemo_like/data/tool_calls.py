"""Tool calls in completions, as Hermes, Qwen, GLM, Llama 3, Mistral and LFM2 write them.

Nothing that looks like a call is dropped silently: if it cannot be parsed, the model gets an error.
"""

import ast
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_like.data.chat import ChatTokenizer
from nemo_like.data.messages import Message
from nemo_like.data.templates import IN_MESSAGES
from nemo_like.data.thinking import CLOSED
from nemo_like.errors import UserError

Tools = Sequence[Mapping[str, Any]]
"""Function schemas in OpenAI format."""


class UnreadableCallError(Exception):
    """Text that begins like a tool call but is not a valid one; the message says why."""


@dataclass(frozen=True)
class Reply:
    """A completion as an assistant message."""

    message: Message
    errors: tuple[str, ...] = field(default=())
    """Error messages for calls that could not be parsed."""


_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_LLAMA = re.compile(
    r"\A\s*(?:<\|python_tag\|>)?\s*(\{\s*\"(?:name|type|function)\".*)\Z", re.DOTALL
)
_PYTHON = re.compile(r"<\|tool_call_start\|>(.*?)(?:<\|tool_call_end\|>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>\s*)?\Z", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_BETWEEN = re.compile(r"\s*(?:;\s*|\Z)")
_NAME = re.compile(r"\s*([\w.-]+)\s*(<arg_key>.*)?\Z", re.DOTALL)
_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def reply_of(text: str, whole: str | None, number: int, tools: Tools = ()) -> Reply:
    """Turn a completion into a message; ``number`` makes the ids of its calls unique.

    ``whole`` is ``text`` with its special tokens; calls are searched in it, after the thinking.
    None: there are no tools, and everything is content. ``tools`` say which arguments are text,
    for formats that do not.
    """
    if whole is None:
        return Reply({"role": "assistant", "content": text})
    thought = max((match.end() for match in CLOSED.finditer(whole)), default=0)
    content, raw = _split(whole[thought:], tools)
    content = whole[:thought] + content
    calls: list[dict[str, Any]] = []
    errors: list[str] = []
    for one in raw:
        try:
            name, arguments = one()
            written = json.dumps(arguments, ensure_ascii=False)
            f"{name}{written}".encode()  # half of a surrogate pair is no text
        except (UnreadableCallError, UnicodeEncodeError) as error:
            errors.append(str(error).encode(errors="replace").decode())
            continue
        calls.append(
            {
                "id": f"{number:05}{len(calls):04}",  # nine characters, for Mistral's templates
                "type": "function",
                "function": {"name": name, "arguments": written},
            }
        )
    if not calls:
        return Reply({"role": "assistant", "content": text}, tuple(errors))
    return Reply({"role": "assistant", "content": content, "tool_calls": calls}, tuple(errors))


_KINDS_OF = {
    **{bool: {"boolean"}, int: {"integer", "number"}, float: {"number"}, type(None): {"null"}},
    **{str: set[str](), list: {"array"}, dict: {"object"}},
}
"""What JSON schemas call a value's type; of text, in quotes or not, the whole is kept."""

_Read = Callable[[], tuple[str, dict[str, Any]]]


def _split(text: str, tools: Tools) -> tuple[str, list[_Read]]:
    """The text before the calls, and a parser for each call."""
    if "<tool_call>" in text:
        found = [match[1] for match in _HERMES.finditer(text)]
        calls = [_marked_up(one, tools) or _reader(one) for one in found]
        return text.partition("<tool_call>")[0].rstrip("\n"), calls
    if "[TOOL_CALLS]" in text:
        return text.partition("[TOOL_CALLS]")[0], [*_mistral(text)]
    if match := _PYTHON.search(text):
        parts = [one[1] for one in _PYTHON.finditer(text)]
        return text[: match.start()], [call for one in parts for call in _python(one)]
    if match := _LLAMA.match(text.replace("<|eom_id|>", "")):
        return "", [*_one_by_one(match[1])]
    return text, []


def _one_by_one(text: str) -> Iterator[_Read]:
    """Calls as JSON, with semicolons between them."""
    decoder, at = json.JSONDecoder(strict=False), 0
    while at < len(text):
        try:
            found, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            found, end = None, at
        between = _BETWEEN.match(text, end)
        if found is None or between is None:
            yield _reader(text[at:])  # which says why
            return
        yield lambda found=found: _call(found)
        at = between.end()


def _reader(text: str) -> _Read:
    return lambda: _call(_json(text))


def refuse_unread_calls(chat: ChatTokenizer, tools: Tools) -> None:
    """Refuse a template with an unsupported tool call format.

    Such calls would be treated as answers.
    """
    name = tools[0].get("function", {}).get("name") if tools else None
    if isinstance(name, str) and not _is_read(chat, json.dumps(tools[0])):
        raise UserError(
            "the model's chat template writes tool calls in an unsupported format (Hermes, "
            f"Qwen, GLM, Llama 3, Mistral and LFM2 work); {IN_MESSAGES}."
        )


@functools.lru_cache(maxsize=256)
def _is_read(chat: ChatTokenizer, tool: str) -> bool:
    """Whether a call that the template renders is parsed again."""
    tools = [json.loads(tool)]
    name = tools[0]["function"]["name"]
    function = {"name": name, "arguments": "{}"}
    call = {"id": "000000000", "type": "function", "function": function}
    question = {"role": "user", "content": "a question"}
    messages = [question, {"role": "assistant", "content": "", "tool_calls": [call]}]
    try:
        messages = chat.as_taken(messages)
        text = chat.text(messages, to_answer=False, tools=tools)
        before = chat.text([question], to_answer=True, tools=tools)
    except UserError:
        return True  # each row reports its own error
    chat.check(messages, text, tools)
    begin = len(before) if text.startswith(before) else text.rindex("a question")
    ends = re.compile("|".join(map(re.escape, chat.end_tokens)))
    found = reply_of("", ends.sub("", text[begin:]), 0, tools).message.get("tool_calls", ())
    return [one["function"]["name"] for one in found] == [name]


def _marked_up(text: str, tools: Tools) -> _Read | None:
    """A call with tags around each argument, as in Qwen3.5 and GLM; None if it is JSON."""
    schemas = {one["function"]["name"]: one["function"] for one in tools if "function" in one}
    if match := _FUNCTION.match(text):
        name, pairs = match[1].strip(), _PARAMETER
    elif (match := _NAME.match(text)) and (match[2] or match[1] in schemas):
        name, pairs = match[1], _PAIR
    else:
        return None
    inside = match[2] or ""
    parameters = (schemas.get(name, {}).get("parameters") or {}).get("properties") or {}

    def read() -> tuple[str, dict[str, Any]]:
        if pairs.sub("", inside).strip():
            raise UnreadableCallError(f"the call of {name} has text outside its arguments")
        found = {one[1].strip(): one[2] for one in pairs.finditer(inside)}
        return name, {key: _typed(value, parameters.get(key)) for key, value in found.items()}

    return read


def _typed(text: str, schema: Any) -> Any:
    """The value of an unquoted argument: text if its schema allows nothing else that it reads as.

    >>> _typed("1", {"type": ["string", "null"]}), _typed("1", {"type": "integer"}), _typed("a", {})
    ('1', 1, 'a')
    """
    schema = schema if isinstance(schema, dict) else {}
    types = [one["type"] for one in (schema, *schema.get("anyOf", ())) if "type" in one]
    kinds = [kind for one in types for kind in (one if isinstance(one, list) else [one])]
    try:
        value = json.loads(text.lower() if text in ("True", "False") else text)
    except (ValueError, RecursionError) as error:
        if not kinds or "string" in kinds:
            return text
        what = " or ".join(map(str, kinds))
        raise UnreadableCallError(f"an argument must be of type {what}: {error}") from error
    is_text = "string" in kinds and not _KINDS_OF[type(value)] & {*kinds}
    return text if is_text else value


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
        yield from _listed(part)


def _listed(text: str) -> Iterator[_Read]:
    """Calls as a JSON list, or one call."""
    try:
        found = _json(text)
    except UnreadableCallError:
        yield _reader(text)  # which says why
        return
    calls = found if found and isinstance(found, list) else [found]
    yield from (lambda one=one: _call(one) for one in calls)


def _python(text: str) -> Iterator[_Read]:
    """Calls as a Python list, ``[add(a=1), add(a=2)]``, or as JSON."""
    try:
        parsed = ast.parse(text.strip(), mode="eval").body
        calls = parsed.elts if isinstance(parsed, ast.List) else [parsed]
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        calls = []
    if not calls or not all(isinstance(one, ast.Call) for one in calls):
        yield from _listed(text)
    for one in calls:
        if isinstance(one, ast.Call):
            yield lambda one=one: _python_call(one)


def _python_call(call: ast.Call) -> tuple[str, dict[str, Any]]:
    try:
        name = ast.unparse(call.func)
    except RecursionError as error:
        raise UnreadableCallError("the name of the function has too many parts") from error
    if call.args or any(one.arg is None for one in call.keywords):
        raise UnreadableCallError(f"the arguments of {name} have no names")
    try:
        found = {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}
        return name, json.loads(json.dumps(found))  # no sets, which JSON lacks
    except (ValueError, TypeError, RecursionError, MemoryError) as error:
        raise UnreadableCallError(f"an argument of {name} is no plain value") from error


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
