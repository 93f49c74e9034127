"""Where finished batches come from: when to refit, what to sample, and with which seeds."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from nemo_like.batch import keys
from nemo_like.config.sampling import SamplingRunConfig, ValidationConfig
from nemo_like.data.datasets import Row
from nemo_like.data.loader import PromptLoader
from nemo_like.distributed.remote_batch import RemoteBatch
from nemo_like.errors import RunError
from nemo_like.generation.generation import Generation
from nemo_like.generation.protocol import SamplingParams
from nemo_like.observe.metrics import Metric, Metrics, Reduce, merge
from nemo_like.rollout.dropped_metrics import DroppedMetrics
from nemo_like.rollout.rollout import RolloutTask, Sample
from nemo_like.rollout.seeds import completion_seed
from nemo_like.rollout.weight_sync import WeightSync
from nemo_like.rollout.worker import RolloutRequest, RolloutResult, RolloutWorker

logger = logging.getLogger(__name__)


class SyncRolloutSource:
    """Samples every batch with the newest weights, and waits for all of it."""

    def __init__(
        self,
        config: SamplingRunConfig,
        *,
        generation: Generation[RolloutWorker],
        sync: WeightSync,
        loader: PromptLoader[Row],
        validation_rows: Sequence[Row],
        stop_token_ids: tuple[int, ...],
        span: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._config = config
        self._generation = generation
        self.sync = sync
        self._loader = loader
        self._validation_rows = validation_rows
        self._stop_token_ids = tuple(sorted({*stop_token_ids, *config.generation.stop_token_ids}))
        self._span = span
        self._refit_metrics: Metrics = {}
        self._dropped_metrics = DroppedMetrics(config.environment.reward)

    def next_batch(
        self,
        step: int,
        keep: Callable[[RemoteBatch], Tensor] | None = None,
        max_rounds: int = 1,
    ) -> tuple[RemoteBatch, Metrics]:
        """Completions of the next prompts, scored. Refits first if generation is stale.

        ``keep`` gives bool [B], equal within a group: others are left out, and prompts are sampled
        in their place until there are enough, or ``max_rounds`` times. Raises RunError if rewards
        failed for every completion of a round.
        """
        self.refit()
        loop, config = self._config.loop, self._config.generation
        sampling = SamplingParams(
            temperature=config.temperature,
            max_new_tokens=config.max_new_tokens,
            stop=tuple(config.stop),
            stop_token_ids=self._stop_token_ids,
        )
        rounds: list[_Round] = []
        missing, num_prompts = loop.num_prompts_per_step, 0
        with self._span("rollout"):
            while missing > 0 and len(rounds) < max_rounds:
                # Fewer prompts than replicas would leave some without work.
                count = max(missing, self._generation.group.world_size)
                rows = self._loader.next_rows(count)
                results = self._rollout(
                    "train", step, rows, loop.num_generations_per_prompt, sampling, num_prompts
                )
                rounds.append(_Round(results, keep))
                self._check_rewards(
                    rounds[-1].batch.rows[keys.SAMPLE_MASK], results, f"step {step}"
                )
                num_prompts += count
                missing -= rounds[-1].num_kept
            self.sync.give_to_policy()
        refit, self._refit_metrics = self._refit_metrics, {}
        return _join(rounds, loop.num_prompts_per_step, refit)

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
                self._validation_rows,
                config.num_generations_per_prompt,
                self._sampling(config),
            )
        rows = _rows_of(results)
        self._check_rewards(rows[keys.SAMPLE_MASK], results, f"validation at step {step}")
        return _batch_metrics("validation", rows, results)

    def sample(
        self, step: int, rows: Sequence[Row], first_prompt: int, config: ValidationConfig
    ) -> tuple[list[Sample], Metrics]:
        """Scored completions of ``rows``, by prompt and index; seeds are those of a validation.

        ``first_prompt``: number of the first row among all that are sampled.
        """
        self.refit()
        with self._span("rollout"):
            results = self._rollout(
                "validation",
                step,
                rows,
                config.num_generations_per_prompt,
                self._sampling(config),
                first_prompt,
                with_samples=True,
            )
        columns = _rows_of(results)
        self._check_rewards(columns[keys.SAMPLE_MASK], results, f"step {step}")
        samples = [sample for result in results for sample in result.samples]
        samples.sort(key=lambda sample: (sample.prompt, sample.index))
        return samples, _batch_metrics("rollout", columns, results)

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
        rows: Sequence[Row],
        group_size: int,
        sampling: SamplingParams,
        first_prompt: int = 0,
        *,
        with_samples: bool = False,
    ) -> list[RolloutResult]:
        """Deal whole groups to replicas in turn. Rows come back by replica, with their ids.

        ``first_prompt``: number of the first row among all that were sampled for the step.
        """
        seed_step = step if phase == "train" else 0
        num_recorded = self._config.logging.trajectories_per_step if phase == "train" else 0
        num_replicas = self._generation.group.world_size
        tasks: list[list[RolloutTask]] = [[] for _ in range(num_replicas)]
        for prompt, row in enumerate(rows, start=first_prompt):
            replica = prompt % num_replicas
            for index in range(group_size):
                tasks[replica].append(
                    RolloutTask(
                        row=row,
                        prompt=prompt,
                        index=index,
                        seed=completion_seed(
                            self._config.run.seed, phase, seed_step, prompt, index
                        ),
                        request_id=f"{phase}-{step}-{prompt}-{index}",
                        # The first replica writes; one completion each of several prompts.
                        record=replica == 0
                        and index == 0
                        and prompt // num_replicas < num_recorded,
                    )
                )
        requests = [
            RolloutRequest(
                step=step, tasks=tuple(of_replica), sampling=sampling, with_samples=with_samples
            )
            for of_replica in tasks
        ]
        results = self._generation.group.scatter(RolloutWorker.rollout, requests)
        self._dropped_metrics.warn(results)
        return [result for result in results if len(result.lengths)]

    def _check_rewards(
        self, scored: torch.Tensor, results: Sequence[RolloutResult], when: str
    ) -> None:
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


def _rows_of(results: Sequence[RolloutResult]) -> dict[str, Tensor]:
    return {name: torch.cat([result.rows[name] for result in results]) for name in results[0].rows}


class _Round:
    """Completions of some prompts, and which of their groups are kept."""

    def __init__(
        self,
        results: list[RolloutResult],
        keep: Callable[[RemoteBatch], Tensor] | None,
    ) -> None:
        self.results = results
        self.batch = RemoteBatch.from_chunks(
            [result.tokens for result in results],
            [result.lengths for result in results],
            [result.rows for result in results],
        )
        kept = keep(self.batch) if keep else torch.ones(len(self.batch), dtype=torch.bool)
        self.kept = kept.nonzero(as_tuple=True)[0]
        self.num_kept = len(self.batch.rows[keys.GROUP_IDS][self.kept].unique())


def _join(
    rounds: Sequence[_Round], num_prompts: int, refit: Metrics
) -> tuple[RemoteBatch, Metrics]:
    """The first ``num_prompts`` groups that were kept, and metrics of all that were sampled.

    If none was, the last round stands for itself: it trains on nothing and shows why.
    """
    sampled = RemoteBatch.concatenate([one.batch for one in rounds])
    results = [result for one in rounds for result in one.results]
    metrics = refit | _batch_metrics("rollout", sampled.rows, results)
    if len(rounds) == 1 and len(rounds[0].kept) == len(sampled):
        return sampled, metrics
    metrics["rollout/num_rounds"] = Metric(len(rounds))
    num_sampled = len(sampled.rows[keys.GROUP_IDS].unique())
    num_kept = sum(one.num_kept for one in rounds)
    metrics["rollout/kept_share"] = Metric(num_kept / num_sampled, weight=num_sampled)
    if num_kept < num_prompts:
        logger.warning(
            "Only %d of the %d groups of this step have a signal, after %d rounds of sampling "
            "(grpo.max_sampling_rounds).",
            num_kept,
            num_prompts,
            len(rounds),
        )
    if num_kept == 0:
        return rounds[-1].batch, metrics
    batch = RemoteBatch.concatenate([one.batch.select(one.kept) for one in rounds])
    chosen = batch.rows[keys.GROUP_IDS].unique()[:num_prompts]
    first = torch.isin(batch.rows[keys.GROUP_IDS], chosen)
    return batch.select(first.nonzero(as_tuple=True)[0]), metrics


def _batch_metrics(
    area: str, rows: dict[str, torch.Tensor], results: Sequence[RolloutResult]
) -> Metrics:
    """Row means, each over the rows that it is defined for."""
    scored = rows[keys.SAMPLE_MASK]
    rewards = rows[keys.REWARDS][scored]
    tokens = rows[keys.NUM_LOSS_TOKENS].double()
    metrics: Metrics = {
        f"{area}/completion_tokens": Metric(tokens.mean().item()),
        f"{area}/truncated_share": Metric(rows[keys.TRUNCATED].double().mean().item()),
        f"{area}/num_failed": Metric(int((~scored).sum()), reduce=Reduce.sum),
        f"{area}/num_tokens": Metric(tokens.sum().item(), reduce=Reduce.sum),
    }
    if len(rewards):
        metrics[f"{area}/reward"] = Metric(rewards.mean().item(), weight=len(rewards))
    environment = merge([result.metrics for result in results])
    return {f"{area}/{name}": metric for name, metric in environment.items()} | metrics
