"""The part of ``nemo-like plan`` on sampling ahead: which GPUs sample, and how far ahead."""

import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nemo_like.config.run import RunConfig
from nemo_like.config.sampling import PolicyGradientRunConfig, SamplingRunConfig
from nemo_like.errors import UserError
from nemo_like.launch.plan_memory import table
from nemo_like.launch.simulation import Outcome, Workload, log_normal, simulate
from nemo_like.planning.layout import parallel_sizes
from nemo_like.planning.model_shape import MOST_SEQUENCES, ModelShape
from nemo_like.planning.resources import ResourcePlan, plan_run, sequences_at_once
from nemo_like.planning.step_time import (
    ROLLOUT_S,
    RowTokens,
    decoding,
    predict_step,
    row_seconds,
)

_LAGS = (0, 1, 2, 4)
_SIZES = (8, 64, 512, 4096)
_NEARLY_BEST = 0.97
"""A smaller lag with this share of the most tokens/s is the better choice."""
_MOST_ROWS = 2048
"""Completions of a step that are simulated; of a larger step, one of several equal parts is."""
_MOST_COMPLETIONS = 30_000
"""Completions of all simulated steps together."""
_WITH_MPS = 0.43
"""``Workload.shared`` with MPS. Fitted to three steps on H200s (``lag-h200.jsonl`` 17, 37 and 40),
which are simulated within 15 %."""
_MOST_OF_AN_ENGINE = 20_000
"""Completions of an engine and step; more would take minutes to simulate."""


@dataclass(frozen=True, kw_only=True)
class Times:
    """What steps take, in parts that hold for any number of workers."""

    source: str
    token_s: Callable[[int], float]
    """Seconds in which an engine makes one more token of each of so many completions."""
    slots: int
    """The most completions that an engine works on at once."""
    row_s: float = 0.0
    group_s: float = 0.0
    """See ``Workload``."""
    train_s: float
    """Seconds of one worker to train on a token."""
    refit_s: float
    lengths: list[float]
    """Tokens of completions, in equal shares."""


def predicted(
    config: SamplingRunConfig,
    shape: ModelShape,
    plan: ResourcePlan,
    lengths: list[float] | None = None,
    prompt: float = 0.0,
) -> Times:
    """By the formulas of ``plan``; by default the longest completions are ten times the median."""
    if lengths is None:
        draw, numbers = log_normal(config.generation.max_new_tokens / 10), random.Random(0)
        lengths = [draw(numbers) for _ in range(4096)]
    mean = statistics.mean(lengths)
    tokens = RowTokens(prompt=prompt, completion=mean, longest=max(lengths))
    phases = {one.name: one.seconds for one in predict_step(config, shape, plan, tokens)}
    del phases["rollout"]
    refit_s = phases.pop("refit")
    token = decoding(config, shape, round(prompt + mean / 2))
    return Times(
        source="times as predicted above, lengths log-normal",
        token_s=lambda count: token(count)[0],
        slots=config.generation.engine_kwargs.get("max_num_seqs", MOST_SEQUENCES),
        row_s=row_seconds(config),
        group_s=ROLLOUT_S,
        train_s=sum(phases.values()) * len(plan.policy) / (config.rows_per_step * mean),
        refit_s=refit_s,
        lengths=lengths,
    )


