"""How far the engine that sampled and the policy disagree about the same tokens and weights.

It is the smoke alarm of this field: anything but rounding means that importance ratios are wrong.

Legend: ``B`` rows and ``N`` tokens of the micro-batch, d = policy - generation logprob of a trained
token.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_like.batch import keys
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.losses.protocol import MAX_EXPONENT, row_means, trained_tokens
from nemo_like.observe.metrics import Metric, Metrics, Reduce

QUANTILE = 0.999
_LOWEST, _HIGHEST, _BINS_PER_DECADE = 1e-9, 1e2, 115
"""Upper edges of the bins of |d|; neighbours differ by 2 %, as exact as the quantile is."""
_NUM_BINS = 11 * _BINS_PER_DECADE + 1


def mismatch_of_rows(policy_logprobs: Tensor, batch: TensorBatch) -> Tensor:
    """Mean |d| of each row, float64 [B]; 0 where a row does not train."""
    at, row = trained_tokens(batch)
    logprob_diff = (policy_logprobs[at].double() - batch.tokens[keys.GENERATION_LOGPROBS][at]).abs()
    return row_means(logprob_diff, row, len(batch))


class MismatchSums:
    """Sums over the trained tokens of a step; they add up over micro-batches and ranks.

    Of ranks that hold the same tokens only one may add them.
    """

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(8, dtype=torch.float64, device=device)
        """Of: tokens, |d|, exp |d|, k3, w, w^2, policy logprob, entropy; w = exp(d)."""
        self._bins = torch.zeros(_NUM_BINS, dtype=torch.float64, device=device)
        self._most = torch.zeros(1, dtype=torch.float64, device=device)

    @torch.no_grad()  # or the sums would keep the graph of every micro-batch
    def add(self, policy_logprobs: Tensor, entropies: Tensor, batch: TensorBatch) -> None:
        """Take a micro-batch; ``policy_logprobs`` and ``entropies`` are [N], in nats."""
        at, row = trained_tokens(batch)
        if (fresh_from := batch.rows.get(keys.FRESH_FROM)) is not None:
            # Others differ by the steps since then, too.
            starts = torch.searchsorted(row, row)
            at = at[torch.arange(len(row), device=row.device) - starts >= fresh_from[row]]
        policy = policy_logprobs[at].double()
        d = policy - batch.tokens[keys.GENERATION_LOGPROBS][at]
        logprob_diff, bounded = d.abs(), d.clamp(max=MAX_EXPONENT)
        weight = bounded.exp()
        per_token = [
            torch.ones_like(d),
            logprob_diff,
            logprob_diff.exp(),
            bounded.expm1() - bounded,  # exp(d) - 1 - d would cancel where engines agree best
            weight,
            weight.square(),
            policy,
            entropies[at].double(),
        ]
        self._sums += torch.stack(per_token).sum(1)
        decades = (logprob_diff.clamp(_LOWEST, _HIGHEST) / _LOWEST).log10()
        index = (
            (decades * _BINS_PER_DECADE).ceil().nan_to_num(_NUM_BINS - 1).clamp(0, _NUM_BINS - 1)
        )
        self._bins.index_add_(0, index.long(), torch.ones_like(d))
        self._most = torch.cat([logprob_diff, self._most]).amax(0, keepdim=True)

    def all_reduce(self) -> None:
        """Add up over all ranks of the process group, if there is one; collective."""
        if dist.is_initialized():
            joined = torch.cat([self._sums, self._bins])
            dist.all_reduce(joined)
            self._sums, self._bins = joined[: len(self._sums)], joined[len(self._sums) :]
            dist.all_reduce(self._most, op=dist.ReduceOp.MAX)

    def metrics(self) -> Metrics:
        """The report, in one transfer from the device; {} if nothing was measured.

        ``p999_abs`` is the upper edge of a bin: 0 for at most 1e-9, 100 for more or NaN. A
        difference of NaN or infinity shows in ``mean_abs`` and ``max_abs``.
        """
        count, logprob_diff, exp_diff, kl, weight, square, logprob, entropy = self._sums
        numbers = {
            "mismatch/mean_abs": logprob_diff / count,
            "mismatch/p999_abs": self._quantile(),
            # The maximum over ranks may have lost a NaN (gloo compares); a sum never does.
            "mismatch/max_abs": torch.where(logprob_diff.isnan(), logprob_diff, self._most[0]),
            "mismatch/mean_exp_abs": exp_diff / count,
            "mismatch/kl": kl / count,
            # Kong (1992): the share of independent samples from the policy that these are worth.
            "mismatch/effective_sample_size": weight.square() / (count * square),
            "policy/logprob": logprob / count,
            "policy/entropy": entropy / count,
        }
        measured, *report = torch.stack([count, *numbers.values()]).tolist()
        if measured == 0:
            return {}
        # All ranks hold the same numbers, which their maximum leaves as they are.
        named = zip(numbers, report, strict=True)
        return {name: Metric(number, reduce=Reduce.max) for name, number in named}

    def _quantile(self) -> Tensor:
        """Upper edge of the bin in which the cumulated share reaches ``QUANTILE``."""
        short = self._bins.cumsum(0) < QUANTILE * self._bins.sum()
        index = short.sum().double()
        return torch.where(index == 0, 0.0, _LOWEST * 10 ** (index / _BINS_PER_DECADE))
