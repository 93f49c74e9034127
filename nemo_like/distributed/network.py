"""Which network interface workers talk over.

Left alone, gloo takes the interface of the host's name, which is often 127.0.1.1, and NCCL the
first one that is up; on nodes with several networks both may be ones that lead nowhere.
"""

from collections.abc import Mapping, Sequence
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
        inherited={name: environment[name] for name in _CHOICES if name in environment},
    )


def worker_environment(
    node: NodeNetwork, wanted: str | None, *, several_nodes: bool
) -> dict[str, str]:
    """Variables for a node's workers; none in a run of one node that asks for no interface.

    ``wanted`` None: the interface with Ray's address, unless the node's own environment says more.
    Raises UserError if the node does not have ``wanted``.
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
    with_address = [name for name, found in node.interfaces.items() if node.address in found]
    if several_nodes and with_address:
        variables |= _choose(with_address[0]) | dict(node.inherited)
    return variables


def _choose(interface: str) -> dict[str, str]:
    return {name: form.format(interface) for name, form in _CHOICES.items()}
