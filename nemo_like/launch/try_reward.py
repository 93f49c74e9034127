"""``nemo-like try-reward``: a reward function on a few rows, without Ray, a GPU or a model.

It runs in the same processes and under the same limits as a run, and its output is shown.
"""

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from nemo_like.algorithms.rows import read_rows
from nemo_like.compose.load import compose_raw
from nemo_like.config.environment import SINGLE_TURN
from nemo_like.config.typed import as_typed
from nemo_like.data.datasets import Row
from nemo_like.errors import RunError, UserError
from nemo_like.launch.command import ConfigParser, whole_number
from nemo_like.rewards.pool import RewardPool
from nemo_like.rewards.protocol import RewardResult
from nemo_like.rewards.start import start_pool

_USAGE = "nemo-like try-reward REWARD DATA [key=value ...] [--rows N] [--completion TEXT]"
_COLUMNS = ("reference", "answer", "solution")
"""Columns with a text to score; the first one that the row has is used."""


def run(arguments: Sequence[str]) -> None:
    """Score rows and print the results; RunError if every row failed."""
    parser = ConfigParser("try-reward", _USAGE, __doc__)
    parser.add_argument("--rows", type=whole_number(1), default=10, help="rows to score (10)")
    parser.add_argument(
        "--completion", help=f"text to score (the row's {', '.join(_COLUMNS[:-1])} or solution)"
    )
    options = parser.parse_intermixed_args(arguments)
    if len(options.words) < 2 or any(map(_is_key, options.words[:2])):
        raise UserError(f"try-reward needs a reward function and a file of rows; use {_USAGE}.")
    reward, data, *options.words = options.words
    folder, name, overrides, extra_dir = parser.source(options)
    ours = as_typed({"environment.reward": reward, "data.train": data, "validation.every_steps": 0})
    config = compose_raw(folder, name, [*ours, *overrides], extra_dir).load()
    if config.environment.name != SINGLE_TURN:
        raise UserError("try-reward has no model to talk to; leave out environment.name.")
    rows = read_rows(config)["data.train"][: options.rows]
    pool = start_pool(config.environment, num_threads=1)
    try:
        results = [_score(pool, row, options.completion) for row in rows]
    finally:
        pool.shutdown()
    _summarize(reward, results)


def _is_key(word: str) -> bool:
    """Whether ``word`` is key=value, and not the name of a file with an ``=``."""
    return "=" in word and not Path(word.rsplit(":", 1)[0]).exists()


def _score(pool: RewardPool, row: Row, completion: str | None) -> RewardResult:
    texts = [str(row.fields[name]) for name in _COLUMNS if name in row.fields]
    text = completion if completion is not None else next(iter(texts), "")
    began = time.monotonic()
    result = asyncio.run(pool.score(row.prompt, text, row.fields | {"messages": [*row.messages]}))
    took = time.monotonic() - began
    found = f"failed: {result.error}" if result.reward is None else f"{result.reward:g}"
    numbers = "".join(f" {name}={value:g}" for name, value in result.metrics.items())
    dropped = "".join(f" {name}: {why}" for name, why in result.dropped.items())
    sys.stdout.write(f"row {row.index}, {text[:60]!r}: {found}{numbers}{dropped} ({took:.2f} s)\n")
    sys.stdout.flush()  # between what the function prints
    return result


def _summarize(reward: str, results: Sequence[RewardResult]) -> None:
    scored = [one.reward for one in results if one.reward is not None]
    reasons = Counter(one.error for one in results if one.reward is None)
    for why, count in reasons.most_common():
        sys.stdout.write(f"{count} of {len(results)} failed: {why}\n")
    if not scored:
        raise RunError(f"environment.reward={reward} failed on all {len(results)} rows.")
    mean = sum(scored) / len(scored)
    sys.stdout.write(
        f"{len(scored)} scored: mean {mean:g}, from {min(scored):g} to {max(scored):g}.\n"
    )
