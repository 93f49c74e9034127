"""How a number of policy ranks divides into the axes of ``policy.parallel``; arithmetic only."""

import math
from dataclasses import dataclass

from nemo_like.config.policy import ParallelConfig, PolicyConfig
from nemo_like.errors import UserError


@dataclass(frozen=True, kw_only=True)
class ParallelSizes:
    pp: int
    replicate: int
    shard: int
    cp: int
    tp: int

    @property
    def num_ranks(self) -> int:
        return self.pp * self.replicate * self.shard * self.cp * self.tp

    @property
    def dp(self) -> int:
        """Ranks that hold different rows."""
        return self.replicate * self.shard

    @property
    def axes(self) -> dict[str, int]:
        """For a RankLayout: copies and shards are one data-parallel axis."""
        return {"pp": self.pp, "dp": self.dp, "cp": self.cp, "tp": self.tp}

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where ``rank`` stands along each axis.

        >>> ParallelSizes(pp=1, replicate=2, shard=2, cp=1, tp=2).coordinates(5)
        {'pp': 0, 'replicate': 1, 'shard': 0, 'cp': 0, 'tp': 1}
        """
        found: dict[str, int] = {}
        for axis in ("tp", "cp", "shard", "replicate", "pp"):
            rank, found[axis] = divmod(rank, getattr(self, axis))
        return dict(reversed(found.items()))


def parallel_sizes(policy: PolicyConfig, num_ranks: int) -> ParallelSizes:
    """The size of every axis when the policy has ``num_ranks`` ranks; UserError if they don't
    divide.

    >>> config = PolicyConfig(parallel=ParallelConfig(tensor_parallel_size=2, replicate_size=2))
    >>> parallel_sizes(config, 8).axes
    {'pp': 1, 'dp': 4, 'cp': 1, 'tp': 2}
    """
    parallel = policy.parallel
    fixed = {
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "context_parallel_size": parallel.context_parallel_size,
        "tensor_parallel_size": parallel.tensor_parallel_size,
    }
    if parallel.data_parallel == "fsdp":
        fixed["replicate_size"] = parallel.replicate_size
    product = math.prod(fixed.values())
    if num_ranks % product:
        named = [f"policy.parallel.{name}={size}" for name, size in fixed.items() if size > 1]
        it = "it" if len(named) == 1 else "their product"
        raise UserError(
            f"{' x '.join(named)} does not divide the policy's {num_ranks} ranks; {it} must be one "
            f"of {', '.join(map(str, common_divisors(num_ranks)))} (or change cluster sizes)."
        )
    left = num_ranks // product
    ddp = parallel.data_parallel == "ddp"
    return ParallelSizes(
        pp=parallel.pipeline_parallel_size,
        replicate=left if ddp else parallel.replicate_size,
        shard=1 if ddp else left,
        cp=parallel.context_parallel_size,
        tp=parallel.tensor_parallel_size,
    )


def common_divisors(*counts: int) -> list[int]:
    """What divides all of them: valid sizes, for messages."""
    common = math.gcd(*counts)
    return [size for size in range(1, common + 1) if common % size == 0]


def num_stages(parallel: ParallelConfig) -> int:
    """Stages of the whole pipeline; interleaved rank r holds stages r, r + pp, r + 2 pp ..."""
    per_rank = 2 if parallel.pipeline_schedule == "interleaved" else 1
    return parallel.pipeline_parallel_size * per_rank


def layer_range(num_layers: int, stages: int, stage: int) -> range:
    """Layers of one stage; the first ones take what does not divide, the last has the head anyway.

    >>> [list(layer_range(5, 2, stage)) for stage in range(2)]
    [[0, 1, 2], [3, 4]]
    """
    least, more = divmod(num_layers, stages)
    first = stage * least + min(stage, more)
    return range(first, first + least + (stage < more))


def stages_of_rank(parallel: ParallelConfig, pipeline_rank: int) -> list[int]:
    """Stages of one pipeline rank; interleaved ranks hold every ``pp``-th.

    >>> two = {"pipeline_parallel_size": 2, "pipeline_schedule": "interleaved"}
    >>> stages_of_rank(ParallelConfig(**two), 1)
    [1, 3]
    """
    size = parallel.pipeline_parallel_size
    return list(range(pipeline_rank, num_stages(parallel), size))


def layers_of_rank(parallel: ParallelConfig, num_layers: int, pipeline_rank: int) -> list[int]:
    """The number of layers in each stage of one pipeline rank.

    >>> layers_of_rank(ParallelConfig(pipeline_parallel_size=2), 5, 0)
    [3]
    """
    stages = num_stages(parallel)
    return [
        len(layer_range(num_layers, stages, stage))
        for stage in stages_of_rank(parallel, pipeline_rank)
    ]


def bins_for_pipeline(parallel: ParallelConfig) -> dict[str, int]:
    """What schedules ask of the number of micro-batches, as arguments of its plan.

    1F1B needs one for each rank to begin with, interleaved whole rounds of them.
    """
    size = parallel.pipeline_parallel_size
    interleaved = parallel.pipeline_schedule == "interleaved"
    return {"min_bins": size, "bins_multiple": size if interleaved else 1}
