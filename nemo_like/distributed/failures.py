"""Describes a worker's failure: who, where, in which phase, why, and the end of its log."""

import socket

import psutil
import ray

from nemo_like.distributed.worker import WorkerContext

_LOG_TAIL_LINES = 12
_GLOO = "gloo/transport/"
"""In every message of gloo's about a connection; it has no error type of its own."""
_NODE_LOST = "the actor's node was terminated"
_ANSWER_TIMEOUT_S = 5.0


def is_disconnection(cause: BaseException) -> bool:
    """Whether ranks could not reach each other; that is not a bug of ours."""
    from torch.distributed import DistError  # The driver starts workers before it imports torch.

    return isinstance(cause, DistError) or _GLOO in str(cause)


def disconnection_message(context: WorkerContext, when: str, cause: BaseException) -> str:
    """A rank that lost the others, or never reached them."""
    reason = str(cause).strip().splitlines()
    return (
        f"{context.name} on {context.address} has no connection to other ranks {when}: "
        f"{reason[0] if reason else type(cause).__name__}; nodes must reach each other on every "
        "port, over the interface that cluster.network_interface names."
    )


def death_message(context: WorkerContext, when: str, error: Exception) -> str:
    """A process that ended on its own, or with its node."""
    tail = _log_tail(context)
    return (
        f"{context.name} on {context.address} died {when}: "
        f"{_reason(context.node_id, error)} {_memory_note(context.address)}"
        f"Its log is {context.log_path}"
        + (f" and ends with:\n{tail}" if tail else " (empty, or on that node).")
    )


def _reason(node_id: str, error: Exception) -> str:
    """The most informative line: Ray names a lost node on the last of many."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lost = next((line for line in lines if line.startswith(_NODE_LOST)), None)
    if lost is not None:
        return f"its node was lost ({lost.partition(': ')[2]})."
    if _raylet_is_gone(node_id):
        return "the raylet, Ray's own process on that node, was ended."
    return lines[0] if lines else f"{type(error).__name__}."


def _raylet_is_gone(node_id: str) -> bool:
    """Whether nothing listens where the node's raylet did: its workers end with it, unexplained."""
    for node in ray.nodes():
        if node["NodeID"] == node_id:
            place = node["NodeManagerAddress"], node["NodeManagerPort"]
            try:
                socket.create_connection(place, _ANSWER_TIMEOUT_S).close()
            except OSError as error:
                return isinstance(error, ConnectionRefusedError)
    return False


def _log_tail(context: WorkerContext) -> str:
    try:
        lines = context.log_path.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-_LOG_TAIL_LINES:])


def _memory_note(address: str) -> str:
    """Memory of the driver's node, if the worker was on it: the OOM killer leaves no message."""
    if address != ray.util.get_node_ip_address():
        return ""
    memory = psutil.virtual_memory()
    gib = 1 << 30
    return f"(host memory: {memory.available / gib:.1f} of {memory.total / gib:.1f} GiB free). "
