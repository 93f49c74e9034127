"""Where finished batches come from: when to refit, what to sample, and with which seeds."""

import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

from torch import Tensor

from nemo_like.batch import keys
from nemo_like.config.sampling import SamplingRunConfig, ValidationConfig
from nemo_like.data.datasets import Row
from nemo_like.data.loader import GroupFeed
from nemo_like.distributed.remote_batch import RemoteBatch
from nemo_like.distributed.waiting import Pending
from nemo_like.errors import RunError
from nemo_like.generation.generation import Generation
from nemo_like.generation.protocol import SamplingParams
from nemo_like.observe.metrics import Metrics
from nemo_like.rollout.rounds import Round, batch_metrics, join, rows_of, warn_of_dropped
from nemo_like.rollout.trajectory import RolloutTask, Sample, first_rows, trajectory_seed
from nemo_like.rollout.weight_sync import WeightSync
from nemo_like.rollout.worker import RolloutRequest, RolloutResult, RolloutWorker

logger = logging.getLogger(__name__)


class RolloutSource:
    """Samples groups in the order of their numbers, up to ``max_lag`` steps ahead of training.

    At most (max_lag + 1) x groups per step are under way or wait. Groups are used in their order,
    so a token that trains is at most ``max_lag`` steps older than the policy. With ``max_lag=0``
    each batch is sampled with the newest weights, and all of it is waited for.
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
        span: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._config = config
        self._max_lag = config.max_lag
        self._generation = generation
        self.sync = sync
        self._feed = feed
        self._open: deque[Pending[RolloutResult]] = deque()
        """Groups that are ahead of training, in order."""
        self._validation_rows = validation_rows
        self._stop_token_ids = tuple(sorted({*stop_token_ids, *config.generation.stop_token_ids}))
        self._span = span
        self._refit_metrics: Metrics = {}
        self._dropped_metrics = set[str]()
        """Metrics of the environment that were warned of."""

    def next_batch(
        self, step: int, keep: Callable[[RemoteBatch], Tensor] | None = None, max_rounds: int = 1
    ) -> tuple[RemoteBatch, Metrics]:
        """The next groups, scored. Refits first if generation is stale.

        ``keep`` gives bool [B], equal within a group: others are left out, and prompts are sampled
        in their place until there are enough, or ``max_rounds`` times. Raises RunError if rewards
        failed for every completion of a round.
        """
        self.refit()
        rounds: list[Round] = []
        num_prompts = self._config.loop.num_prompts_per_step
        missing = num_prompts
        with self._span("rollout"):
            while missing > 0 and len(rounds) < max_rounds:
                results = self._round(step, missing)
                rounds.append(Round(results, keep))
                self._check_rewards(rounds[-1].batch.rows, results, f"step {step}")
                missing -= rounds[-1].num_kept
            self.sync.give_to_policy()
        refit, self._refit_metrics = self._refit_metrics, {}
        return join(rounds, num_prompts, refit)

    def _round(self, step: int, count: int) -> list[RolloutResult]:
        """The next ``count`` groups or, where replicas would have no work, more."""
        loop, config = self._config.loop, self._config.generation
        sampling = SamplingParams(
            temperature=config.temperature,
            max_new_tokens=config.max_new_tokens,
            stop=tuple(config.stop),
            stop_token_ids=self._stop_token_ids,
        )
        if not self._max_lag:
            count = max(count, self._generation.group.world_size)
            drawn = self._feed.draw(count)
            results = self._rollout("train", step, drawn, loop.num_generations_per_prompt, sampling)
        else:
            ahead = self._max_lag * loop.num_prompts_per_step
            for group, row in self._feed.draw(max(0, ahead + count - len(self._open))):
                replica = group % self._generation.group.world_size
                tasks = self._tasks(
                    "train", step, group, row, loop.num_generations_per_prompt, replica
                )
                request = RolloutRequest(step=step, tasks=tuple(tasks), sampling=sampling)
                self._open.append(
                    self._generation.group.submit_rank(replica, RolloutWorker.rollout, request)
                )
            awaited = [self._open.popleft() for _ in range(count)]
            results = self._generation.results(awaited)
            warn_of_dropped(self._config.environment.reward, results, self._dropped_metrics)
        self._feed.use_up(count)
        return results

    def validate(self, step: int) -> Metrics:
        """Score completions of all validation prompts; every one of them counts.

        Seeds do not depend on the step, so that validations differ by the weights alone.
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
        self._check_rewards(rows, results, f"validation at step {step}")
        return batch_metrics("validation", rows, results)

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
        self._check_rewards(columns, results, f"step {step}")
        samples = [sample for result in results for sample in result.samples]
        samples.sort(key=lambda sample: (sample.prompt, sample.index))
        return samples, batch_metrics("rollout", columns, results)

    def refit(self) -> Metrics:
        """Bring generation to the policy's weight version; what that took, if it was behind."""
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
        """Deal whole groups to replicas in turn. Rows come back by replica, with their ids."""
        num_replicas = self._generation.group.world_size
        tasks: list[list[RolloutTask]] = [[] for _ in range(num_replicas)]
        for position, (group, row) in enumerate(groups):
            replica = position % num_replicas
            tasks[replica] += self._tasks(phase, step, group, row, group_size, replica)
        requests = [
            RolloutRequest(
                step=step, tasks=tuple(of_replica), sampling=sampling, with_samples=with_samples
            )
            for of_replica in tasks
        ]
        results = self._generation.group.scatter(RolloutWorker.rollout, requests)
        warn_of_dropped(self._config.environment.reward, results, self._dropped_metrics)
        return [result for result in results if len(result.lengths)]

    def _tasks(
        self, phase: str, step: int, group: int, row: Row, group_size: int, replica: int
    ) -> list[RolloutTask]:
        """One group. Seeds depend on its number, not on the step or the replica."""
        # The first replica writes; one trajectory each of several prompts.
        place = group % self._config.loop.num_prompts_per_step
        is_recorded = (
            phase == "train"
            and replica == 0
            and (
                place // self._generation.group.world_size
                < self._config.logging.trajectories_per_step
            )
        )
        return [
            RolloutTask(
                row=row,
                group=group,
                index=index,
                seed=trajectory_seed(self._config.run.seed, phase, group, index),
                request_id=f"{phase}-{step}-{group}-{index}",
                record=is_recorded and index == 0,
            )
            for index in range(group_size)
        ]

    def _check_rewards(
        self, rows: Mapping[str, Tensor], results: Sequence[RolloutResult], when: str
    ) -> None:
        scored = rows[keys.SAMPLE_MASK][first_rows(rows)[0]]
        failed = int((~scored).sum())
        if not failed:
            return
        reasons = sum((Counter(result.errors) for result in results), Counter[str]())
        ((message, count),) = reasons.most_common(1)
        reward = self._config.environment.reward
        if failed == len(scored):
            raise RunError(
                f"environment.reward={reward} failed on all {failed} completions of {when}; "
                f"first: {message}"
            )
        logger.warning(
            "environment.reward failed on %d of %d completions of %s, which are masked; most "
            "often (%d): %s",
            failed,
            len(scored),
            when,
            count,
            message,
        )
