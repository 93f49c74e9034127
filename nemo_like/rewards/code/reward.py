"""The reward ``code``: the completion's program passes the row's tests.

``python -m nemo_like.rewards.code.reward FD SPEC …`` is a reward process that runs programs.

The program is the last fenced block (``extract``), run as Python, each test in a process and an
empty folder of its own (``sandbox/program.py``). What counts as passed is in ``compare``, the forms
of tests in ``cases``. What a program does, its own end included, is right or wrong; a row without
tests, and a sandbox that fails, is neither: the row has no reward.
"""

import json
import logging
import secrets
import sys
import time
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path
from typing import Any

from nemo_like.config.environment import CODE
from nemo_like.errors import UserError
from nemo_like.rewards.code.cases import Asserted, Case, Printed, Returned, cases_of
from nemo_like.rewards.code.compare import same_output, same_value
from nemo_like.rewards.code.extract import program_of
from nemo_like.rewards.function import RewardFunction
from nemo_like.rewards.process import serve
from nemo_like.rewards.sandbox.program import (
    Limits,
    ProgramResult,
    SandboxError,
    isolation,
    run_program,
)

MARGIN_S = 2.0
"""Of the row's time: for the sandbox itself."""
_HARNESS = (Path(__file__).parent / "harness.py").read_text(encoding="utf-8")
_MOST_DIGITS = 4000


class CodeReward:
    """Scores completions by tests; ``row_s``: seconds that all tests of a row may take."""

    def __init__(
        self,
        credit: str = "strict",
        limits: Limits | None = None,
        row_s: float = 10.0 - MARGIN_S,
    ) -> None:
        self._is_partial = credit == "partial"
        self._limits = limits or Limits()
        self._row_s = row_s

    def __call__(
        self, prompt: str, completion: str, tests: Any, fn_name: str | None = None, **fields: Any
    ) -> Awaitable[dict[str, Any]]:
        """Score one completion; not an ``async def``, since rows share the processors."""
        return self._score(completion, cases_of(tests, fn_name))

    async def _score(self, completion: str, cases: list[Case]) -> dict[str, Any]:
        program = program_of(completion)
        passed, late, seconds = 0, 0, 0.0
        deadline = time.monotonic() + self._row_s
        for case in cases:
            if program is None:
                break
            left = deadline - time.monotonic()
            if left <= 0:
                late += 1
                continue
            try:
                is_right, result = await self._check(program, case, left)
            except SandboxError as error:
                return {"reward": None, "error": f"the sandbox failed: {error}"}
            passed += is_right
            late += result.reason in ("time", "cpu")
            seconds += result.seconds
        share = passed / len(cases)
        return {
            "reward": share if self._is_partial else float(passed == len(cases)),
            "tests_passed": share,
            "tests_late": late / len(cases),
            "has_code": program is not None,
            "seconds": seconds,
        }

    async def _check(self, program: str, case: Case, left_s: float) -> tuple[bool, ProgramResult]:
        limits = replace(self._limits, seconds=min(self._limits.seconds, left_s))
        if isinstance(case, Printed):
            result = await run_program(program, case.stdin, limits)
            is_right = result.exit == 0 and same_output(result.stdout, case.stdout)
            return is_right, result
        word = secrets.token_hex(16)
        job = {"program": program, "word": word}
        if isinstance(case, Asserted):
            job |= {"code": case.code}
        else:
            job |= {"name": case.name, "arguments": case.arguments}
        result = await run_program(_HARNESS, json.dumps(job), limits)
        _, found, text = result.stdout.rpartition(f"\n{word}")
        if result.exit != 0 or not found:
            return False, result
        return isinstance(case, Asserted) or _is_value(text, case), result


def _is_value(text: str, case: Returned) -> bool:
    try:
        return same_value(json.loads(text, parse_int=_integer), case.value)
    except (ValueError, RecursionError):
        return False


def _integer(digits: str) -> Any:
    """Longer ones take long to read, and no row can have them."""
    return int(digits) if len(digits) < _MOST_DIGITS else digits.encode()


reward = CodeReward()


def load(spec: str) -> RewardFunction:
    """The reward with the options of ``spec``, once it is known how programs run here."""
    options = json.loads(spec)
    row_s = options["timeout_s"] - MARGIN_S
    limits = Limits(seconds=options["seconds"], memory_bytes=int(options["memory_gib"] * 2**30))
    try:
        isolation()
    except SandboxError as error:
        raise UserError(f"environment.reward={CODE}: {error}") from error
    scorer = CodeReward(options["credit"], limits, row_s)
    return RewardFunction(CODE, scorer, None, frozenset({"tests"}))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    serve(sys.argv[1:], load)
