"""A slice of Ray as numbered bundles, in the order of nodes and GPUs."""

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nemo_like.config.remote_code import trust_variables
from nemo_like.config.run import ClusterConfig
from nemo_like.distributed.connection import check_head
from nemo_like.distributed.network import (
    NodeNetwork,
    listening_address,
    read_network,
    worker_environment,
)
from nemo_like.errors import RunError, WaitTimeoutError
from nemo_like.planning.resources import (
    NodeResources,
    ResourcePlan,
    check_fits,
    in_words,
    what_each_has,
)

logger = logging.getLogger(__name__)

_PROGRESS_EVERY_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """One reserved slot for worker processes."""

    group: PlacementGroup
    index: int
    """Position of its node in the placement group."""
    node_id: str
    address: str
    gpu_id: str | None
    """Id as CUDA_VISIBLE_DEVICES takes it; None in a CPU run."""
    environment: Mapping[str, str] = field(default_factory=dict)
    listens_on: str = ""
    """This and ``environment``: see ``WorkerContext``."""

    def scheduling_strategy(self) -> PlacementGroupSchedulingStrategy:
        """Where an actor of this bundle goes; without it, it would wait for CPUs that we hold."""
        return PlacementGroupSchedulingStrategy(self.group, self.index)


class VirtualCluster:
    """Executes a ResourcePlan: as many different nodes, bundles numbered in physical order.

    Raises UserError at once if the cluster is too small, WaitTimeoutError if it stays busy.
    """

    def __init__(
        self, plan: ResourcePlan, timeout_s: float, network_interface: str | None = None
    ) -> None:
        self.plan = plan
        self._network_interface = network_interface
        check_fits(plan, alive_nodes())
        # Ray grants all nodes or none: two runs never wait for each other's half. To Ray a
        # node is one bundle: our workers take nothing from it, so it need not be cut up.
        self._group = placement_group(
            [plan.node_resources] * len(plan.bundles_per_node), strategy="STRICT_SPREAD"
        )
        try:
            self._wait(timeout_s)
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
        try:
            check_head()
        except RunError:
            # Removal would wait for the head for ever. It ends a lost driver's job by itself.
            logger.warning("Ray's head does not answer; the run's bundles are left to it.")
            return
        remove_placement_group(self._group)

    def _wait(self, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        ready = self._group.ready()
        while True:
            left = end - time.monotonic()
            if ray.wait([ready], timeout=max(0.0, min(left, _PROGRESS_EVERY_S)))[0]:
                return
            check_head()
            state = (
                f"{len(self.plan.bundles_per_node)} node(s) with "
                f"{in_words(self.plan.node_resources)} free each; free now: "
                f"{what_each_has(alive_nodes(available_resources_per_node()))}"
            )
            if left <= 0:
                raise WaitTimeoutError(
                    f"The driver waited {timeout_s:g} s for {state}. Another job may hold them; "
                    "raise cluster.start_timeout_s or free them."
                )
            logger.info("Waiting for %s", state)

    def _number_bundles(self, timeout_s: float) -> list[Bundle]:
        """Ask every node where it is, and sort by node and GPU: rank order is physical order."""
        num_nodes = len(self.plan.bundles_per_node)
        gpus = self.plan.node_resources.get("GPU", 0)
        probes = [
            _where.options(
                num_gpus=gpus,
                num_cpus=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, index),
            ).remote()
            for index in range(num_nodes)
        ]
        try:
            places = ray.get(probes, timeout=timeout_s)
        except GetTimeoutError as error:
            raise WaitTimeoutError(
                f"The driver waited {timeout_s:g} s for its {num_nodes} node(s) to answer."
            ) from error
        bundles = [
            Bundle(
                group=self._group,
                index=index,
                node_id=node,
                address=network.address,
                gpu_id=gpu,
                environment=worker_environment(
                    network,
                    self._network_interface,
                    several_nodes=num_nodes > 1,
                    uses_gpus=self.plan.uses_gpus,
                )
                | trust_variables(),
                listens_on=listening_address(
                    network, self._network_interface, several_nodes=num_nodes > 1
                ),
            )
            for index, (node, network, gpus) in enumerate(places)
            for gpu in gpus or [None] * self.plan.bundles_per_node[index]
        ]
        return sorted(bundles, key=physical_order)


def reserve(plan: ResourcePlan, config: ClusterConfig) -> VirtualCluster:
    return VirtualCluster(plan, config.start_timeout_s, config.network_interface)


def physical_order(bundle: Bundle) -> tuple[str, str, int]:
    """Sort key: address and node (raylets may share an address), GPU."""
    gpu = bundle.gpu_id or ""
    return (bundle.address, bundle.node_id, int(gpu) if gpu.isdigit() else -1)


def alive_nodes(resources: Mapping[str, Mapping[str, float]] | None = None) -> list[NodeResources]:
    """Every alive node with what it has in all, or in ``resources``, by its id."""
    return [
        NodeResources(
            node_id=node["NodeID"],
            address=node["NodeManagerAddress"],
            resources=node["Resources"] if resources is None else resources.get(node["NodeID"], {}),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


@ray.remote
def _where() -> tuple[str, NodeNetwork, list[str]]:
    network = read_network(ray.util.get_node_ip_address(), os.environ)
    gpus = [str(gpu) for gpu in ray.get_gpu_ids()]
    return ray.get_runtime_context().get_node_id(), network, gpus
