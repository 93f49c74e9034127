"""A slice of Ray as numbered bundles, in the order of nodes and GPUs, and over which network.

Left alone, gloo takes the interface of the host's name, which is often 127.0.1.1, and NCCL the
first one that is up; on nodes with several networks both may be ones that lead nowhere.
"""

import logging
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Self

import psutil
import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nemo_like.config.model_files import trust_variables
from nemo_like.distributed.connection import check_head
from nemo_like.errors import RunError, UserError, WaitTimeoutError
from nemo_like.planning.resources import (
    NodeResources,
    ResourcePlan,
    check_fits,
    in_words,
    what_each_has,
)

logger = logging.getLogger(__name__)

_PROGRESS_EVERY_S = 10.0


LOOPBACK = "127.0.0.1"
_CHOICES = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}"}
"""Variables that name an interface, and how; NCCL takes a name without ``=`` for a prefix."""


@dataclass(frozen=True, kw_only=True)
class NodeNetwork:
    """What a node reports about itself."""

    address: str
    interfaces: Mapping[str, Sequence[str]]
    inherited: Mapping[str, str]
    """The variables that its processes have already."""
    host: str = ""
    """Its name."""


def read_network(address: str, environment: Mapping[str, str]) -> NodeNetwork:
    return NodeNetwork(
        address=address,
        host=os.uname().nodename,
        interfaces={
            name: [one.address for one in found] for name, found in psutil.net_if_addrs().items()
        },
        inherited={name: environment[name] for name in _CHOICES if environment.get(name)},
    )


def worker_environment(
    node: NodeNetwork, wanted: str | None, *, several_nodes: bool, uses_gpus: bool
) -> dict[str, str]:
    """Variables for a node's workers: the interface that libraries listen on and connect over.

    ``wanted`` None: loopback in a run of one node, else the interface with Ray's address, unless
    the node's environment says more. UserError for an interface that the node does not have.
    """
    if wanted is None:
        _check_inherited(node, uses_gpus)
    elif wanted not in node.interfaces:
        raise UserError(
            f"cluster.network_interface={wanted} is not an interface of node {node.address}, "
            f"which has {', '.join(sorted(node.interfaces))}; use one that every node has, or "
            "null for the one with Ray's address."
        )
    address = listening_address(node, wanted, several_nodes=several_nodes)
    # vLLM would take the way to a public address.
    variables = {"VLLM_HOST_IP": address or node.address}
    if wanted is not None:
        return variables | _choose(wanted)
    with_address = [name for name, found in node.interfaces.items() if address in found]
    if with_address:
        variables |= _choose(with_address[0])
    return variables | dict(node.inherited)


def listening_address(node: NodeNetwork, wanted: str | None, *, several_nodes: bool) -> str:
    """The address that rendezvous of a node's workers listen on, and only there.

    Empty (all) where others know the node by an address that none of its interfaces has.
    """
    if wanted is not None:
        addresses = [one for one in node.interfaces[wanted] if _is_reachable(one)]
        same_family = [one for one in addresses if (":" in one) == (":" in node.address)]
        return next(iter(same_family or addresses), "")
    known = {address for found in node.interfaces.values() for address in found}
    if not several_nodes and LOOPBACK in known:
        return LOOPBACK
    return node.address if node.address in known else ""


def _is_reachable(address: str) -> bool:
    """Whether another node can be given it: no hardware's, and none of one link only."""
    try:
        return not ip_address(address.partition("%")[0]).is_link_local
    except ValueError:
        return False


def _check_inherited(node: NodeNetwork, uses_gpus: bool) -> None:
    for variable, value in node.inherited.items():
        if variable.startswith("NCCL") and not uses_gpus:
            continue
        if not _names_one(variable, value, node.interfaces):
            raise UserError(
                f"{variable}={value} of the environment names no interface of node "
                f"{node.address}, which has {', '.join(sorted(node.interfaces))}; unset it before "
                "Ray starts, or set cluster.network_interface."
            )


def _names_one(variable: str, value: str, interfaces: Collection[str]) -> bool:
    """gloo wants all names between commas; NCCL one, or what begins so, or (``^``) any other."""
    if not variable.startswith("NCCL"):
        return all(name in interfaces for name in value.split(","))
    if value.startswith("^"):
        return True
    names = tuple(one.partition(":")[0] for one in value.removeprefix("=").split(","))
    if value.startswith("="):
        return any(name in interfaces for name in names)
    return any(one.startswith(names) for one in interfaces)


def _choose(interface: str) -> dict[str, str]:
    return {name: form.format(interface) for name, form in _CHOICES.items()}


@dataclass(frozen=True, kw_only=True)
class Bundle:
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
    host: str = ""

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
        nodes = alive_nodes()
        check_fits(plan, nodes)
        num_gpus = sum(node.resources.get("GPU", 0) for node in nodes)
        if num_gpus and not plan.uses_gpus:
            logger.warning(
                "There are %d GPUs, and the run uses none; set cluster.gpus_per_node.", num_gpus
            )
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
        wanted, uses_gpus = self._network_interface, self.plan.uses_gpus
        environments = [
            worker_environment(network, wanted, several_nodes=num_nodes > 1, uses_gpus=uses_gpus)
            for _, network, _ in places
        ]
        bundles = [
            Bundle(
                group=self._group,
                index=index,
                node_id=node,
                address=network.address,
                host=network.host,
                gpu_id=gpu,
                environment=environments[index] | trust_variables(),
                listens_on=listening_address(network, wanted, several_nodes=num_nodes > 1),
            )
            for index, (node, network, gpus) in enumerate(places)
            for gpu in gpus or [None] * self.plan.bundles_per_node[index]
        ]
        return sorted(bundles, key=physical_order)


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
