"""Where finished batches come from: when to refit, what to sample, and with which seeds."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from nemo_like.batch import keys
from nemo_like.config.run_schema import GRPORunConfig
from nemo_like.data.datasets import Row
from nemo_like.data.loader import PromptLoader
from nemo_like.distributed.remote_batch import RemoteBatch
from nemo_like.errors import RunError
from nemo_like.generation.generation import Generation
from nemo_like.generation.protocol import SamplingParams
from nemo_like.observe.metrics import Metric, Metrics, Reduce, merge
from nemo_like.refit.weight_sync import WeightSync
from nemo_like.rollout.rollout import RolloutTask
from nemo_like.rollout.seeds import completion_seed
from nemo_like.rollout.worker import RolloutRequest, RolloutResult, RolloutWorker

logger = logging.getLogger(__name__)


class SyncRolloutSource:
    """Samples every batch with the newest weights, and waits for all of it."""

    def __init__(
        self,
        config: GRPORunConfig,
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

    def next_batch(self, step: int) -> tuple[RemoteBatch, Metrics]:
        """Completions of the next prompts, graded. Refits first if generation is stale.

        Raises RunError if grading failed for every completion of the step.
        """
        self.refit()
        grpo, config = self._config.grpo, self._config.generation
        sampling = SamplingParams(
            temperature=config.temperature,
            max_new_tokens=config.max_new_tokens,
            stop=tuple(config.stop),
            stop_token_ids=self._stop_token_ids,
        )
        rows = self._loader.next_rows(grpo.num_prompts_per_step)
        with self._span("rollout"):
            results = self._rollout("train", step, rows, grpo.num_generations_per_prompt, sampling)
            self.sync.give_to_policy()
        batch = RemoteBatch.from_chunks(
            [result.tokens for result in results],
            [result.lengths for result in results],
            [result.rows for result in results],
        )
        self._check_grades(batch.rows[keys.SAMPLE_MASK], results, f"step {step}")
        refit, self._refit_metrics = self._refit_metrics, {}
        return batch, refit | _batch_metrics("rollout", batch.rows, results)

    def validate(self, step: int) -> Metrics:
        """Grade completions of all validation prompts; every one of them counts.

        Seeds do not depend on the step, so that validations differ by the weights alone.
        """
        self.refit()
        config = self._config.validation
        sampling = SamplingParams(
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            max_new_tokens=config.max_new_tokens or self._config.generation.max_new_tokens,
            stop=tuple(self._config.generation.stop),
            stop_token_ids=self._stop_token_ids,
        )
        with self._span("validation"):
            results = self._rollout(
                "validation",
                step,
                self._validation_rows,
                config.num_generations_per_prompt,
                sampling,
            )
        rows = {
            name: torch.cat([result.rows[name] for result in results]) for name in results[0].rows
        }
        self._check_grades(rows[keys.SAMPLE_MASK], results, f"validation at step {step}")
        return _batch_metrics("validation", rows, results)

    def refit(self) -> Metrics:
        """Bring generation to the policy's weight version; what that took, if it was behind."""
        if self.sync.is_due:
            with self._span("refit"):
                self._refit_metrics = self.sync.give_to_generation()
        return self._refit_metrics

    def _rollout(
        self, phase: str, step: int, rows: Sequence[Row], group_size: int, sampling: SamplingParams
    ) -> list[RolloutResult]:
        """Deal whole groups to replicas in turn. Rows come back by replica, with their ids."""
        seed_step = step if phase == "train" else 0
        num_recorded = self._config.logging.trajectories_per_step if phase == "train" else 0
        num_replicas = self._generation.group.world_size
        tasks: list[list[RolloutTask]] = [[] for _ in range(num_replicas)]
        for prompt, row in enumerate(rows):
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
            RolloutRequest(step=step, tasks=tuple(of_replica), sampling=sampling)
            for of_replica in tasks
        ]
        results = self._generation.group.scatter(RolloutWorker.rollout, requests)
        return [result for result in results if len(result.lengths)]

    def _check_grades(
        self, graded: torch.Tensor, results: Sequence[RolloutResult], when: str
    ) -> None:
        failed = int((~graded).sum())
        if not failed:
            return
        reasons = sum((Counter(result.errors) for result in results), Counter[str]())
        ((message, count),) = reasons.most_common(1)
        reward = self._config.environment.reward
        if failed == len(graded):
            raise RunError(
                f"environment.reward={reward} failed on all {failed} completions of {when}; "
                f"first: {message}"
            )
        logger.warning(
            "environment.reward failed on %d of %d completions of %s, which are masked; most "
            "often (%d): %s",
            failed,
            len(graded),
            when,
            count,
            message,
        )


def _batch_metrics(
    area: str, rows: dict[str, torch.Tensor], results: Sequence[RolloutResult]
) -> Metrics:
    """Row means, each over the rows that it is defined for."""
    graded = rows[keys.SAMPLE_MASK]
    rewards = rows[keys.REWARDS][graded]
    tokens = rows[keys.NUM_LOSS_TOKENS].double()
    metrics: Metrics = {
        f"{area}/completion_tokens": Metric(tokens.mean().item()),
        f"{area}/truncated_share": Metric(rows[keys.TRUNCATED].double().mean().item()),
        f"{area}/num_failed": Metric(int((~graded).sum()), reduce=Reduce.sum),
        f"{area}/num_tokens": Metric(tokens.sum().item(), reduce=Reduce.sum),
    }
    if len(rewards):
        metrics[f"{area}/reward"] = Metric(rewards.mean().item(), weight=len(rewards))
    environment = merge([result.metrics for result in results])
    return {f"{area}/{name}": metric for name, metric in environment.items()} | metrics
