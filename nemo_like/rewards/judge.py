"""The reward ``judge``: a model on an OpenAI-compatible server scores completions.

A row without a verdict (the server is down, refuses, or answers something else) has no reward: it
is masked and counted, never treated as a bad answer. What it answered is below the first line of
the message, by which failures are counted (``rollout/failures.py``).
"""

import asyncio
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
from jinja2 import StrictUndefined, TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nemo_like.doors import error_text
from nemo_like.errors import UserError

_TEMPLATE = """\
Judge an assistant's answer.

Question:
{{ prompt }}

Answer:
{{ completion }}

How good is the answer, from 0 to 10? Say why in a few sentences. End with one
line: "Score: " and the number."""
_GIVEN = {"prompt", "completion", "messages"}
_KEY = "JUDGE_API_KEY"
_TRIES = 3
_FIRST_WAIT_S = 0.5
_MOST_CHARS = 200


class Judge:
    """A reward function that asks the judge of ``environment.judge``."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """``settings``: the section, ``timeout_s`` of a row, and ``max_requests`` of this process.

        Raises UserError for an invalid template.
        """
        self._settings = settings
        self._name = f"the judge {settings['model']} at {settings['url']}"
        source = settings["template"] or _TEMPLATE
        try:
            if "{{" not in source:
                source = Path(source).expanduser().read_text(encoding="utf-8")
            jinja = ImmutableSandboxedEnvironment(undefined=StrictUndefined)
            self._template = jinja.from_string(source)
            named = meta.find_undeclared_variables(jinja.parse(source))
        except (OSError, TemplateError) as error:
            raise UserError(f"environment.judge.template: {error}.") from error
        self.required_fields = frozenset(named - _GIVEN)
        self._slots = asyncio.Semaphore(settings["max_requests"])
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, prompt: str, completion: str, **fields: Any) -> dict[str, float]:
        """The reward of one completion, with the number of requests and seconds it took."""
        try:
            text = self._template.render(fields, prompt=prompt, completion=completion)
        except TemplateError as error:
            raise UserError(f"environment.judge.template: {error}.") from error
        async with self._slots:
            begin = time.monotonic()
            answer, requests = await self._ask(text)
            seconds = time.monotonic() - begin
        return {
            "reward": self._reward(answer),
            "judge_requests": requests,
            "judge_seconds": seconds,
        }

    async def _ask(self, text: str) -> tuple[str, int]:
        """The judge's answer, and the number of requests it took."""
        deadline = time.monotonic() + self._settings["timeout_s"]
        number, problem = 0, "none was made"
        for number in range(1, _TRIES + 1):
            wait_s = _FIRST_WAIT_S * 2 ** (number - 1)
            try:
                status, body, asked_wait_s = await self._post(text, deadline - time.monotonic())
                if status == 200:
                    return _content(body), number
                problem = f"{status}\n{str(body)[:_MOST_CHARS]}"
                if status < 500 and status != 429:
                    break
                wait_s = max(wait_s, asked_wait_s)
            except TimeoutError as error:
                problem = error_text(error)
                break
            except (aiohttp.ClientError, OSError) as error:
                problem = error_text(error)
            if number == _TRIES or time.monotonic() + wait_s > deadline:
                break
            await asyncio.sleep(wait_s)
        raise UserError(f"{self._name} gave no verdict in {number} tries: {problem}")

    async def _post(self, text: str, limit_s: float) -> tuple[int, Any, float]:
        """Status, body, and the seconds of ``Retry-After``."""
        settings = self._settings
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), trust_env=True
            )
        key = os.environ.get(_KEY)  # which the process has only if it is to be sent
        async with self._session.post(
            f"{settings['url'].rstrip('/')}/chat/completions",
            json={"model": settings["model"], "messages": [{"role": "user", "content": text}]}
            | settings["parameters"],
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=aiohttp.ClientTimeout(total=limit_s),
        ) as response:
            try:
                asked_wait_s = float(response.headers.get("Retry-After", 0))
            except ValueError:  # a date
                asked_wait_s = 0.0
            is_json = response.content_type == "application/json"
            body = await (response.json() if is_json else response.text(errors="replace"))
            return response.status, body, asked_wait_s

    def _reward(self, answer: str) -> float:
        settings = self._settings
        found = [match[1] for match in re.finditer(settings["pattern"], answer)]
        verdicts = settings["verdicts"]
        if found and found[-1] in verdicts:
            return verdicts[found[-1]]
        try:
            number = float(found[-1]) if found and not verdicts else float("nan")
        except (TypeError, ValueError):  # the group matched nothing, or no number
            number = float("nan")
        if not 0 <= number <= 10:
            raise UserError(f"{self._name} gave no verdict\n{answer[-_MOST_CHARS:]!r}")
        return number / 10


def _content(body: Any) -> str:
    """The text of a response; empty if it has none."""
    try:
        return body["choices"][0]["message"]["content"] or ""
    except (LookupError, TypeError):
        return ""
