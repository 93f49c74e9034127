"""How many bundles on how many nodes, and who works in which: arithmetic, without Ray."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from nemo_like.config.generation import GenerationConfig, RefitConfig, Transport
from nemo_like.config.run import ClusterConfig, RunConfig
from nemo_like.config.sampling import SamplingRunConfig
from nemo_like.errors import UserError
from nemo_like.planning.layout import common_divisors
from nemo_like.planning.model_shape import MOST_SEQUENCES

_ROUNDING = 1e-6
"""0.3 CPUs hold three workers of 0.1."""
_MOST_ENGINES = 100_000
"""What no cluster has; lists of bundles are built from here on."""
_MOST_SHOWN = 32


@dataclass(frozen=True, kw_only=True)
class ResourcePlan:
    """Bundles in rank order (node by node), and the roles that share or split them."""

    bundles_per_node: tuple[int, ...]
    """Bundles of each node, of which there are as many as entries, all different."""
    bundle_resources: dict[str, float]
    """What each bundle takes: one GPU with its CPUs, or CPUs."""
    policy: tuple[int, ...]
    generation: tuple[tuple[int, ...], ...]
    """Bundles of each generation replica: one per tensor-parallel rank, the first leads. Several
    replicas may share a bundle."""

    @property
    def num_bundles(self) -> int:
        return sum(self.bundles_per_node)

    def node_of(self, bundle: int) -> int:
        return bundle // self.bundles_per_node[0]  # all nodes have the same number

    @property
    def engines_per_node(self) -> int:
        """Most generation replicas that any node leads."""
        return max(Counter(self.node_of(replica[0]) for replica in self.generation).values())

    @property
    def node_resources(self) -> dict[str, float]:
        """What Ray reserves on each node, whose bundles share it."""
        count = self.bundles_per_node[0]  # all nodes have the same number
        return {name: amount * count for name, amount in self.bundle_resources.items()}

    @property
    def colocated(self) -> bool:
        return self.generation[0][0] in self.policy

    @property
    def uses_gpus(self) -> bool:
        return "GPU" in self.bundle_resources


@dataclass(frozen=True, kw_only=True)
class NodeResources:
    node_id: str
    address: str
    resources: Mapping[str, float]


def plan_resources(
    cluster: ClusterConfig,
    tensor_parallel_size: int,
    num_engines_per_bundle: int = 1,
) -> ResourcePlan:
    """Split the configured bundles between policy and generation, in this order.

    >>> plan_resources(ClusterConfig(gpus_per_node=4, num_generation_workers=2), 2).generation
    ((2, 3),)
    >>> plan_resources(ClusterConfig(gpus_per_node=2), 1, num_engines_per_bundle=2).generation
    ((0,), (0,), (1,), (1,))
    """
    per_node = cluster.gpus_per_node or cluster.cpu_workers_per_node
    total = cluster.num_nodes * per_node
    if total * num_engines_per_bundle > _MOST_ENGINES:
        raise UserError(
            f"cluster.num_nodes={cluster.num_nodes} with {per_node} worker(s) each, and "
            f"{num_engines_per_bundle} engine(s) a worker, are more than {_MOST_ENGINES}; lower "
            "them."
        )
    separate = cluster.num_generation_workers
    if separate is not None and separate < 1:
        raise UserError(
            f"cluster.num_generation_workers={separate} must be at least 1, or null to colocate."
        )
    if separate is not None and separate >= total:
        raise UserError(
            f"cluster.num_generation_workers={separate} must leave at least one of the {total} "
            f"workers to the policy; use 1 to {total - 1}, or null to colocate."
            if total > 1
            else f"cluster.num_generation_workers={separate} needs at least two workers, and there "
            "is one; use null to colocate, or set cluster.cpu_workers_per_node or "
            "cluster.gpus_per_node to at least 2."
        )
    first = total - separate if separate is not None else 0
    engines = tuple(range(first, total))
    _check_replicas(engines, per_node, tensor_parallel_size)
    if num_engines_per_bundle > 1 and tensor_parallel_size > 1:
        raise UserError(
            f"generation.num_engines_per_bundle={num_engines_per_bundle} is for engines that fit a "
            f"bundle, and generation.tensor_parallel_size={tensor_parallel_size} spreads each over "
            "several; set one of them to 1."
        )
    resources = {"CPU": cluster.cpus_per_worker}
    if cluster.gpus_per_node:
        resources["GPU"] = 1.0
    return ResourcePlan(
        bundles_per_node=(per_node,) * cluster.num_nodes,
        bundle_resources=resources,
        policy=tuple(range(first if separate is not None else total)),
        generation=tuple(
            engines[i : i + tensor_parallel_size]
            for i in range(0, len(engines), tensor_parallel_size)
            for _ in range(num_engines_per_bundle)
        ),
    )


def plan_run(config: RunConfig) -> ResourcePlan:
    """``plan_resources`` of a whole run; without generation if it samples nothing."""
    if not isinstance(config, SamplingRunConfig):
        plan = plan_resources(config.cluster, 1)
        return replace(plan, policy=tuple(range(plan.num_bundles)), generation=())
    generation = config.generation
    return plan_resources(
        config.cluster,
        generation.tensor_parallel_size,
        generation.num_engines_per_bundle,
    )


def engines_sleep(generation: GenerationConfig, plan: ResourcePlan) -> bool:
    """Whether engines free GPUs that they share with the policy while it trains."""
    return generation.sleep and generation.kind.sleeps and plan.uses_gpus and plan.colocated


def sequences_at_once(config: SamplingRunConfig, plan: ResourcePlan) -> int:
    """The most completions that each engine works on at a time, for which its KV cache is sized."""
    groups = config.loop.num_prompts_per_step * (1 + config.max_lag)
    rows = math.ceil(groups / len(plan.generation)) * config.loop.num_generations_per_prompt
    return config.generation.engine_kwargs.get("max_num_seqs", min(MOST_SEQUENCES, rows))


def refit_transport(config: RefitConfig, plan: ResourcePlan) -> Transport:
    """The configured transport, or the one that fits; UserError for one that can't work there."""
    if plan.colocated:
        if config.transport == "broadcast" and plan.uses_gpus:
            raise UserError(
                "refit.transport=broadcast cannot serve an engine on its sender's own GPU, which "
                "NCCL refuses; use ipc, or leave it null."
            )
        return config.transport or "ipc"
    if config.transport == "ipc":
        raise UserError(
            "refit.transport=ipc needs policy and generation in the same bundles, and "
            "cluster.num_generation_workers sets bundles apart; use broadcast, or leave it null."
        )
    return "broadcast"


