"""What chat templates change in silence: some know a few roles, and of a message its content.

Functions raise UserError without the row's name.
"""

from collections.abc import Collection, Sequence

from nemo_like.data.empty_blocks import REASONING, Render
from nemo_like.data.messages import Message
from nemo_like.errors import UserError


def refuse_losses(messages: Sequence[Message], text: str, render: Render) -> None:
    """Refuse a message whose text, or whose tool calls, are not in the whole rendered text."""
    for index, message in enumerate(messages):
        role = message["role"]
        # Templates may shorten earlier answers, and write what tools say as JSON.
        if role not in ("assistant", "tool") and not _is_in(message["content"], text):
            raise UserError(
                f"the template leaves out message {index}, whose role is '{role}'; put its text "
                "into another message, or use a template that takes it."
            )
        if message.get("tool_calls") and not _has_calls(messages, index, text, render):
            raise UserError(
                f"the template leaves out the tool calls of message {index}; write them into its "
                "content, or use a template that takes them."
            )


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


def refuse_lost_reasoning(messages: Sequence[Message], turn: int, written: str) -> None:
    """Refuse a turn whose reasoning is not in what the template has the assistant write."""
    for name in REASONING:
        if not _is_in(messages[turn].get(name) or "", written):
            raise UserError(
                f"the template leaves out the '{name}' of message {turn}; write it into the "
                "content as the model would, or use a template that takes it."
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


def _is_in(part: object, text: str) -> bool:
    """Whether the text has the part, wherever either has white space."""
    return "".join(str(part).split()) in "".join(text.split())
