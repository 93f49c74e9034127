"""Rounds of sampling, and the batch and the metrics that are made of them."""

import logging
import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nemo_like.batch import keys
from nemo_like.config.sampling import SamplingRunConfig
from nemo_like.distributed.remote_batch import RemoteBatch
from nemo_like.losses.advantages import of_trained
from nemo_like.observe.metrics import Metric, Metrics, Reduce, merge
from nemo_like.rollout.trajectory import first_rows
from nemo_like.rollout.worker import RolloutResult

logger = logging.getLogger(__name__)


def rows_of(results: Sequence[RolloutResult]) -> dict[str, Tensor]:
    """Row columns of all replicas."""
    return {name: torch.cat([result.rows[name] for result in results]) for name in results[0].rows}


class Round:
    """Completions of some prompts, and which of their groups are kept."""

    def __init__(
        self, results: list[RolloutResult], keep: Callable[[RemoteBatch], Tensor] | None
    ) -> None:
        """``keep``: see ``RolloutSource.next_batch``."""
        self.results = results
        self.batch = RemoteBatch.from_chunks(
            [result.tokens for result in results],
            [result.lengths for result in results],
            [result.rows for result in results],
        )
        kept = keep(self.batch) if keep else torch.ones(len(self.batch), dtype=torch.bool)
        self.kept = kept.nonzero(as_tuple=True)[0]
        self.num_kept = len(self.batch.rows[keys.GROUP_IDS][self.kept].unique())


def join(rounds: Sequence[Round], num_prompts: int, refit: Metrics) -> tuple[RemoteBatch, Metrics]:
    """The first ``num_prompts`` groups that were kept, and metrics of all that were sampled.

    If none was, the last round stands for itself: it trains on nothing and shows why.
    """
    sampled = RemoteBatch.concatenate([one.batch for one in rounds])
    results = [result for one in rounds for result in one.results]
    metrics = refit | rollout_metrics("rollout", sampled.rows, results)
    if len(rounds) == 1 and len(rounds[0].kept) == len(sampled):
        return sampled, metrics
    metrics["rollout/num_rounds"] = Metric(len(rounds))
    num_sampled = len(sampled.rows[keys.GROUP_IDS].unique())
    num_kept = sum(one.num_kept for one in rounds)
    metrics["rollout/kept_share"] = Metric(num_kept / num_sampled, weight=num_sampled)
    if num_kept < num_prompts:
        logger.warning(
            "Only %d of the %d groups of this step have a signal, after %d rounds of sampling.",
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


def rollout_metrics(
    area: str, rows: dict[str, torch.Tensor], results: Sequence[RolloutResult]
) -> Metrics:
    """Means over trajectories, each over those that it is defined for."""
    first, of_row = first_rows(rows)
    scored = rows[keys.SAMPLE_MASK][first]
    rewards = rows[keys.REWARDS][first][scored]
    tokens = torch.zeros(len(first), dtype=torch.float64)
    tokens.index_add_(0, of_row, rows[keys.NUM_LOSS_TOKENS].double())
    metrics: Metrics = {
        f"{area}/completion_tokens": Metric(tokens.mean().item()),
        f"{area}/truncated_share": Metric(rows[keys.TRUNCATED][first].double().mean().item()),
        f"{area}/num_failed": Metric(int((~scored).sum()), reduce=Reduce.sum),
        f"{area}/completion_tokens_max": Metric(tokens.max().item(), reduce=Reduce.max),
        f"{area}/num_tokens": Metric(tokens.sum().item(), reduce=Reduce.sum),
    }
    if len(rewards):
        metrics[f"{area}/reward"] = Metric(rewards.mean().item(), weight=len(rewards))
        metrics[f"{area}/reward_std"] = Metric(rewards.std(correction=0).item())
        metrics[f"{area}/reward_min"] = Metric(rewards.min().item())
        metrics[f"{area}/reward_max"] = Metric(rewards.max().item())
    if area == "rollout":
        metrics |= _straggler(results)
    environment = merge([result.metrics for result in results])
    return {f"{area}/{name}": metric for name, metric in environment.items()} | metrics


def _straggler(results: Sequence[RolloutResult]) -> Metrics:
    """The slowest replica per call, and its time over the median of all."""
    calls: dict[int, list[float]] = {}
    for result in results:
        calls.setdefault(result.rank, []).append(result.seconds)
    if len(calls) < 2:
        return {}
    # Calls of a replica overlap where each is of one group, and not all have as many.
    seconds = {rank: statistics.fmean(each) for rank, each in calls.items()}
    rank = max(seconds, key=lambda rank: seconds[rank])
    ratio = seconds[rank] / statistics.median(seconds.values())
    return {"rollout/slowest_rank": Metric(rank), "rollout/slowest_over_median": Metric(ratio)}


def staleness(config: SamplingRunConfig, batch: RemoteBatch, weight_version: int) -> Metrics:
    """Metrics of how many versions the sampling weights lag behind the policy.

    Marks tokens of the newest weights: only on these can engine and policy be compared.
    """
    if not config.max_lag:
        return {}
    rows = batch.rows
    sampled = rows[keys.NUM_LOSS_TOKENS] > 0  # Others have no version.
    oldest = (weight_version - rows[keys.WEIGHT_VERSIONS])[sampled]
    has_fresh = rows[keys.NEWEST_VERSIONS] == weight_version
    rows[keys.FRESH_FROM] = rows[keys.NUM_OLDER].where(has_fresh, rows[keys.NUM_LOSS_TOKENS])
    tokens = rows[keys.NUM_LOSS_TOKENS].double()
    mean = (weight_version - rows[keys.MEAN_VERSIONS]) * tokens
    if not len(oldest):
        return {}
    shares = torch.bincount(oldest.clamp(min=0)) / len(oldest)
    return {
        "staleness/max": Metric(int(oldest.max()), reduce=Reduce.max),
        "staleness/mean": Metric(oldest.double().mean().item()),
        "staleness/mean_of_tokens": Metric((mean.sum() / tokens.sum().clamp(min=1)).item()),
        **{f"staleness/share_{i}": Metric(one) for i, one in enumerate(shares.tolist())},
    }


def histograms(batch: RemoteBatch) -> dict[str, list[float]]:
    """Finite values of a batch's rows, for histograms."""
    rows = batch.rows
    found = {
        "rollout/rewards": rows[keys.REWARDS],
        "rollout/row_tokens": rows[keys.NUM_LOSS_TOKENS],
    }
    if len(advantages := of_trained(rows)):
        found["train/advantages"] = advantages
    return {name: one[~one.isnan()].tolist() for name, one in found.items()}
