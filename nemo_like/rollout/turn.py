"""One completion of a trajectory, linked to the one it continues."""

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nemo_like.data.messages import Message, without_nulls
from nemo_like.generation.protocol import Completion
from nemo_like.rollout.trajectory import Segment

if TYPE_CHECKING:
    from nemo_like.data.tool_calls import Reply, Tools


@dataclass(frozen=True, eq=False)
class Turn:
    """One completion, and what was said since the previous one."""

    parent: "Turn | None"
    given: Sequence[int]
    completion: Completion
    said: Sequence[Message] | str
    """All messages so far, or the whole text, including the reply."""
    reply: "Reply"
    prompt_tokens: int
    tools: "Tools"
    id: str
    """The id that the caller got with the answer."""

    def segments(self, seen: "set[Turn]", number_of: "Mapping[Turn, int]") -> list[Segment]:
        """All segments up to this turn; turns in ``seen`` train in another row."""
        found = []
        for turn in self.lineage():
            one = turn.completion
            logprobs = None if turn in seen else one.logprobs
            found += [
                Segment(token_ids=turn.given),
                Segment(
                    token_ids=one.token_ids,
                    logprobs=logprobs,
                    weight_versions=one.versions,
                    turn=number_of[turn],
                ),
            ]
        return found

    def lineage(self) -> "list[Turn]":
        """This turn and those it continues, oldest first."""
        turns, turn = [], self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]

    def token_ids(self) -> list[int]:
        """All tokens up to the end of this turn."""
        return [
            token
            for turn in self.lineage()
            for part in (turn.given, turn.completion.token_ids)
            for token in part
        ]


def key_of(messages: Sequence[Message] | str, tools: "Tools") -> str:
    """A hash that is equal for messages with equal content, however a client formats them."""
    said = messages if isinstance(messages, str) else [_said(one) for one in messages]
    return digest(json.dumps([said, list(tools)], sort_keys=True, default=str).encode())


def digest(content: bytes) -> str:
    """A hash of a whole conversation; each turn has one."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _said(message: Message) -> list[Any]:
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError):
                arguments = json.loads(arguments)
        calls.append([function.get("name"), arguments])
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content)
    rest = {
        name: value
        for name, value in without_nulls(message).items()
        if name in ("name", "tool_call_id", "reasoning_content")
    }
    return [message.get("role"), content, calls, rest if message.get("role") != "assistant" else {}]
