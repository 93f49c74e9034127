"""The source of finished batches: when to refit, what to sample, and with which seeds."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from nemo_like.batch import keys
from nemo_like.config.sampling import SamplingRunConfig, ValidationConfig
from nemo_like.data.datasets import Row
from nemo_like.data.loader import GroupFeed
from nemo_like.distributed.remote_batch import RemoteBatch
from nemo_like.distributed.waiting import Pending
from nemo_like.generation.protocol import SamplingParams
from nemo_like.generation.worker import Generation
from nemo_like.observe.metrics import Metrics
from nemo_like.rollout.failures import RewardFailures
from nemo_like.rollout.rounds import Round, join, rollout_metrics, rows_of
from nemo_like.rollout.trajectory import RolloutTask, Sample, seed_of
from nemo_like.rollout.weight_sync import WeightSync
from nemo_like.rollout.worker import RolloutRequest, RolloutResult, RolloutWorker

_SHOWN = 2
"""Completions of each validation to show."""
_RECORDED = 4
"""Trajectories of each training step in ``trajectories.jsonl``."""
_MOST_ROUNDS = 4
"""Times that prompts are sampled for one step, where groups are left out."""

_DOING = "it samples completions, and waits for their rewards and tools"


class RolloutSource:
    """Samples groups in the order of their numbers, up to ``rollout.max_lag`` steps ahead.

    With 0, each batch is sampled with the newest weights before it trains.
    """

    def __init__(
        self,
        config: SamplingRunConfig,
        *,
        generation: Generation[RolloutWorker],
        sync: WeightSync,
        feed: GroupFeed[Row],
        validation_rows: Sequence[Row],
        stop_token_ids: tuple[int, ...],
        failures: RewardFailures,
        span: Callable[[str], AbstractContextManager[None]],
        show: Callable[[int, Sequence[Mapping[str, Any]]], None],
    ) -> None:
        """``show`` gets a validation's first completions; see ``Run.show``."""
        self._config = config
        self._generation = generation
        group = generation.group
        self._replicas = group.waiting(group.timeout_s, doing=_DOING)
        self.sync = sync
        self._feed = feed
        self._ahead = None
        if config.max_lag:
            from nemo_like.rollout.ahead import Ahead

            self._ahead = Ahead.of(config)
        self._validation_rows = validation_rows
        self._stop_token_ids = stop_token_ids
        self._failures = failures
        self._span, self._show = span, show
        self._refit_metrics: Metrics = {}

    def next_batch(
        self,
        step: int,
        keep: Callable[[RemoteBatch], Tensor] | None = None,
        early: Callable[[RemoteBatch], None] | None = None,
    ) -> tuple[RemoteBatch, Metrics]:
        """The next groups, scored. Refits first if generation is stale.

        ``keep`` gives bool [B], equal within a group: other groups are dropped, and more prompts
        are sampled in their place until there are enough, or four times. ``early`` gets groups as
        they finish, while others are being sampled. Raises RunError if rewards failed for every
        completion of the step.
        """
        self.refit()
        rounds: list[Round] = []
        num_prompts = self._config.loop.num_prompts_per_step
        missing = num_prompts
        with self._span("rollout"):
            while missing > 0 and len(rounds) < (_MOST_ROUNDS if keep is not None else 1):
                rounds.append(Round(self._round(step, missing, early), keep))
                missing -= rounds[-1].num_kept
            results = [result for one in rounds for result in one.results]
            self._failures.check(step, "train", rows_of(results), results)
            self.sync.give_to_policy()
        refit, self._refit_metrics = self._refit_metrics, {}
        return join(rounds, num_prompts, refit)

    def _round(
        self, step: int, count: int, early: Callable[[RemoteBatch], None] | None
    ) -> list[RolloutResult]:
        """The next ``count`` groups, or more if replicas would otherwise be idle."""
        group_size, config = self._config.loop.num_generations_per_prompt, self._config.generation
        sampling = SamplingParams(
            temperature=config.temperature,
            max_new_tokens=config.max_new_tokens,
            stop=tuple(config.stop),
            stop_token_ids=self._stop_token_ids,
        )
        if self._ahead is not None:
            self._admit(step, count, sampling)
            used = self._ahead.next(step, count, self._generation.results)
            self._feed.use_up(one.group for one in used)
            return [one.result for one in used if one.result is not None]
        drawn = self._feed.draw(max(count, self._generation.group.world_size))
        if early is not None:
            calls = [
                self._submit(step, step, place, group, row, sampling)
                for place, (group, row) in enumerate(drawn)
            ]
            self._feed.use_up(group for group, _ in drawn)
            return self._as_they_finish(calls, early)
        results = self._rollout("train", step, drawn, group_size, sampling)
        self._feed.use_up(group for group, _ in drawn)
        return results

    def _admit(self, step: int, count: int, sampling: SamplingParams) -> None:
        """Start as many groups as the lag allows."""
        assert self._ahead is not None
        for group, row in self._feed.draw(self._ahead.room(step, count)):
            planned, place = self._ahead.place_of_next(step)
            self._ahead.add(step, group, self._submit(step, planned, place, group, row, sampling))

    def _submit(
        self, step: int, planned: int, place: int, group: int, row: Row, sampling: SamplingParams
    ) -> Pending[RolloutResult]:
        """Start a group planned for step ``planned``, as number ``place`` of its groups."""
        config, replicas = self._config, self._replicas
        replica = group % replicas.world_size
        record = place // replicas.world_size < _RECORDED
        size = config.loop.num_generations_per_prompt
        tasks = self._tasks("train", step, group, row, size, record=replica == 0 and record)
        request = RolloutRequest(step=planned, phase="train", tasks=tuple(tasks), sampling=sampling)
        return replicas.submit_rank(replica, RolloutWorker.rollout, request)

    def _as_they_finish(
        self, calls: list[Pending[RolloutResult]], early: Callable[[RemoteBatch], None]
    ) -> list[RolloutResult]:
        results: list[RolloutResult] = []
        while calls:
            found = self._generation.results(calls, bool)
            new = [result for one in found for result in one]
            calls = [call for call, one in zip(calls, found, strict=True) if not one]
            early(Round(new, None).batch)
            results += new
        return sorted(results, key=lambda one: int(one.rows[keys.GROUP_IDS][0]))

    def validate(self, step: int) -> Metrics:
        """Score completions of all validation prompts; every one of them counts.

        Seeds do not depend on the step, so validations differ only by the weights.
        """
        self.refit()
        config = self._config.validation
        with self._span("validation"):
            results = self._rollout(
                "validation",
                step,
                list(enumerate(self._validation_rows)),
                config.num_generations_per_prompt,
                self._sampling(config),
            )
        rows = rows_of(results)
        self._failures.check(step, "validation", rows, results)
        self._show(
            step,
            [
                {
                    "prompt": self._validation_rows[sample.prompt].prompt,
                    "completion": sample.text,
                    "reward": sample.result.reward,
                }
                for result in results
                for sample in result.samples
            ],
        )
        return rollout_metrics("validation", rows, results)

    def sample(
        self, step: int, rows: Sequence[Row], first_group: int, config: ValidationConfig
    ) -> tuple[list[Sample], Metrics]:
        """Scored completions of ``rows``, by prompt and index; seeds are those of a validation.

        ``first_group``: number of the first row among all that are sampled.
        """
        self.refit()
        with self._span("rollout"):
            results = self._rollout(
                "validation",
                step,
                list(enumerate(rows, start=first_group)),
                config.num_generations_per_prompt,
                self._sampling(config),
                with_samples=True,
            )
        columns = rows_of(results)
        self._failures.check(step, "validation", columns, results, is_part=True)
        samples = [sample for result in results for sample in result.samples]
        samples.sort(key=lambda sample: (sample.prompt, sample.index))
        return samples, rollout_metrics("rollout", columns, results)

    def refit(self) -> Metrics:
        """Bring engines to the policy's weight version; metrics of the refit, if there was one."""
        if self.sync.is_due:
            with self._span("refit"):
                self._refit_metrics = self.sync.give_to_generation()
        return self._refit_metrics

    def _sampling(self, config: ValidationConfig) -> SamplingParams:
        generation = self._config.generation
        return SamplingParams(
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            max_new_tokens=config.max_new_tokens or generation.max_new_tokens,
            stop=tuple(generation.stop),
            stop_token_ids=self._stop_token_ids,
        )

    def _rollout(
        self,
        phase: str,
        step: int,
        groups: Sequence[tuple[int, Row]],
        group_size: int,
        sampling: SamplingParams,
        *,
        with_samples: bool = False,
    ) -> list[RolloutResult]:
        """Deal whole groups to replicas in turn; rows come back by replica, with their ids."""
        num_recorded = _RECORDED if phase == "train" else _SHOWN
        num_replicas = self._replicas.world_size
        tasks: list[list[RolloutTask]] = [[] for _ in range(num_replicas)]
        for position, (group, row) in enumerate(groups):
            replica = position % num_replicas
            # The first replica writes; one trajectory each of several prompts.
            record = replica == 0 and position // num_replicas < num_recorded
            tasks[replica] += self._tasks(phase, step, group, row, group_size, record=record)
        requests = [
            RolloutRequest(
                step=step,
                phase=phase,
                tasks=tuple(of_replica),
                sampling=sampling,
                with_samples=with_samples,
            )
            for of_replica in tasks
        ]
        results = self._replicas.scatter(RolloutWorker.rollout, requests)
        return [result for result in results if len(result.lengths)]

    def _tasks(
        self, phase: str, step: int, group: int, row: Row, group_size: int, *, record: bool
    ) -> list[RolloutTask]:
        """Tasks of a group; seeds depend on its number, not on step or replica."""
        return [
            RolloutTask(
                row=row,
                group=group,
                index=index,
                seed=seed_of(self._config.run.seed, phase, group, index),
                request_id=f"{phase}-{step}-{group}-{index}",
                record=record and index == 0,
            )
            for index in range(group_size)
        ]
