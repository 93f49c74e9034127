"""What chat templates take and what they lose: switches, tool calls, text of messages.

Functions on messages raise UserError without the row's name.
"""

import difflib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from jinja2 import Environment, TemplateSyntaxError, meta, nodes

from nemo_like.data.messages import Message
from nemo_like.data.thinking import Render
from nemo_like.errors import UserError

SWITCHES = "data.template_switches"
IN_MESSAGES = "describe the tools in a message (environment.options.in_messages=true does)"
_MARKERS = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
_GIVEN = re.compile(
    r"messages|tools|documents|add_generation_prompt|continue_final_message|raise_exception"
    r"|strftime_now|\w+_tokens?"
)
"""Names that transformers gives to every template."""


def check_switches(template: str, switches: Mapping[str, Any], key: str) -> None:
    """Refuse a switch that the template never uses; the error names the nearest that it does.

    ``key`` is where the configuration has them.
    """
    known = switches_of(template) if switches else frozenset()
    for name in switches:
        if name in known:
            continue
        near = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.5) or sorted(known)
        remedy = f"did you mean {' or '.join(near)}?" if near else "it has none, so leave it out."
        raise UserError(f"{key}.{name} is no switch of the model's chat template; {remedy}")


def those_known(template: str, switches: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``switches`` that the template uses."""
    known = switches_of(template) if switches else frozenset()
    return {name: value for name, value in switches.items() if name in known}


def switches_of(template: str) -> frozenset[str]:
    """Names that the template looks at and that neither it nor transformers sets.

    >>> switches_of("{% if think %}{% set x = 1 %}{% endif %}{{ x }}{{ messages }}{{ bos_token }}")
    frozenset({'think'})
    """
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        parsed = environment.parse(_MARKERS.sub("", template))
    except TemplateSyntaxError:
        return frozenset()  # rendering says why
    names = meta.find_undeclared_variables(parsed) - environment.globals.keys()
    # A name that is set in one branch and used in another counts as undeclared; one that the
    # template only sets where it is not given is looked at first.
    names -= _assigned(parsed) - _looked_for(parsed)
    return frozenset(name for name in names if not _GIVEN.fullmatch(name))


def _assigned(parsed: nodes.Template) -> set[str]:
    return {name.name for name in parsed.find_all(nodes.Name) if name.ctx == "store"}


def _looked_for(parsed: nodes.Template) -> set[str]:
    """Names that are tested for being given, or have a default."""
    tests = [one for one in parsed.find_all(nodes.Test) if one.name in ("defined", "undefined")]
    defaults = [one for one in parsed.find_all(nodes.Filter) if one.name in ("default", "d")]
    return {one.node.name for one in (*tests, *defaults) if isinstance(one.node, nodes.Name)}


def as_template_takes(
    messages: Sequence[Message], render: Callable[[Sequence[Message]], str]
) -> Sequence[Message]:
    """The messages with arguments of tool calls as objects, or as JSON text if need be.

    An API gives them as JSON text. A template that writes JSON would write that text as a JSON
    string; one that takes text cannot write objects.
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


def refuse_losses(messages: Sequence[Message], text: str, render: Render, begin: int = 0) -> None:
    """Refuse a message if its text or tool calls are missing from the whole rendered text.

    Messages before ``begin`` were checked earlier.
    """
    bare = without_space(text)
    for index, message in enumerate(messages[begin:], begin):
        role = message["role"]
        # Templates may shorten earlier answers, and write what tools say as JSON.
        lost = role != "assistant" and without_space(message["content"]) not in bare
        if lost and (role != "tool" or _is_ignored(messages, index, render)):
            raise UserError(
                f"the template leaves out message {index}, whose role is '{role}'; put its text "
                "into another message, or use a template that takes it."
            )
        if message.get("tool_calls") and not _has_calls(messages, index, text, render):
            raise UserError(
                f"the template leaves out the tool calls of message {index}; write them into its "
                "content, or use a template that takes them."
            )


def _is_ignored(messages: Sequence[Message], index: int, render: Render) -> bool:
    """Whether the template writes the same with other content of a message."""
    other = {**messages[index], "content": "another result"}
    try:
        changed = render([*messages[:index], other, *messages[index + 1 :]], to_answer=False)
        return changed == render(messages, to_answer=False)
    except UserError:
        return False


def turn_marks(
    tokens: Sequence[str], ends: Collection[str], render: Render
) -> tuple[Sequence[str], Sequence[str]]:
    """A tokenizer's special ``tokens`` that mark turns in anyone's text, and in an answer.

    In an answer, those that end turns or stand between two. Others that the template writes before
    the first may be an answer's own, such as the marks of thinking that a system prompt explains.
    """
    first = "first question"
    roles = {first: "user", "first answer": "assistant", "second question": "user"}
    try:
        text = render([{"role": r, "content": c} for c, r in roles.items()], to_answer=False)
    except UserError:
        text = ""  # each row will say why
    between = text.partition(first)[2]
    anywhere = [token for token in tokens if token in ends or token in text]
    return anywhere, [token for token in anywhere if token in ends or token in between]


def refuse_marks(index: int, content: str, marks: Sequence[str]) -> None:
    """Refuse a message of whose text the tokenizer would make the beginning or end of a turn."""
    for mark in marks:
        if mark in content:
            raise UserError(
                f"the text of message {index} has {mark!r}, by which the template marks turns, so "
                "that it would end there or begin another; take it out (texts are given as they "
                "are, without the template)."
            )


def refuse_unasked_header(render: Render) -> None:
    """Refuse a template that has the model write the header of its own answer."""
    question: Message = {"role": "user", "content": "1"}
    answer: Message = {"role": "assistant", "content": "2"}
    try:
        asked = render([question], to_answer=True)
        whole = render([question, answer], to_answer=False)
    except UserError:
        return  # each row will say why
    header = whole.removeprefix(asked).partition("2")[0] if whole.startswith(asked) else ""
    if "assistant" in header:
        raise UserError(
            f"the chat template does not write {header.strip()!r} where it asks for an answer, so "
            "that the model would have to; give it an {% if add_generation_prompt %}."
        )


def _has_calls(messages: Sequence[Message], index: int, text: str, render: Render) -> bool:
    """Whether names of the calls are in the text, and not by chance: without calls it differs."""
    for call in messages[index]["tool_calls"]:
        function = call.get("function")
        name = (function if isinstance(function, dict) else call).get("name")
        if str(name) not in text:
            return False
    without = {key: value for key, value in messages[index].items() if key != "tool_calls"}
    changed = [*messages[:index], without, *messages[index + 1 :]]
    try:
        return text not in (render(changed, to_answer=True), render(changed, to_answer=False))
    except UserError:
        return True  # a template that misses them takes them


def without_space(text: object) -> str:
    """The text without white space, which templates and JSON may add or drop."""
    return "".join(str(text).split())
