"""A program as a harness: it gets the model's address in its environment and prints its reward."""

import asyncio
import contextlib
import json
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO, Any

from nemo_like.errors import UserError

_MOST_ERROR_CHARS = 300
_MOST_BYTES = 1 << 20
"""Bytes kept from the end of a program's output."""


async def run(
    row: Mapping[str, Any], base_url: str, api_key: str, *, command: Sequence[str]
) -> Any:
    """Start ``command`` with ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY``, the row as JSON on its
    standard input; the last line that it prints is the reward, a number or a JSON object."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        # Files, since processes that the program leaves behind would hold pipes open.
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=out,
            stderr=err,
            env=os.environ | {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key},
            start_new_session=True,
        )
        try:
            await process.communicate(json.dumps(row).encode())
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        lines, said = _end_of(out).splitlines(), _end_of(err)[-_MOST_ERROR_CHARS:]
    if process.returncode:
        raise UserError(f"{command[0]} ended with exit code {process.returncode}: {said}")
    try:
        return json.loads(lines[-1])
    except (IndexError, ValueError) as error:
        last = lines[-1][:_MOST_ERROR_CHARS] if lines else "nothing"
        raise UserError(f"{command[0]} must print its reward last, not {last!r}.") from error


def _end_of(file: IO[bytes]) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - _MOST_BYTES))
    return file.read().decode(errors="replace").strip()
