"""An OpenAI-compatible server in each rollout worker: each key belongs to one trajectory.

It listens on the loopback address only. Environments and harnesses run in separate processes and
reach the model here, so programs written for any such server work unchanged. Temperature, top-p and
seed are always the run's: the policy must train on the distribution that it samples from.
"""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from nemo_like.data.messages import Message, cleaned, fault
from nemo_like.errors import RunError, UserError
from nemo_like.rollout.answers import chat_choice, parts, send_event, text_choice
from nemo_like.rollout.recorder import EndedError, Recorder, Turn

logger = logging.getLogger(__name__)

_MOST_BYTES = 64 << 20
_MOST_CHOICES = 128
_READ = {
    "model", "messages", "prompt", "tools", "stop", "n", "max_tokens", "max_completion_tokens",
    "logprobs", "stream", "stream_options", "user", "metadata", "store",
}  # fmt: skip
_HARMLESS = {
    "temperature": (1,), "top_p": (1,), "frequency_penalty": (0,), "presence_penalty": (0,),
    "tool_choice": ("auto", "none"), "response_format": ({"type": "text"},), "best_of": (1,),
    "echo": (False,), "parallel_tool_calls": (True,), "top_logprobs": (0,),
}  # fmt: skip
"""Values of other parameters that need no warning."""


class RequestError(Exception):
    """A refused request, in the format of the OpenAI API."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code

    def response(self) -> web.Response:
        """The answer."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": str(self), "type": kind, "param": None, "code": self.code}
        return web.json_response({"error": error}, status=self.status)


