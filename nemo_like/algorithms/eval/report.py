"""From scored samples to the numbers of ``eval.json`` and a table to read."""

import json
import logging
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Any

from nemo_like.algorithms.eval.config import EvalConfig
from nemo_like.algorithms.eval.statistics import (
    majority_at,
    mean_of_prompts,
    pass_at,
    share_of_prompts,
)
from nemo_like.data.datasets import Row
from nemo_like.errors import UserError
from nemo_like.rollout.trajectory import Sample

logger = logging.getLogger(__name__)

Scored = list[tuple[float, str | None]]
"""Reward and answer of each completion of one prompt whose reward did not fail."""


class Measured:
    """All samples of an evaluation so far. Completions whose reward failed are only counted."""

    def __init__(self, config: EvalConfig, rows: Sequence[Row]) -> None:
        self._config, self._rows = config, rows
        self._scored: list[Scored] = [[] for _ in rows]
        self._lengths: list[int] = []
        self._num_truncated = 0

    def add(self, samples: Sequence[Sample]) -> Iterator[dict[str, Any]]:
        """Take samples in; yields the record of each for ``samples.jsonl``."""
        for sample in samples:
            row, result = self._rows[sample.prompt], sample.result
            self._lengths.append(sample.num_tokens)
            self._num_truncated += sample.truncated
            if result.reward is not None:
                self._scored[sample.prompt].append((result.reward, result.answer))
            yield {
                "row": row.index,
                "index": sample.index,
                "category": self._category(row),
                "prompt": row.prompt,
                "completion": sample.text,
                "reward": result.reward,
                "answer": result.answer,
                "metrics": result.metrics,
                "error": result.error,
                "num_tokens": sample.num_tokens,
                "truncated": sample.truncated,
            }

    def report(self) -> dict[str, Any]:
        """All numbers. Raises UserError for maj@k without answers."""
        config = self._config
        self._check_answers()
        everything = [group for group in self._scored if group]
        categories: dict[str, list[Scored]] = {}
        for row, group in zip(self._rows, self._scored, strict=True):
            if config.eval.category_field is not None and group:
                categories.setdefault(str(self._category(row)), []).append(group)
        num_scored = sum(map(len, everything))
        return {
            "model": config.policy.model,
            "seed": config.run.seed,
            "num_prompts": len(self._rows),
            "num_completions": len(self._lengths),
            "num_failed": len(self._lengths) - num_scored,
            **self._numbers(everything),
            "categories": {name: self._numbers(categories[name]) for name in sorted(categories)},
            "completion_tokens": {
                "mean": math.fsum(self._lengths) / len(self._lengths),
                "median": statistics.median(self._lengths),
                "min": min(self._lengths),
                "max": max(self._lengths),
            },
            "truncated_share": self._num_truncated / len(self._lengths),
            "validation": config.validation.model_dump(exclude={"every_steps"}),
            "eval": config.eval.model_dump(),
        }

    def _numbers(self, groups: Sequence[Scored]) -> dict[str, Any]:
        passes = self._config.eval.pass_reward
        votes = [[(answer or "", reward >= passes) for reward, answer in group] for group in groups]
        right = [[float(passed) for _, passed in group] for group in votes]

        def mean_at(k: int, of_group: Callable[[list[tuple[str, bool]]], Fraction]) -> Any:
            """Over prompts with k scored completions; None if there is none."""
            found = [[float(of_group(group))] for group in votes if len(group) >= k]
            return asdict(share_of_prompts(found)) if found else None

        return {
            "reward": asdict(mean_of_prompts([[r for r, _ in group] for group in groups])),
            "accuracy": asdict(share_of_prompts(right)),
            "pass_at": {
                str(k): mean_at(
                    k, lambda group, k=k: pass_at(len(group), sum(p for _, p in group), k)
                )
                for k in self._config.eval.pass_at
            },
            "majority_at": {
                str(k): mean_at(k, lambda group, k=k: majority_at(group, k))
                for k in self._config.eval.majority_at
            },
        }

    def _category(self, row: Row) -> Any:
        field = self._config.eval.category_field
        return None if field is None else row.fields[field]

    def _check_answers(self) -> None:
        asked = self._config.eval.majority_at
        if asked and all(answer is None for group in self._scored for _, answer in group):
            raise UserError(
                f"eval.majority_at={asked} needs answers to vote on, and environment.reward="
                f"{self._config.environment.reward} reports none; let it return a dict with "
                "'reward' and 'answer', or set eval.majority_at=[] (samples.jsonl is complete)."
            )


def write_report(report: dict[str, Any], path: Path) -> None:
    """Write ``eval.json``, and a table to the log."""
    path.write_text(json.dumps(report, indent=2) + "\n")
    logger.info("%s", table(report))


def table(report: dict[str, Any]) -> str:
    """Estimates by line, categories below the whole."""
    lines = [f"{report['model']}, {report['num_completions']} completions:"]
    parts = {"all": report} | report["categories"]
    for category, numbers in parts.items():
        rows = {"reward": numbers["reward"], "accuracy": numbers["accuracy"]}
        rows |= {f"pass@{k}": one for k, one in numbers["pass_at"].items()}
        rows |= {f"maj@{k}": one for k, one in numbers["majority_at"].items()}
        lines += [_line(f"{category} {name}", one) for name, one in rows.items()]
    tokens = report["completion_tokens"]
    lines.append(
        f"tokens: mean {tokens['mean']:.1f}, median {tokens['median']:g}, max {tokens['max']}; "
        f"truncated {report['truncated_share']:.1%}; the reward failed on {report['num_failed']}"
    )
    return "\n".join(lines)


def _line(name: str, estimate: dict[str, Any] | None) -> str:
    if estimate is None:
        return f"{name:<40}{'-':>8}  (no prompt has as many scored completions)"
    interval = ""
    if estimate["low"] is not None:
        interval = f"  95 % in [{estimate['low']:.4f}, {estimate['high']:.4f}]"
    return f"{name:<40}{estimate['mean']:>8.4f}{interval}  ({estimate['num_prompts']} prompts)"
