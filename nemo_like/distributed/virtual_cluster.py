"""A slice of Ray as numbered bundles, in the order of nodes and GPUs."""

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nemo_like.config.plan import NodeResources, ResourcePlan, check_fits
from nemo_like.config.schema import ClusterConfig
from nemo_like.distributed.connection import check_head
from nemo_like.distributed.network import NodeNetwork, read_network, worker_environment
from nemo_like.errors import RunError, WaitTimeoutError

logger = logging.getLogger(__name__)

_PROGRESS_EVERY_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """One reserved slot for worker processes."""

    group: PlacementGroup
    index: int
    """Position in its placement group, which covers one node."""
    node_id: str
    address: str
    gpu_id: str | None
    """Id as CUDA_VISIBLE_DEVICES takes it; None in a CPU run."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that its processes get."""

    def scheduling_strategy(self) -> PlacementGroupSchedulingStrategy:
        """Where an actor of this bundle goes; without it, it would wait for CPUs that we hold."""
        return PlacementGroupSchedulingStrategy(
            placement_group=self.group, placement_group_bundle_index=self.index
        )


class VirtualCluster:
    """Executes a ResourcePlan: one placement group a node, bundles numbered in physical order.

    Raises UserError at once if the cluster is too small, WaitTimeoutError if it stays busy.
    """

    def __init__(
        self, plan: ResourcePlan, timeout_s: float, network_interface: str | None = None
    ) -> None:
        self.plan = plan
        self._network_interface = network_interface
        check_fits(plan, alive_nodes())
        self._groups: list[PlacementGroup] = []
        try:
            self._groups = [
                placement_group([dict(plan.bundle_resources)] * count, strategy="STRICT_PACK")
                for count in plan.bundles_per_node
            ]
            self._wait_for_groups(timeout_s)
            self.bundles = self._number_bundles(timeout_s)
        except BaseException:
            self.shutdown()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """Release the bundles; Ray ends the actors in them."""
        groups, self._groups = self._groups, []
        try:
            check_head()
        except RunError:
            # Removal would wait for the head for ever. It ends a lost driver's job by itself.
            logger.warning("Ray's head does not answer; the run's bundles are left to it.")
            return
        for group in groups:
            remove_placement_group(group)

    def _wait_for_groups(self, timeout_s: float) -> None:
        start = time.monotonic()
        pending = [group.ready() for group in self._groups]
        while pending:
            left = timeout_s - (time.monotonic() - start)
            _, pending = ray.wait(
                pending, num_returns=len(pending), timeout=max(0.0, min(left, _PROGRESS_EVERY_S))
            )
            state = f"{len(self._groups) - len(pending)} of {len(self._groups)} nodes reserved"
            if pending and left <= 0:
                raise WaitTimeoutError(
                    f"The driver waited {timeout_s:g} s for placement groups ({state}); wanted "
                    f"{self.plan.bundle_resources} x {self.plan.bundles_per_node}, free now: "
                    f"{_amounts(ray.available_resources())}. Another job may hold them; raise "
                    "cluster.start_timeout_s or free them."
                )
            if pending:
                logger.info("Waiting for the cluster: %s", state)

    def _number_bundles(self, timeout_s: float) -> list[Bundle]:
        """Ask every bundle where it is, and sort by node and GPU: rank order is physical order."""
        probes = [
            (group, index, self._probe(group, index))
            for group, count in zip(self._groups, self.plan.bundles_per_node, strict=True)
            for index in range(count)
        ]
        try:
            places = ray.get([probe for _, _, probe in probes], timeout=timeout_s)
        except GetTimeoutError as error:
            raise WaitTimeoutError(
                f"The driver waited {timeout_s:g} s for its {len(probes)} bundles to answer."
            ) from error
        several_nodes = len(self._groups) > 1
        bundles = [
            Bundle(
                group=group,
                index=index,
                node_id=node,
                address=network.address,
                gpu_id=gpu,
                environment=worker_environment(
                    network, self._network_interface, several_nodes=several_nodes
                ),
            )
            for (group, index, _), (node, network, gpu) in zip(probes, places, strict=True)
        ]
        return sorted(bundles, key=physical_order)

    def _probe(self, group: PlacementGroup, index: int) -> Any:
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=index
        )
        gpus = self.plan.bundle_resources.get("GPU", 0)
        return _where.options(num_gpus=gpus, num_cpus=0, scheduling_strategy=strategy).remote()


def reserve(plan: ResourcePlan, config: ClusterConfig) -> VirtualCluster:
    """What a run's configuration asks for."""
    return VirtualCluster(plan, config.start_timeout_s, config.network_interface)


def physical_order(bundle: Bundle) -> tuple[str, str, int, int]:
    """Sort key: address and node (raylets may share an address), GPU, position."""
    gpu = bundle.gpu_id or ""
    return (bundle.address, bundle.node_id, int(gpu) if gpu.isdigit() else -1, bundle.index)


def alive_nodes() -> list[NodeResources]:
    """Every alive node and what it has in all."""
    return [
        NodeResources(
            node_id=node["NodeID"], address=node["NodeManagerAddress"], resources=node["Resources"]
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def _amounts(resources: Mapping[str, float]) -> dict[str, float]:
    return {name: resources.get(name, 0.0) for name in ("CPU", "GPU")}


@ray.remote
def _where() -> tuple[str, NodeNetwork, str | None]:
    gpus = ray.get_gpu_ids()
    network = read_network(ray.util.get_node_ip_address(), os.environ)
    return ray.get_runtime_context().get_node_id(), network, str(gpus[0]) if gpus else None