def measured(folder: Path, config: SamplingRunConfig, shape: ModelShape | None) -> Times:
    """Read the times of the run in ``folder``, which has ``config``; raises UserError.

    ``shape``: of a model on GPUs, where engines sample more at once with more in flight.
    """
    from nemo_like.viewer.runs import RunFolder

    run, plan = RunFolder(folder, folder.name), plan_run(config)
    steps = run.steps()
    # It may have been continued with another lag.
    if config.overlaps or any((row.get("staleness/max") or 0) > 0 for row in steps):
        raise UserError(
            f"--from={folder} is a run whose phases overlap; give one with rollout.max_lag=0 and "
            "rollout.overlap=false."
        )
    steps = steps[min(2, len(steps) // 2) :]  # the first ones compile and fill caches
    run.trajectories.refresh()
    columns = run.trajectories.columns
    train = run.trajectories.words["phase"]
    if not steps or "train" not in train:
        raise UserError(
            f"--from={folder} has no step with its trajectories; give the folder of a run that "
            "made some, with logging.trajectories_gib above 0."
        )
    lengths = columns["num_tokens"][columns["phase"] == train.index("train")].tolist()

    def median(name: str) -> float:
        return _median(name, steps, folder)

    refit, rollout = median("time/refit_s"), median("time/rollout_s")
    longest = max(median("rollout/completion_tokens_max"), 1)
    train_s = median("time/step_s") - rollout - refit
    source = f"{len(steps)} steps and {len(lengths)} completions of {folder}"
    train_s = max(train_s, 0.0) * len(plan.policy) / max(median("rollout/num_tokens"), 1)
    if shape is not None:
        of_plan = predicted(config, shape, plan, lengths)
        tokens = RowTokens(completion=statistics.mean(lengths), longest=longest)
        slower = rollout / predict_step(config, shape, plan, tokens)[0].seconds
        return replace(
            of_plan,
            source=source,
            token_s=lambda count: slower * of_plan.token_s(count),
            row_s=slower * of_plan.row_s,
            group_s=slower * of_plan.group_s,
            train_s=train_s,
            refit_s=refit,
        )
    slots = sequences_at_once(config, plan)
    waves = math.ceil(config.rows_per_step / len(plan.generation) / slots)
    return Times(
        source=source,
        token_s=lambda _: rollout / longest / waves,
        slots=slots,
        train_s=train_s,
        refit_s=refit,
        lengths=lengths,
    )


def _median(name: str, steps: Sequence[dict[str, Any]], folder: Path) -> float:
    found = [one.get(name, 0.0) for one in steps]
    if not all(isinstance(one, int | float) and 0 <= one < math.inf for one in found):
        raise UserError(
            f"--from={folder}: {name} in its metrics.jsonl is not a number, or is below 0; give "
            "another run."
        )
    return statistics.median(found)


@dataclass(frozen=True, kw_only=True)
class _Choice:
    """A split of ``workers`` and its outcome."""

    workers: int
    sampling: int | None
    """None: all sample, then all train."""
    lag: int
    found: Outcome
    tokens_per_s: float

    def row(self) -> list[str]:
        training = "all" if self.sampling is None else str(self.workers - self.sampling)
        found = self.found
        return [
            *(str(self.workers), str(self.sampling or "all"), training, str(self.lag)),
            *(f"{found.step_s:.3g} s", f"{self.tokens_per_s:,.0f}"),
            *(f"{found.engines_idle:.0%}", f"{found.trainer_idle:.0%}", f"{found.staleness:.2g}"),
        ]


class Planner:
    """Simulates splits of workers between sampling and training, with different lags."""

    def __init__(
        self,
        config: SamplingRunConfig,
        times: Times,
        plan: ResourcePlan,
        takes: Callable[[RunConfig], bool] = lambda _: True,
    ) -> None:
        """``takes``: whether a configuration would run."""
        self._takes = takes
        self._config, self._times, self._workers = config, times, plan.num_bundles
        sizes = parallel_sizes(config.policy, len(plan.policy))
        self._unit = sizes.num_ranks // sizes.dp
        """Workers that share one model in training."""
        self._may_share = plan.uses_gpus and not config.generation.sleep
        """Whether engines can sample ahead on GPUs that train."""
        self._mean = statistics.mean(times.lengths)

    def outcome(self, workers: int, sampling: int | None, lag: int) -> _Choice:
        """With as many groups for each worker as the configuration has."""
        times, loop, generation = self._times, self._config.loop, self._config.generation
        groups = self._groups(workers)
        size = loop.num_generations_per_prompt
        tokens = groups * size * self._mean
        engines = (sampling or workers) * generation.num_engines_per_bundle
        engines //= generation.tensor_parallel_size
        if groups * size > engines * _MOST_OF_AN_ENGINE:
            key = f"{self._config.section}.num_prompts_per_step={loop.num_prompts_per_step}"
            raise UserError(
                f"{key} with num_generations_per_prompt={size} gives an engine "
                f"{groups * size // engines:,} completions a step, and at most "
                f"{_MOST_OF_AN_ENGINE:,} are simulated; lower one of them."
            )
        parts = max(1, min(engines, groups, groups * size // _MOST_ROWS))
        simulated = engines // parts
        work = Workload(
            groups=max(1, round(groups * simulated / engines)),  # as many for an engine as all have
            group_size=size,
            engines=simulated,
            slots=min(times.slots, -(-groups * (1 + lag) // engines) * size),
            train_s=times.train_s * tokens / (workers - (sampling or 0)),
            refit_s=times.refit_s,
            tokens=lambda draw: times.lengths[int(draw.random() * len(times.lengths))],
            token_s=times.token_s,
            row_s=times.row_s,
            group_s=times.group_s,
            shared=0.0 if sampling else _WITH_MPS if self._config.cluster.mps else 1.0,
            lag=lag,
            by_readiness=lag > 0 and self._config.rollout_order == "ready",
        )
        turns = max(2, min(40, _MOST_COMPLETIONS // (work.groups * size)) // (1 + lag))
        found = simulate(work, turns * (1 + lag))  # as steps may take turns
        return _Choice(
            workers=workers,
            sampling=sampling,
            lag=lag,
            found=found,
            tokens_per_s=tokens / found.step_s,
        )

    def _groups(self, workers: int) -> int:
        return max(1, self._config.loop.num_prompts_per_step * workers // self._workers)

    def _runs(self, workers: int, sampling: int | None, lag: int) -> bool:
        config, cluster = self._config, self._config.cluster
        if workers != self._workers:
            key = "gpus_per_node" if cluster.gpus_per_node else "cpu_workers_per_node"
            cluster = cluster.replace(num_nodes=1, **{key: workers})
        changes: dict[str, Any] = {
            "cluster": cluster.replace(num_generation_workers=sampling),
            config.section: config.loop.replace(num_prompts_per_step=self._groups(workers)),
        }
        if isinstance(config, PolicyGradientRunConfig):
            changes["rollout"] = config.rollout.replace(max_lag=lag)
        return self._takes(config.replace(**changes))

    def splits(self, workers: int) -> list[int]:
        """Numbers of sampling workers that leave whole models to both sides."""
        tp = self._config.generation.tensor_parallel_size
        each = {workers * eighths // 8 for eighths in range(1, 8)}
        found = {one // tp * tp for one in each}
        return sorted(one for one in found if one and (workers - one) % self._unit == 0)

    def searched(self, workers: int) -> list[_Choice]:
        """The best split of each lag, of those that would run."""
        lags = _LAGS if isinstance(self._config, PolicyGradientRunConfig) else (0,)
        found: list[_Choice] = []
        for lag in lags:
            splits: list[int | None] = [*self.splits(workers)]
            if lag and self._may_share:
                splits.append(None)
            splits = [one for one in splits if self._runs(workers, one, lag)]
            each = [self.outcome(workers, one, lag) for one in splits]
            found += [max(each, key=lambda choice: choice.tokens_per_s)] if each else []
        return found

    def scaled(self, best: _Choice, workers: int) -> list[_Choice]:
        """The same split of more workers."""
        if best.sampling is None:
            return [self.outcome(workers, None, best.lag)] if best.lag else []
        tp = self._config.generation.tensor_parallel_size
        sampling = best.sampling * workers // best.workers // tp * tp
        while sampling and (workers - sampling) % self._unit:
            sampling -= tp
        return [self.outcome(workers, sampling, best.lag)] if sampling else []


def lag_lines(planner: Planner, times: Times, plan: ResourcePlan) -> Iterator[str]:
    """A table of the configured number of workers, and of more with as much for each to do."""
    workers = plan.num_bundles
    kind = "GPUs" if plan.uses_gpus else "workers"
    yield (
        f"Simulated   {times.source}: {statistics.mean(times.lengths):.0f} tokens, at most "
        f"{max(times.lengths):.0f}, {times.token_s(1):.2g} s each, up to "
        f"{times.slots} at once in an engine"
    )
    rows: list[_Choice] = []
    best, best_of = planner.outcome(workers, None, 0), ""
    for size in (workers, *(one for one in _SIZES if one > workers)):
        shared = planner.outcome(size, None, 0)
        if size <= max(workers, _SIZES[0]):
            found = [shared, *planner.searched(size)]
            most = max(one.tokens_per_s for one in found)
            best = next(one for one in found if one.tokens_per_s >= _NEARLY_BEST * most)
            best_of = f"best of {size} {kind}: {_words(best, shared)}"
        else:
            found = [shared, *planner.scaled(best, size)]
        rows += found
    header = [kind, "sample", "train", "max_lag", "step", "tokens/s", "engines idle"]
    yield from table([*header, "trainers idle", "lag"], [one.row() for one in rows])
    yield best_of


def _words(best: _Choice, shared: _Choice) -> str:
    if best.sampling is None and not best.lag:
        return "all sample, then all train (cluster.num_generation_workers=null)"
    gain = best.tokens_per_s / shared.tokens_per_s
    keys = f"cluster.num_generation_workers={best.sampling or 'null'} rollout.max_lag={best.lag}"
    return f"{keys}, {gain:.2f} x the tokens/s of sharing"
