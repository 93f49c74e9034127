"""A program as a harness: it gets the model's address in its environment and prints its reward."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_like.errors import UserError

_MOST_ERROR_CHARS = 300


async def run(
    row: Mapping[str, Any], base_url: str, api_key: str, *, command: Sequence[str]
) -> Any:
    """Start ``command`` with ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY``, the row as JSON on its
    standard input; the last line that it prints is the reward, a number or a JSON object."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key},
        start_new_session=True,
    )
    try:
        out, err = await process.communicate(json.dumps(row).encode())
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and what it has left running
    said = err.decode(errors="replace").strip()[-_MOST_ERROR_CHARS:]
    if process.returncode:
        raise UserError(f"{command[0]} ended with exit code {process.returncode}: {said}")
    lines = out.decode(errors="replace").strip().splitlines()
    try:
        return json.loads(lines[-1])
    except (IndexError, ValueError) as error:
        last = lines[-1][:_MOST_ERROR_CHARS] if lines else "nothing"
        raise UserError(f"{command[0]} must print its reward last, not {last!r}.") from error
