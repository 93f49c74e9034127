"""Conversations in a reward process: ``python -m nemo_like.environments.episode FD SPEC …``.

An environment is driven turn by turn; a harness, an ``async def run(row, base_url, api_key)``, goes
its own way. Both reach the model at the worker's endpoint (``rollout/endpoint.py``).
"""

import asyncio
import contextlib
import inspect
import json
import sys
import threading
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp

from nemo_like.config.environment import ENVIRONMENTS
from nemo_like.environments.protocol import (
    ENDPOINT,
    Action,
    Observation,
    StepResult,
    called,
    calls_of,
)
from nemo_like.errors import UserError
from nemo_like.rewards.find import load_reward
from nemo_like.rewards.function import RewardFunction
from nemo_like.rewards.process import serve
from nemo_like.rewards.protocol import IS_CHAT

KEY = "environment.name"
_NO_ROOM = ("context_length_exceeded", "trajectory_ended")
_STACK_BYTES = 2 << 20
_LONGEST_WAIT = aiohttp.ClientTimeout(total=None)  # the trajectory has a limit of its own


class NoRoomError(Exception):
    """The trajectory takes no more turns."""


class Episodes:
    """Runs a conversation for each row."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        """``spec``: ``name``, ``options``, ``reward``, ``timeout_s``, and how many ``at_once``.

        Raises UserError if one of them cannot be used.
        """
        self._spec = spec
        self._made = ENVIRONMENTS.load(KEY, spec["name"])
        self._is_harness = inspect.iscoroutinefunction(self._made)
        self._reward: RewardFunction | None = None
        if not self._is_harness:
            for method in ("reset", "step"):
                if not callable(getattr(self._made, method, None)):
                    raise UserError(
                        f"{KEY}={spec['name']} has no {method}(); give a class with reset(row) and "
                        "step(action), or an async def run(row, base_url, api_key)."
                    )
            self._new()
            if spec["reward"] is not None:
                self._reward = load_reward(spec["reward"])
        self._session: aiohttp.ClientSession | None = None
        threading.stack_size(_STACK_BYTES)  # there may be one thread per conversation
        self._replace_threads()

    def _replace_threads(self) -> None:
        self._threads = ThreadPoolExecutor(self._spec["at_once"])
        self._num_late = 0

    def _new(self) -> Any:
        try:
            return self._made(**self._spec["options"])
        except Exception as error:  # the user's code
            raise UserError(
                f"{KEY}={self._spec['name']} does not take environment.options="
                f"{json.dumps(self._spec['options'])}: {error}"
            ) from error

    async def __call__(self, prompt: str, completion: str, **fields: Any) -> Any:
        """One conversation; what a reward function may return."""
        base_url, api_key = fields.pop(ENDPOINT)
        form = {IS_CHAT: fields.pop(IS_CHAT, False)}
        row = fields | {"prompt": prompt}
        if self._is_harness:
            found = self._made(row, base_url, api_key, **self._spec["options"])
            return await found
        return await self._drive(row, form, base_url, api_key)

    async def _drive(
        self, row: dict[str, Any], form: Mapping[str, Any], base_url: str, api_key: str
    ) -> dict[str, Any]:
        environment = self._new()
        asyncio.get_running_loop().set_default_executor(self._threads)  # asyncio.to_thread has few
        try:
            opened = await self._call(environment.reset, row)
            _refuse_unless(Observation, "reset", opened)
            messages = list(row["messages"] if opened.messages is None else opened.messages)
            rewards: dict[str, float] = {}
            metrics = Counter[str]()
            text = ""
            while True:
                try:
                    name, choice = await self._ask(base_url, api_key, messages, opened.tools)
                except NoRoomError:
                    break
                message = choice["message"]
                action = _action(choice)
                text = action.text
                result = await self._call(environment.step, action)
                _refuse_unless(StepResult, "step", result)
                metrics.update({f"environment/{k}": v for k, v in result.metrics.items()})
                if result.reward is not None:
                    rewards[name] = result.reward
                if result.done or action.truncated:
                    break
                if not result.messages:
                    raise UserError("step() gave neither messages nor done=True.")
                messages += [message, *result.messages]
            return await self._result({**row, **form}, text, rewards, metrics)
        finally:
            if (close := getattr(environment, "close", None)) is not None:
                with contextlib.suppress(Exception):  # the user's code, when all is over
                    await self._call(close)

    async def _result(
        self,
        row: dict[str, Any],
        text: str,
        rewards: Mapping[str, float],
        metrics: Mapping[str, float],
    ) -> dict[str, Any]:
        if rewards or self._reward is None:
            return {"steps": rewards, **metrics}
        fields = {name: value for name, value in row.items() if name != "prompt"}
        if self._reward.queues:
            found = await self._reward(row["prompt"], text, fields)
        else:
            found = await self._call(self._reward, row["prompt"], text, fields)
        return {**metrics, **(found if isinstance(found, Mapping) else {"reward": found})}

    async def _call(self, method: Any, *arguments: Any) -> Any:
        """Call the user's method: on the loop if ``async``, else in a thread; with a time limit."""
        limit_s = self._spec["timeout_s"]
        inner = getattr(method, "function", method)
        limit = asyncio.timeout(limit_s)
        try:
            async with limit:
                if inspect.iscoroutinefunction(inner):
                    return await method(*arguments)
                loop = asyncio.get_running_loop()
                found = await loop.run_in_executor(self._threads, called, method, *arguments)
                return await found if inspect.isawaitable(found) else found
        except TimeoutError as error:
            if not limit.expired():  # one of the method's own
                raise
            self._num_late += 1
            if 2 * self._num_late > self._spec["at_once"]:  # such a thread may never be free again
                self._replace_threads()
            name = getattr(inner, "__name__", "it")
            raise TimeoutError(f"{name}() took longer than {limit_s:g} s") from error

    async def _ask(
        self, base_url: str, api_key: str, messages: list[Any], tools: Any
    ) -> tuple[str, dict[str, Any]]:
        """The id of the response, and its choice."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=_LONGEST_WAIT
            )
        body = {"messages": messages} | ({"tools": list(tools)} if tools else {})
        async with self._session.post(
            f"{base_url}/chat/completions",
            json=body,
            headers={"Authorization": f"Bearer {api_key}"},
        ) as response:
            answer = await response.json()
        if "error" in answer:
            if answer["error"]["code"] in _NO_ROOM:
                raise NoRoomError
            raise UserError(answer["error"]["message"])
        return answer["id"], answer["choices"][0]


def _refuse_unless(kind: type, name: str, found: Any) -> None:
    if not isinstance(found, kind):
        raise UserError(
            f"{name}() returned {type(found).__name__} and must return {kind.__name__} "
            "(nemo_like.environments.protocol)."
        )


def _action(choice: Mapping[str, Any]) -> Action:
    message = choice["message"]
    message["content"] = message["content"] or ""
    return Action(
        text=message["content"],
        tool_calls=calls_of(message),
        errors=choice.get("tool_call_errors", ()),
        truncated=choice["finish_reason"] == "length",
    )


def load(spec: str) -> RewardFunction:
    """What scores a row, by having its conversation."""
    return RewardFunction(
        spec,
        Episodes(json.loads(spec)),
        accepted_fields=None,
        required_fields=frozenset(),
        is_async=True,
    )


if __name__ == "__main__":
    serve(sys.argv[1:], load)
