"""Answers in the format of the OpenAI API, whole or in the pieces of a stream."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from aiohttp import web

from nemo_like.generation.protocol import FinishReason
from nemo_like.rollout.turn import Turn

Logprobs = list[tuple[str, float]] | None
"""Of each sampled token, its text and logprob; None: not asked for."""


async def send_event(response: web.StreamResponse, content: Mapping[str, Any]) -> None:
    """One event of a stream."""
    await response.write(b"data: " + json.dumps(content).encode() + b"\n\n")


def chat_choice(index: int, turn: Turn, logprobs: Logprobs) -> dict[str, Any]:
    """A turn as a message."""
    message = dict(turn.reply.message)
    reason = "stop" if turn.completion.finish_reason is FinishReason.stop else "length"
    if message.get("tool_calls"):
        reason = "tool_calls"
        message["content"] = message["content"] or None
    choice = {"index": index, "message": message, "finish_reason": reason, "logprobs": None}
    if logprobs is not None:
        choice["logprobs"] = {"content": [_token(*one) for one in logprobs], "refusal": None}
    if turn.reply.errors:
        choice["tool_call_errors"] = list(turn.reply.errors)
    return choice


def text_choice(index: int, turn: Turn, logprobs: Logprobs) -> dict[str, Any]:
    """A turn as the continuation of a text."""
    choice = {
        "index": index,
        "text": turn.reply.message["content"],
        "finish_reason": turn.completion.finish_reason.value,
        "logprobs": None,
    }
    if logprobs is not None:
        tokens, values = [one for one, _ in logprobs], [one for _, one in logprobs]
        choice["logprobs"] = {"tokens": tokens, "token_logprobs": values}
    return choice


def _token(text: str, logprob: float) -> dict[str, Any]:
    whole = "\ufffd" not in text  # else a part of a character
    as_bytes = list(text.encode()) if whole else None
    return {"token": text, "logprob": logprob, "bytes": as_bytes, "top_logprobs": []}


def parts(choice: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A choice in the pieces of a stream."""
    if "text" in choice:
        yield dict(choice)
        return
    message, index = choice["message"], choice["index"]
    delta: dict[str, Any] = {"role": "assistant", "content": message["content"]}
    if calls := message.get("tool_calls"):
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
    yield {"index": index, "delta": delta, "finish_reason": None, "logprobs": choice["logprobs"]}
    yield {"index": index, "delta": {}, "finish_reason": choice["finish_reason"]}