def _check_replicas(engines: Sequence[int], per_node: int, size: int) -> None:
    """Replicas must come out even and stay inside a node, where tensor parallelism is fast."""
    counts = Counter(bundle // per_node for bundle in engines).values()
    for count in counts:
        if count % size:
            valid = common_divisors(*counts)
            raise UserError(
                f"generation.tensor_parallel_size={size} does not divide the {count} generation "
                f"workers of a node; use {' or '.join(map(str, valid))}."
            )


def check_fits(plan: ResourcePlan, nodes: Sequence[NodeResources]) -> None:
    """UserError for a plan that the cluster could not hold even when idle; a node counts once."""
    wanted = len(plan.bundles_per_node)
    fitting = sum(
        all(
            node.resources.get(name, 0.0) >= amount - _ROUNDING
            for name, amount in plan.node_resources.items()
        )
        for node in nodes
    )
    if fitting >= wanted:
        return
    workers = "gpus_per_node" if plan.uses_gpus else "cpu_workers_per_node"
    raise UserError(
        f"The run wants {wanted} node(s) with {in_words(plan.node_resources)} each, and {fitting} "
        f"of the Ray cluster's {len(nodes)} node(s) can hold that ({what_each_has(nodes)}); lower "
        f"cluster.num_nodes, cluster.{workers} and cluster.cpus_per_worker, or start more nodes."
    )


def in_words(resources: Mapping[str, float]) -> str:
    """CPUs and GPUs, in this order.

    >>> in_words({"GPU": 8.0, "CPU": 8.0})
    '8 CPUs and 8 GPUs'
    """
    return " and ".join(f"{amount:g} {name}s" for name, amount in sorted(resources.items()))


def what_each_has(nodes: Sequence[NodeResources]) -> str:
    """Nodes by address, as many as can be read."""
    shown = [
        f"{node.address}: "
        + ", ".join(f"{node.resources.get(name, 0):g} {name}s" for name in ("CPU", "GPU"))
        for node in nodes[:_MOST_SHOWN]
    ]
    if len(nodes) > _MOST_SHOWN:
        shown.append(f"and {len(nodes) - _MOST_SHOWN} more")
    return "; ".join(shown)
