"""Which network interface workers talk over.

Left alone, gloo takes the interface of the host's name, which is often 127.0.1.1, and NCCL the
first one that is up; on nodes with several networks both may be ones that lead nowhere.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import psutil

from nemo_like.errors import UserError

_CHOICES = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}"}
"""Variables that name an interface, and how; NCCL takes a name without ``=`` for a prefix."""


@dataclass(frozen=True, kw_only=True)
class NodeNetwork:
    """What a node says of itself."""

    address: str
    """Ray's address of the node."""
    interfaces: Mapping[str, Sequence[str]]
    """Addresses by name of interface."""
    inherited: Mapping[str, str]
    """The variables that its processes have already."""


def read_network(address: str, environment: Mapping[str, str]) -> NodeNetwork:
    """Of this node."""
    return NodeNetwork(
        address=address,
        interfaces={
            name: [one.address for one in found] for name, found in psutil.net_if_addrs().items()
        },
        inherited={name: environment[name] for name in _CHOICES if environment.get(name)},
    )


def worker_environment(
    node: NodeNetwork, wanted: str | None, *, several_nodes: bool, uses_gpus: bool
) -> dict[str, str]:
    """Variables for a node's workers; none in a run of one node that asks for no interface.

    ``wanted`` None: the interface with Ray's address, unless the node's own environment says more.
    Raises UserError if the node does not have ``wanted``, or what its environment names.
    """
    variables: dict[str, str] = {}
    if several_nodes:
        variables["VLLM_HOST_IP"] = node.address  # vLLM would ask for the way to a public address
    if wanted is not None:
        if wanted not in node.interfaces:
            raise UserError(
                f"cluster.network_interface={wanted} is no interface of node {node.address}, which "
                f"has {', '.join(sorted(node.interfaces))}; use one that every node has, or null "
                "for the one with Ray's address."
            )
        return variables | _choose(wanted)
    _check_inherited(node, uses_gpus)
    with_address = [name for name, found in node.interfaces.items() if node.address in found]
    if several_nodes and with_address:
        variables |= _choose(with_address[0]) | dict(node.inherited)
    return variables


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
