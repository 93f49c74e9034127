"""Count why rewards failed, at each step, in a file of the run's folder."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from nemo_like.batch import keys
from nemo_like.config.environment import EnvironmentConfig
from nemo_like.errors import RunError
from nemo_like.observe.sinks import JsonlFile
from nemo_like.rollout.trajectory import first_rows

if TYPE_CHECKING:
    from nemo_like.rollout.worker import RolloutResult

logger = logging.getLogger(__name__)

FILE = "reward_failures.jsonl"
_MOST_NAMED = 5


class RewardFailures:
    """Logs each reason once and counts it in ``reward_failures.jsonl``.

    A reason is the first line of a message: what one row alone is about comes below it.
    """

    def __init__(self, environment: EnvironmentConfig, run_dir: Path, resumed_step: int) -> None:
        """Drops counts of steps after ``resumed_step``; -1: a new run."""
        self._reward = environment.name_in_messages
        self._most = environment.max_failed_share
        self._path = run_dir / FILE
        self._file: JsonlFile | None = None
        self._known, self._dropped = set[str](), set[str]()
        self._parts: list[tuple[int, int, Counter[str]]] = []
        if self._path.exists():
            self._file = JsonlFile(self._path)
            self._file.truncate_after(resumed_step)
            for record in self._file.records():
                self._known |= record["reasons"].keys()

    def check(
        self,
        step: int,
        phase: str,
        rows: Mapping[str, Tensor],
        results: "Sequence[RolloutResult]",
        *,
        is_part: bool = False,
    ) -> None:
        """Count those of a step or a validation; RunError if no completion has a
        reward, or more than ``environment.max_failed_share`` have none.

        ``is_part``: of what ``check_parts`` refuses as a whole.
        """
        self._warn_of_dropped(results)
        scored = rows[keys.SAMPLE_MASK][first_rows(rows)[0]]
        failed = int((~scored).sum())
        found = sum((Counter(one.errors) for one in results), Counter[str]())
        if is_part:
            self._parts.append((failed, len(scored), found))
        if not failed:
            return
        reasons, examples = _by_kind(found)
        record = {"step": step, "phase": phase, "failed": failed, "of": len(scored)}
        self._file = self._file or JsonlFile(self._path)
        self._file.append(record | {"reasons": reasons})
        when = f"step {step}" if phase == "train" else f"validation at step {step}"
        if not is_part:
            self._refuse(when, failed, len(scored), found)
        new = [
            f"{count} x {examples[why]}" for why, count in reasons.items() if why not in self._known
        ]
        self._known |= reasons.keys()
        if len(new) > _MOST_NAMED:
            new[_MOST_NAMED:] = [f"{len(new) - _MOST_NAMED} more in {FILE}"]
        logger.warning(
            "%s failed on %d of %d completions of %s, which are masked; %s",
            self._reward,
            failed,
            len(scored),
            when,
            "; ".join(new) or f"for reasons logged before, counted in {FILE}",
        )

    def check_parts(self, when: str) -> None:
        """Raise RunError as ``check`` does, for all parts together."""
        failed, of, found = zip(*self._parts, strict=True)
        if sum(failed):
            self._refuse(when, sum(failed), sum(of), sum(found, Counter[str]()))

    def _refuse(self, when: str, failed: int, num_scored: int, found: Counter[str]) -> None:
        reasons, examples = _by_kind(found)
        why, count = next(iter(reasons.items()))
        if failed == num_scored:
            raise RunError(
                f"{self._reward} failed on all {failed} completions of {when}; "
                f"first: {examples[why]}"
            )
        if failed > self._most * num_scored:
            raise RunError(
                f"{self._reward} failed on {failed} of {num_scored} completions of {when}, "
                f"more than environment.max_failed_share={self._most:g} allows; most often "
                f"({count}): {examples[why]}"
            )

    def _warn_of_dropped(self, results: "Sequence[RolloutResult]") -> None:
        """Say once of each metric that it is left out where it is not a number."""
        for name, why in (each for one in results for each in one.dropped_metrics.items()):
            if name in self._dropped:
                continue
            self._dropped.add(name)
            logger.warning(
                "%s: metric %r is left out of rows where it is not a finite number (%s); the "
                "reward counts.",
                self._reward,
                name,
                why,
            )


def _by_kind(found: Mapping[str, int]) -> tuple[dict[str, int], dict[str, str]]:
    """How often each reason was given, most frequent first, and one whole message of each."""
    counts, examples = Counter[str](), dict[str, str]()
    for text, count in found.items():
        kind = text.partition("\n")[0]
        counts[kind] += count
        examples.setdefault(kind, " ".join(text.split()))
    return dict(counts.most_common()), examples
