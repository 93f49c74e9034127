"""Which network interface workers talk over.

Left alone, gloo takes the interface of the host's name, which is often 127.0.1.1, and NCCL the
first one that is up; on nodes with several networks both may be ones that lead nowhere.
"""

import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from typing import TYPE_CHECKING

import psutil

from nemo_like.errors import UserError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

LOOPBACK = "127.0.0.1"
_CHOICES = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}"}
"""Variables that name an interface, and how; NCCL takes a name without ``=`` for a prefix."""
_BACKLOG = 4096
"""Thousands of ranks connect at once."""


@dataclass(frozen=True, kw_only=True)
class NodeNetwork:
    """What a node reports about itself."""

    address: str
    """Ray's address of the node."""
    interfaces: Mapping[str, Sequence[str]]
    """Addresses by name of interface."""
    inherited: Mapping[str, str]
    """The variables that its processes have already."""


def read_network(address: str, environment: Mapping[str, str]) -> NodeNetwork:
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
    """Variables for a node's workers: the interface that libraries listen on and connect over.

    ``wanted`` None: loopback in a run of one node, else the interface with Ray's address; in both
    cases unless the node's own environment says more.
    Raises UserError if the node does not have ``wanted``, or what its environment names.
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

    Empty where others know the node by an address that none of its interfaces has: all of them.
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


def listening_store(
    address: str, world_size: int | None, timeout: timedelta = timedelta(seconds=300)
) -> "TCPStore":
    """Where ranks meet, on a port that the system picks; an empty ``address``: on all interfaces.

    torch's key-value store has no authentication: who can connect can read and write what ranks
    say there. Left alone, torch listens on every interface of the node.
    """
    from torch._C._distributed_c10d import TCPStore  # The driver does without torch at first.

    host = address or "0.0.0.0"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.bind((host, 0))
        listener.listen(_BACKLOG)
        port = listener.getsockname()[1]
        options = {"wait_for_workers": False, "master_listen_fd": listener.fileno()}
        store = TCPStore(host, port, world_size, True, timeout, **options)
        listener.detach()  # it is the store's now
    return store
