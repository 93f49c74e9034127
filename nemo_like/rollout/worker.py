"""The process that rolls out: an engine, an environment and a tokenizer side by side."""

import asyncio
from collections import ChainMap, Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import ObjectRef
from torch import Tensor

from nemo_like.config.sampling import EnvironmentConfig
from nemo_like.data.chat import ChatTokenizer
from nemo_like.generation.protocol import EngineConfig, SamplingParams
from nemo_like.generation.worker import GenerationWorker
from nemo_like.observe.jsonl import JsonlFile
from nemo_like.observe.metrics import Metric, Metrics, merge
from nemo_like.rewards.environment import start_pool
from nemo_like.rewards.pool import RewardPool
from nemo_like.rollout.rollout import (
    RolloutTask,
    Sample,
    Trajectory,
    as_sample,
    collate_rows,
    collate_tokens,
    run_task,
)


@dataclass(frozen=True, kw_only=True)
class RolloutSetup:
    """What every replica needs to start."""

    backend: str
    engine: EngineConfig
    environment: EnvironmentConfig
    template_switches: Mapping[str, Any]
    num_reward_threads: int
    """Threads of each reward process that has a reward model."""
    engines_per_node: int
    """Replicas on one node: their reward processes share its memory."""
    trajectories_path: str
    resumed_step: int
    """Trajectories of later steps are dropped; 0 for a new run."""


@dataclass(frozen=True, kw_only=True)
class RolloutRequest:
    """Tasks of one replica. Whole groups stay together, so that they share their prompt's cache."""

    step: int
    tasks: tuple[RolloutTask, ...]
    sampling: SamplingParams
    with_samples: bool = False
    """Whether the driver wants to read the completions."""


@dataclass(frozen=True, kw_only=True)
class RolloutResult:
    """What the driver learns: a reference to the tokens, and a few numbers a row."""

    tokens: ObjectRef
    lengths: Tensor
    """int64 [B], tokens of each row."""
    rows: dict[str, Tensor]
    """Columns of shape [B]; see ``batch.keys``."""
    metrics: Metrics
    """What environment and engine reported, averaged over the rows that have it."""
    errors: dict[str, int]
    """Reward failures by message; only the most frequent ones."""
    dropped_metrics: dict[str, str]
    """Metrics of the environment that are not numbers in some rows, and why."""
    samples: tuple[Sample, ...] = ()
    """The completions as text, if they were asked for."""


_MAX_ERRORS = 3
_MAX_ERROR_CHARS = 300


class RolloutWorker(GenerationWorker):
    """A generation replica that also decodes and scores completions."""

    _environment: RewardPool | None = None

    async def start(self, setup: RolloutSetup) -> None:
        """Bring up the engine, the reward processes and the tokenizer, at the same time."""
        self._environment, self._chat, _ = await asyncio.gather(
            asyncio.to_thread(
                start_pool,
                setup.environment,
                setup.engines_per_node,
                switches=setup.template_switches,
                num_threads=setup.num_reward_threads,
            ),
            asyncio.to_thread(ChatTokenizer, setup.engine.model_path),
            self.start_engine(setup.backend, setup.engine),
        )
        self._trajectories: JsonlFile | None = None
        if self.context.rank == 0:
            self._trajectories = JsonlFile(Path(setup.trajectories_path))
            self._trajectories.truncate_after(setup.resumed_step)

    async def rollout(self, request: RolloutRequest) -> RolloutResult:
        """Carry out all tasks at once; tokens go to the object store."""
        assert self._environment is not None
        trajectories = await asyncio.gather(
            *(
                run_task(task, self.engine, self._environment, self._chat, request.sampling)
                for task in request.tasks
            )
        )
        self._record(request.step, trajectories)
        tokens = collate_tokens(trajectories)
        errors = Counter(
            (t.result.error or "no reason given")[:_MAX_ERROR_CHARS]
            for t in trajectories
            if t.result.reward is None
        )
        return RolloutResult(
            tokens=ray.put(tokens),
            lengths=tokens.lengths,
            rows=collate_rows(trajectories),
            metrics=merge([_metrics(t) for t in trajectories]),
            errors=dict(errors.most_common(_MAX_ERRORS)),
            dropped_metrics=dict(ChainMap(*(t.result.dropped for t in trajectories))),
            samples=tuple(map(as_sample, trajectories)) if request.with_samples else (),
        )

    async def shutdown_engine(self) -> None:
        """End the reward processes too."""
        if self._environment is not None:
            self._environment.shutdown()
        await super().shutdown_engine()

    def _record(self, step: int, trajectories: list[Trajectory]) -> None:
        """Written here, not by the driver, which never sees text."""
        if self._trajectories is None:
            return
        for t in trajectories:
            if t.task.record:
                self._trajectories.append(
                    {
                        "step": step,
                        "prompt": t.task.row.prompt,
                        "completion": t.text,
                        "reward": t.result.reward,  # None where it failed
                        "metrics": t.result.metrics,
                        "finish_reason": t.completion.finish_reason.value,
                        "weight_version": t.completion.weight_version,
                        "num_tokens": len(t.completion.token_ids),  # with the stop token
                    }
                )


def _metrics(trajectory: Trajectory) -> Metrics:
    scored = {name: Metric(value) for name, value in trajectory.result.metrics.items()}
    prompt = len(trajectory.prompt_ids)
    cached = trajectory.completion.num_cached_tokens / prompt
    return scored | {"cached_prompt_share": Metric(cached, weight=prompt)}
