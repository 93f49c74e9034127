"""The process that rolls out: an engine, an environment and a tokenizer side by side."""

import asyncio
import time
from collections import ChainMap, Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nemo_like.batch.tensor_batch import TensorBatch, as_arrays, as_tensors, prompt_columns
from nemo_like.config.environment import EnvironmentConfig
from nemo_like.data.chat import ChatTokenizer
from nemo_like.distributed.worker import tokens_apart
from nemo_like.generation.protocol import (
    Completion,
    EngineConfig,
    GenerationRequest,
    SamplingParams,
)
from nemo_like.generation.worker import GenerationWorker
from nemo_like.imports import freeze_objects
from nemo_like.observe.metrics import Metric, Metrics, merge
from nemo_like.observe.sinks import JsonlFile
from nemo_like.observe.trajectory_files import VOCABULARY, Resumed, TrajectoryFiles
from nemo_like.rewards.pool import RewardPool
from nemo_like.rewards.protocol import IS_CHAT
from nemo_like.rewards.start import start_pool
from nemo_like.rollout.trajectory import (
    ENDS,
    RolloutTask,
    Sample,
    Trajectory,
    as_sample,
    collate_rows,
    collate_tokens,
    single_turn,
)
from nemo_like.rollout.trajectory_table import table_of

if TYPE_CHECKING:
    from nemo_like.rollout.endpoint import Endpoint
    from nemo_like.rollout.recorder import Limits


@dataclass(frozen=True, kw_only=True)
class RolloutSetup:
    """What every replica needs to start."""

    backend: str
    engine: EngineConfig
    environments: Mapping[str, EnvironmentConfig]
    """By the name in the rows; see ``EnvironmentConfig.by_name``."""
    template_switches: Mapping[str, Any]
    num_reward_threads: int
    """Threads of each reward process that has a reward model."""
    engines_per_node: int
    """Replicas on one node: their reward processes share its memory."""
    run_dir: str
    resumed: Resumed
    most_tokens: int
    """Most tokens of a training row."""
    most_turns: int
    """See ``EnvironmentConfig.most_turns``: columns do not depend on which rows a worker gets."""
    shares_prompts: bool
    """Whether the policy computes common prompts once (``policy.batching=shared``)."""
    trajectories_gib: float
    """Size limit of all workers' files together; 0: keep none."""


@dataclass(frozen=True, kw_only=True)
class RolloutRequest:
    """Tasks of one replica: whole groups, which share the cache of their prompt."""

    step: int
    phase: str
    tasks: tuple[RolloutTask, ...]
    sampling: SamplingParams
    with_samples: bool = False
    """Whether the driver gets the text of all completions, or only of those to record."""


