"""What ended a wait, in words: who is late, who died and why, who lost the others."""

import logging
import socket
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import psutil
import ray
from ray.exceptions import RayError, RayTaskError

from nemo_like.distributed.waiting import Pending
from nemo_like.distributed.worker import WorkerContext
from nemo_like.errors import RunError, UserError, WaitTimeoutError, WorkerDiedError

logger = logging.getLogger(__name__)

_ECHO_S = 2.0
"""Ray reports a dead process later than its peers do a broken connection."""
_LOG_TAIL_LINES = 12
_GLOO = "gloo/transport/"
"""In every message of gloo's about a connection; it has no error type of its own."""
_NODE_LOST = "the actor's node was terminated"
_ANSWER_TIMEOUT_S = 5.0


def timeout_message(calls: Sequence[Pending[Any]], pending: Collection[Any]) -> str:
    """Who is late, where, and what to do; one that hangs keeps others waiting."""
    groups = []
    for call in calls:
        if late := call.late(pending):
            who = ", ".join(f"{context.name} on {context.address}" for context in late[:8])
            role, size = call.group.role, call.group.world_size
            groups.append(f"{len(late)} of {size} {role} workers in {call.phase}: {who}")
    group = calls[0].group
    return (
        f"The driver waited {group.timeout_s:g} s for {', and for '.join(groups)}; their logs are "
        f"in {group.contexts[0].log_dir}. Raise cluster.{group.limit_key} if the work is only slow."
    )


def root_cause(error: RunError, others: Mapping[Any, Pending[Any]]) -> RunError:
    """``error``, or the worker death that caused it."""
    if not others or isinstance(error, WorkerDiedError):
        return error
    done, _ = ray.wait(list(others), num_returns=len(others), timeout=_ECHO_S)
    for ref in done:
        try:
            others[ref].result(ref)
        except WorkerDiedError as death:
            return death
        except (RayError, UserError, RunError, WaitTimeoutError) as other:
            logger.debug("Also failed: %s", other)
    return error


def raise_in_words(error: Exception, context: WorkerContext, when: str) -> NoReturn:
    """Raise what a call of a rank ended with, as one sentence unless it is a bug of ours."""
    if not isinstance(error, RayTaskError):
        raise WorkerDiedError(death_message(context, when, error)) from error
    cause = error.cause
    if isinstance(cause, WorkerDiedError):  # a process of the worker's own, such as vLLM's
        raise WorkerDiedError(death_message(context, when, cause)) from None
    if isinstance(cause, (UserError, RunError, WaitTimeoutError)):
        raise type(cause)(f"{cause}") from None
    if is_disconnection(cause):
        raise RunError(disconnection_message(context, when, cause)) from error
    raise error


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
    tail = memory = ""
    with suppress(OSError):
        lines = context.log_path.read_text(errors="replace").splitlines()
        tail = "\n".join(lines[-_LOG_TAIL_LINES:])
    if context.address == ray.util.get_node_ip_address():  # the OOM killer leaves no message
        host, gib = psutil.virtual_memory(), 1 << 30
        memory = f"(host memory: {host.available / gib:.1f} of {host.total / gib:.1f} GiB free). "
    return (
        f"{context.name} on {context.address} died {when}: "
        f"{_reason(context.node_id, error)} {memory}Its log is {context.log_path}"
        + (f" and ends with:\n{tail}" if tail else " (empty, or on that node).")
    )


def _reason(node_id: str, error: Exception) -> str:
    """The most informative line: Ray names a lost node on the last of many."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lost := next((line for line in lines if line.startswith(_NODE_LOST)), None):
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
