"""Rules between a configuration and the ranks and bundles that it asks for; arithmetic only."""

from collections import Counter
from collections.abc import Iterator

from nemo_like.config.run import RunConfig
from nemo_like.config.sampling import SamplingRunConfig
from nemo_like.errors import UserError
from nemo_like.planning.layout import ParallelSizes, common_divisors, parallel_sizes
from nemo_like.planning.resources import ResourcePlan, plan_run, refit_transport


def check_placement(config: RunConfig) -> None:
    """Raise UserError for the first size that does not fit the others."""
    plan = plan_run(config)
    sizes = parallel_sizes(config.policy, len(plan.policy))
    if plan.critic:
        parallel_sizes(config.policy, len(plan.critic))
    if isinstance(config, SamplingRunConfig):
        transport, usable = refit_transport(config.refit, plan), config.generation.kind.transports
        if transport not in usable:
            raise UserError(
                f"refit.transport={transport}, which fits the bundles, does not reach an engine of "
                f"generation.backend={config.generation.backend}; set it to {' or '.join(usable)}."
            )
    for rules in (
        _scalar_head_rules(config),
        _tensor_parallel_rules(config, sizes, plan),
        _rank_rules(config, sizes),
        _replica_rules(config, plan),
    ):
        for sentence in rules:
            raise UserError(sentence)


def _scalar_head_rules(config: RunConfig) -> Iterator[str]:
    """A scalar head knows no other ranks."""
    for name in ("tensor_parallel_size", "context_parallel_size", "pipeline_parallel_size"):
        size = getattr(config.policy.parallel, name)
        if config.scalar_heads and size > 1:
            yield (
                f"policy.parallel.{name}={size} does not go with a scalar head; set it to 1: ranks "
                "then share the rows."
            )


def _tensor_parallel_rules(
    config: RunConfig, sizes: ParallelSizes, plan: ResourcePlan
) -> Iterator[str]:
    """Tensor-parallel groups stay within a node."""
    per_node = set(Counter(map(plan.node_of, plan.policy)).values())
    valid = common_divisors(*per_node)
    if sizes.tp in valid:
        return
    key = "gpus_per_node" if plan.uses_gpus else "cpu_workers_per_node"
    counts = " or ".join(map(str, sorted(per_node, reverse=True)))
    yield (
        f"policy.parallel.tensor_parallel_size={sizes.tp} does not divide the {counts} policy "
        f"ranks of a node (cluster.{key}={plan.bundles_per_node[0]}), and a group must not cross "
        f"nodes; use {' or '.join(map(str, valid))}."
    )


def _rank_rules(config: RunConfig, sizes: ParallelSizes) -> Iterator[str]:
    """Synchronising and comparing need ranks to do it with."""
    policy, default = config.policy, type(config.policy)()
    ddp, standard = policy.parallel.ddp, default.parallel.ddp
    changed = [
        name for name in type(ddp).model_fields if getattr(ddp, name) != getattr(standard, name)
    ]
    if changed and sizes.replicate == 1:
        yield (
            f"policy.parallel.ddp.{changed[0]}={getattr(ddp, changed[0])} would have no effect: "
            "the policy has one rank, so nothing is synchronised; use more workers."
        )
    if policy.debug.checks and sizes.num_ranks == 1:
        yield (
            "policy.debug.checks=true would have no effect: the policy has one rank; use more "
            "workers."
        )


def _replica_rules(config: RunConfig, plan: ResourcePlan) -> Iterator[str]:
    """Each generation replica gets a prompt."""
    if not isinstance(config, SamplingRunConfig):
        return
    prompts, num_replicas = config.loop.num_prompts_per_step, len(plan.generation)
    if prompts < num_replicas:
        yield (
            f"{config.section}.num_prompts_per_step={prompts} leaves some of the {num_replicas} "
            f"generation replicas without work; use at least {num_replicas}."
        )