class Endpoint:
    """The server of one worker."""

    def __init__(self, model: str) -> None:
        """``model``: the model name in responses."""
        self._model = model
        self._recorders: dict[str, Recorder] = {}
        self._runner: web.AppRunner | None = None
        self._url = ""
        self._warned = set[str]()

    async def start(self) -> None:
        """Start listening, on a port that the system picks."""
        app = web.Application(client_max_size=_MOST_BYTES)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._answering(self._chat))
        app.router.add_post("/v1/completions", self._answering(self._completions))
        app.router.add_route("*", "/{path:.*}", self._answering(_no_such))
        self._runner = web.AppRunner(app, handle_signals=False, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self._url = f"http://{host}:{port}/v1"

    async def close(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()

    @contextmanager
    def serving(self, recorder: Recorder) -> Iterator[tuple[str, str]]:
        """Base URL and key for calls of a trajectory, valid inside the block."""
        key = f"trajectory-{secrets.token_hex(16)}"
        self._recorders[key] = recorder
        try:
            yield self._url, key
        finally:
            recorder.close()
            del self._recorders[key]

    def _recorder(self, request: web.Request) -> Recorder:
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        recorder = self._recorders.get(key)
        if recorder is None:
            raise RequestError(
                401, "This key does not belong to a running trajectory.", "invalid_api_key"
            )
        return recorder

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": self._model, "object": "model", "created": 0, "owned_by": "nemo-like"}
        return web.json_response({"object": "list", "data": [card]})

    def _answering(self, answer: Any) -> Any:
        """A handler whose refusals are answers, too."""

        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                recorder = self._recorder(request)
                asked = _read(await request.read()) if request.method == "POST" else {}
                return await answer(request, recorder, asked)
            except RequestError as error:
                return error.response()
            except EndedError as error:
                code = "context_length_exceeded" if error.end == "context" else "trajectory_ended"
                return RequestError(400, str(error), code).response()
            except UserError as error:
                return RequestError(400, str(error), "bad_messages").response()
            except RunError as error:
                return RequestError(503, str(error), "engine_failed").response()

        return handle

    def _warn_of_overridden(self, asked: Mapping[str, Any]) -> None:
        for name in sorted(asked.keys() - _READ - self._warned):
            value = asked[name]
            if value not in (None, [], {}, *_HARMLESS.get(name, ())):
                self._warned.add(name)
                logger.warning(
                    "A request asks for %s=%s, which has no effect; the run's own settings apply.",
                    name[:40],
                    json.dumps(value)[:80],
                )

    async def _chat(
        self, request: web.Request, recorder: Recorder, asked: Mapping[str, Any]
    ) -> web.StreamResponse:
        messages: Any = cleaned(asked.get("messages"))
        for one in messages if isinstance(messages, list) else ():
            if isinstance(one, dict) and one.get("role") == "developer":
                one["role"] = "system"  # the same, in newer clients
        wrong = fault(messages)
        if not isinstance(messages, list) or not messages or wrong:
            text = f"'messages' must be a list of messages{wrong}."
            raise RequestError(400, text, "bad_messages")
        tools = asked.get("tools") or []
        if not isinstance(tools, list) or not all(map(_is_tool, tools)):
            raise RequestError(400, "'tools' must be a list of named functions.", "bad_tools")
        if asked.get("tool_choice") == "none":
            tools = []
        turns = await self._sample(recorder, asked, messages, tools)
        choices = [
            chat_choice(i, turn, recorder.logprobs(turn) if asked.get("logprobs") else None)
            for i, turn in enumerate(turns)
        ]
        kind = "chat.completion.chunk" if asked.get("stream") else "chat.completion"
        return await self._send(request, recorder, asked, kind, turns, choices)

    async def _completions(
        self, request: web.Request, recorder: Recorder, asked: Mapping[str, Any]
    ) -> web.StreamResponse:
        prompt = asked.get("prompt")
        if not isinstance(prompt, str):
            raise RequestError(400, "'prompt' must be a single string.", "bad_prompt")
        turns = await self._sample(recorder, asked, prompt, ())
        wants = not (asked.get("logprobs") is None or asked["logprobs"] is False)  # 0 is a number
        choices = [
            text_choice(i, turn, recorder.logprobs(turn) if wants else None)
            for i, turn in enumerate(turns)
        ]
        return await self._send(request, recorder, asked, "text_completion", turns, choices)

    async def _sample(
        self,
        recorder: Recorder,
        asked: Mapping[str, Any],
        messages: Sequence[Message] | str,
        tools: Sequence[Any],
    ) -> Sequence[Turn]:
        self._warn_of_overridden(asked)
        most = asked.get("max_completion_tokens")
        most = asked.get("max_tokens") if most is None else most
        stop, count = asked.get("stop") or [], asked.get("n") or 1
        stop = [stop] if isinstance(stop, str) else stop
        if not isinstance(stop, list) or not all(isinstance(one, str) and one for one in stop):
            raise RequestError(400, "'stop' must be a string or a list of strings.", "bad_stop")
        if not isinstance(count, int) or not 1 <= count <= _MOST_CHOICES:
            raise RequestError(400, f"'n' must be from 1 to {_MOST_CHOICES}.", "bad_n")
        if most is not None and (not isinstance(most, int) or most < 1):
            raise RequestError(400, "'max_tokens' must be a positive integer.", "bad_max_tokens")
        found = await asyncio.gather(
            *(
                recorder.complete(messages, tools, max_new_tokens=most, stop=stop)
                for _ in range(count)
            ),
            return_exceptions=True,
        )
        turns = [one for one in found if isinstance(one, Turn)]
        if failure := next((one for one in found if isinstance(one, BaseException)), None):
            recorder.forget(turns)
            raise failure
        return turns

    async def _send(
        self,
        request: web.Request,
        recorder: Recorder,
        asked: Mapping[str, Any],
        kind: str,
        turns: Sequence[Turn],
        choices: Sequence[Mapping[str, Any]],
    ) -> web.StreamResponse:
        """Send the answer, if the client is still connected."""
        try:
            if request.transport is None or request.transport.is_closing():
                raise ConnectionResetError
            if asked.get("stream"):
                return await self._stream(request, asked, kind, turns, choices)
        except ConnectionError:
            recorder.forget(turns)
        return web.json_response(self._body(asked, kind, turns, choices))

    def _body(
        self,
        asked: Mapping[str, Any],
        kind: str,
        turns: Sequence[Turn],
        choices: Sequence[Mapping[str, Any]],
    ) -> dict[str, Any]:
        prompt = turns[0].prompt_tokens if turns else 0
        sampled = sum(len(turn.completion.token_ids) for turn in turns)
        return {
            "id": turns[0].id if len(turns) == 1 else f"cmpl-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": asked.get("model") or self._model,
            "choices": list(choices),
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": sampled,
                "total_tokens": prompt + sampled,
            },
        }

    async def _stream(
        self,
        request: web.Request,
        asked: Mapping[str, Any],
        kind: str,
        turns: Sequence[Turn],
        choices: Sequence[Mapping[str, Any]],
    ) -> web.StreamResponse:
        """The whole answer as events, once sampling has finished."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        body = self._body(asked, kind, turns, [])
        usage = body.pop("usage")
        for choice in choices:
            for part in parts(choice):
                await send_event(response, body | {"choices": [part]})
        if (asked.get("stream_options") or {}).get("include_usage"):
            await send_event(response, body | {"usage": usage})
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


async def _no_such(request: web.Request, *_: Any) -> web.StreamResponse:
    text = f"{request.method} {request.path} is not served; chat/completions and completions are."
    raise RequestError(404, text, "not_found")


def _read(body: bytes) -> dict[str, Any]:
    """The parameters; RequestError for what is none, or has text that no tokenizer takes."""
    try:
        asked = json.loads(body)
        if b"\\ud" in body.lower():  # such as JavaScript's halves of an emoji
            json.dumps(asked, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise RequestError(
            400, f"The body is not JSON of valid text: {error}", "bad_json"
        ) from error
    if not isinstance(asked, dict):
        raise RequestError(400, "The body is not a JSON object.", "bad_json")
    return asked


def _is_tool(tool: object) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)