@dataclass(frozen=True, kw_only=True)
class RolloutResult:
    """What the driver gets: a reference to the tokens, and a few numbers per row."""

    tokens: Any = None
    """An ObjectRef, once the result is with the driver."""
    lengths: Tensor
    """int64 [B], tokens of each row."""
    rows: dict[str, Tensor]
    """Columns of shape [B, ...]; see ``batch.keys``."""
    metrics: Metrics
    """Metrics of environment and engine, averaged over the rows that have them."""
    errors: dict[str, int]
    """Reward failures by message."""
    dropped_metrics: dict[str, str]
    """Metrics of the environment that are not numbers in some rows, and why."""
    rank: int = 0
    seconds: float = 0.0
    """Seconds that the replica took."""
    samples: tuple[Sample, ...] = ()
    """The completions as text, if requested."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"lengths": self.lengths.numpy(), "rows": as_arrays(self.rows)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        tensors = {"lengths": torch.tensor(state["lengths"]), "rows": as_tensors(state["rows"])}
        self.__dict__.update(state, **tensors)


_MAX_ERROR_CHARS = 300


class RolloutWorker(GenerationWorker):
    """A generation replica that also decodes and scores completions."""

    _pools: Mapping[str, RewardPool] = {}
    _endpoint: "Endpoint | None" = None
    """Serves environments with several turns."""
    _limits: "Mapping[str, Limits]" = MappingProxyType({})
    _files: TrajectoryFiles | None = None

    async def start(self, setup: RolloutSetup) -> None:
        """Bring up the engine, the reward processes and the tokenizer, at the same time."""
        environments = setup.environments
        pool_of = partial(
            start_pool,
            engines_per_node=setup.engines_per_node * len(environments),
            num_engines=self.context.world_size,
            switches=setup.template_switches,
            num_threads=setup.num_reward_threads,
            log=self.context.log_path.with_name(f"rewards-{self.context.rank}.log"),
        )
        self._chat, _, pools = await asyncio.gather(
            asyncio.to_thread(ChatTokenizer, setup.engine.model_path, setup.template_switches),
            self.start_engine(setup.backend, setup.engine),
            asyncio.gather(*(asyncio.to_thread(pool_of, one) for one in environments.values())),
        )
        self._pools = dict(zip(environments, pools, strict=True))
        self._reward_parts = [name for one in environments.values() for name in one.rewards]
        self._most_turns = setup.most_turns
        self._shares_prompts = setup.shares_prompts
        talking = {name: one for name, one in environments.items() if not one.is_single_turn}
        if talking:
            from nemo_like.rollout import recorder
            from nemo_like.rollout.endpoint import Endpoint  # imports a server

            most = setup.most_tokens
            self._limits = {
                name: recorder.Limits(
                    tokens=min(most, one.max_tokens or most),
                    turns=one.max_turns,
                )
                for name, one in talking.items()
            }
            self._endpoint = Endpoint("policy")
            await self._endpoint.start()
        self._trajectories: JsonlFile | None = None
        if self.context.rank == 0:
            self._trajectories = JsonlFile(Path(setup.run_dir, "trajectories.jsonl"))
            self._trajectories.truncate_after(setup.resumed.step)
        self._files = self._open_files(setup)
        freeze_objects()

    @tokens_apart
    async def rollout(self, request: RolloutRequest) -> tuple[RolloutResult, TensorBatch]:
        """Carry out all tasks at once."""
        start = time.monotonic()
        trajectories = await asyncio.gather(
            *(self._run(task, request.sampling) for task in request.tasks)
        )
        if request.phase == "train":
            self._record(request.step, trajectories)
        read = [t for t in trajectories if request.with_samples or t.task.record]
        tokens = collate_tokens(trajectories, self._most_turns)
        if self._files is not None and trajectories:
            self._files.append((request.step, request.phase, trajectories, tokens))
        errors = Counter(
            (t.result.error or "no reason given")[:_MAX_ERROR_CHARS]
            for t in trajectories
            if t.result.reward is None
        )
        result = RolloutResult(
            lengths=tokens.lengths,
            rows=collate_rows(trajectories, self._reward_parts, self._most_turns)
            | (prompt_columns(tokens) if self._shares_prompts else {}),
            metrics=merge([*map(_metrics, trajectories)]) | self.memory(),
            rank=self.context.rank,
            seconds=time.monotonic() - start,
            errors=dict(errors),
            dropped_metrics=dict(ChainMap(*(t.result.dropped for t in trajectories))),
            samples=tuple(map(as_sample, read if request.phase == "validation" else ())),
        )
        return result, tokens

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one completion; stop strings end it across refits, too."""
        completion = await super().generate(request)
        if not completion.later_versions:
            return completion
        from nemo_like.generation.interrupted import stopped

        decode = partial(self._chat.decode, skip_special_tokens=False)
        return stopped(completion, request.sampling.stop, decode)

    async def _run(self, task: RolloutTask, sampling: SamplingParams) -> Trajectory:
        """One trajectory; a failed reward is a result, not an exception."""
        row = task.row
        pool, limits = self._pools[row.environment], self._limits.get(row.environment)
        fields = row.fields | {"messages": list(row.messages), IS_CHAT: row.is_chat}
        if limits is not None:
            assert self._endpoint is not None
            from nemo_like.environments.protocol import ENDPOINT
            from nemo_like.rollout.recorder import Recorder

            recorder = Recorder(task, self.generate, self._chat, sampling, limits)
            with self._endpoint.serving(recorder) as address:
                fields |= {ENDPOINT: list(address)}
                result = await pool.score(row.prompt, "", fields)
            return recorder.trajectory(result)
        completion = await self.generate(
            GenerationRequest(
                request_id=task.request_id,
                prompt_ids=list(row.prompt_ids),
                sampling=sampling,
                seed=task.seed,
            )
        )
        text = self._chat.decode(completion.token_ids)
        result = await pool.score(row.prompt, text, fields)
        return single_turn(task, completion, text, result)

    async def shutdown_engine(self) -> None:
        """End the reward processes and the endpoint too."""
        # Of groups under way nothing is kept: their rewards fail now.
        files, self._files, self._trajectories = self._files, None, None
        for pool in self._pools.values():
            pool.shutdown()
        await super().shutdown_engine()
        if self._endpoint is not None:  # it waits for calls, which an engine that has ended fails
            await self._endpoint.close()
        if files is not None:
            files.wait()

    def _open_files(self, setup: RolloutSetup) -> TrajectoryFiles | None:
        """Files for this worker's trajectories; the first worker truncates old files of all."""
        context, folder = self.context, Path(setup.run_dir, "trajectories")
        limit = setup.trajectories_gib * 2**30 / context.world_size
        if context.rank == 0 and folder.exists():
            TrajectoryFiles(folder, 0, limit).truncate_after(setup.resumed)
        if setup.trajectories_gib == 0:
            return None
        files = TrajectoryFiles(folder, context.rank, limit, table_of)
        if context.rank == 0:
            self._chat.cuts.save_vocabulary(folder / VOCABULARY)
        return files

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
                        "messages": t.messages or t.task.row.messages,
                        "reward": t.result.reward,
                        "error": t.result.error,  # why the reward is missing
                        "metrics": t.result.metrics,
                        "finish_reason": "length" if t.truncated else "stop",
                        "end": t.end,
                        "weight_version": t.weight_version,
                        "num_tokens": t.num_sampled,  # with the stop token
                    }
                )


def _metrics(trajectory: Trajectory) -> Metrics:
    result, task = trajectory.result, trajectory.task.row.task
    scored = {name: Metric(value) for name, value in result.metrics.items()}
    if task:
        scored[f"{task}/completion_tokens"] = Metric(trajectory.num_sampled)
        scored[f"{task}/failed_share"] = Metric(float(result.reward is None))
        if result.reward is not None:
            scored[f"{task}/reward"] = Metric(result.reward)
    prompt = len(trajectory.task.row.prompt_ids)
    if not trajectory.counts:  # a single turn
        cached = trajectory.completions[0].num_cached_tokens / prompt
        return scored | {"cached_prompt_share": Metric(cached, weight=prompt)}
    counts = {f"trajectory/{name}": Metric(n) for name, n in trajectory.counts.items()}
    ends = {f"trajectory/end_{end}": Metric(float(trajectory.end == end)) for end in ENDS}
    return scored | counts | ends | {"trajectory/rows": Metric(len(trajectory.rows))}
