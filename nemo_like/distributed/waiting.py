"""Waiting for workers, with a limit and a watch on idle ones; progress, load and failures."""

import io
import logging
import pickle
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakSet

import psutil
import ray
from ray import ObjectRef
from ray.core.generated import gcs_pb2
from ray.exceptions import RayError

from nemo_like.distributed.connection import check_head
from nemo_like.distributed.worker import WorkerContext
from nemo_like.errors import RunError, UserError, WaitTimeoutError, WorkerDiedError
from nemo_like.observe.metrics import Metric, Metrics, Reduce

if TYPE_CHECKING:
    from nemo_like.distributed.worker_group import WorkerGroup

logger = logging.getLogger(__name__)

R = TypeVar("R")

_PROGRESS_EVERY_S = 30.0
"""Less than the minute after which Ray ends a driver whose head is gone, unheard."""
_LOOK_EVERY_S = 1.0
_DEAD = vars(gcs_pb2)["ActorTableData"].DEAD
_ECHO_S = 2.0
"""Ray reports a dead process later than its peers do a broken connection."""
_LOG_TAIL_LINES = 12
_GLOO = "gloo/transport/"
"""In every message of gloo's about a connection; it has no error type of its own."""
_NODE_LOST = "the actor's node was terminated"
_ANSWER_TIMEOUT_S = 5.0

watched: WeakSet["WorkerGroup[Any]"] = WeakSet()
"""All groups of this process: a worker that nobody calls is missed as well."""

IMPORTING = (
    "its process starts and imports torch and transformers, which takes 5 to 15 s on an idle "
    "machine, and minutes where the processors are busy or Python's packages are on a shared disk"
)
IMPORTING_ENGINE = f"{IMPORTING}; vLLM takes as long once more"
STARTING_ENGINE = (
    "it starts its engine, and what scores; vLLM takes 10 to 60 s, with "
    "engine_kwargs.enforce_eager=false and empty caches a few minutes"
)


@dataclass(frozen=True, kw_only=True)
class Pending(Generic[R]):
    """Calls to ranks of one group that are under way."""

    group: "WorkerGroup[Any]"
    refs: dict[Any, int]
    phase: str

    def result(self, ref: Any) -> R:
        return self.group.result(ref, self.refs[ref], f"in {self.phase}")

    def late(self, pending: Collection[Any]) -> list[WorkerContext]:
        return [self.group.contexts[rank] for ref, rank in self.refs.items() if ref in pending]


def wait_together(
    *calls: Pending[Any], enough: Callable[[Set[Any]], bool] | None = None
) -> list[list[Any]]:
    """Results of each of ``calls``, in rank order.

    ``enough``: whether what has finished will do; of calls that have not, the results are []. The
    first failure of any rank, the death of an idle worker, and WaitTimeoutError after the first
    group's limit end the wait.
    """
    check_head()  # Workers go on without it for a minute; steps may all be shorter than a wait.
    start = said = time.monotonic()
    results: dict[Any, Any] = {}
    owner = {ref: call for call in calls for ref in call.refs}
    timeout_s, meter = calls[0].group.timeout_s, calls[0].group.meter
    pending = list(owner)
    while pending:
        left = timeout_s - (time.monotonic() - start)
        done, pending = _some_of(pending, max(0.0, min(left, _LOOK_EVERY_S)))
        if done and pending:  # All else that is there, or thousands of ranks take as many turns.
            more, pending = ray.wait(pending, num_returns=len(pending), timeout=0)
            done += more
        for ref in done:
            try:
                results[ref] = owner[ref].result(ref)
                owner[ref].group.calls.pop(ref, None)
            except RunError as error:
                raise _root_cause(error, {ref: owner[ref] for ref in pending}) from error.__cause__
        if enough is not None and enough(results.keys()):
            break
        if pending and left <= 0:
            raise WaitTimeoutError(_timeout_message(calls, set(pending)))
        if pending and not done:
            if calls[0].group.minds_idle:
                busy = {(owner[ref].group.role, owner[ref].refs[ref]) for ref in pending}
                check_idle(calls[0].group, f"in {owner[pending[0]].phase}", busy)
            if time.monotonic() - said >= _PROGRESS_EVERY_S:
                said = time.monotonic()
                logger.info("%s", progress(owner[pending[0]], set(pending), said - start))
                check_head()
    meter.waited(time.monotonic() - start)
    ordered = [
        [results[ref] for ref in sorted(c.refs, key=c.refs.__getitem__)]
        if c.refs.keys() <= results.keys()
        else []
        for c in calls
    ]
    meter.count(ordered)
    return ordered


def _some_of(refs: list[Any], timeout_s: float) -> tuple[list[Any], list[Any]]:
    """ray.wait; it wraps whatever a signal handler raises, except KeyboardInterrupt."""
    try:
        return ray.wait(refs, timeout=timeout_s)
    except SystemError as error:
        if error.__cause__ is None or isinstance(error.__cause__, Exception):
            raise
        raise error.__cause__ from None


def check_idle(
    of_run: "WorkerGroup[Any]", when: str, busy: Collection[tuple[str, int]] = ()
) -> None:
    """WorkerDiedError if a worker of the run, or its engine, has died; ``when`` it is noticed.

    Those that are ``busy`` (role and rank) say so themselves. The cluster has already reported what
    is read here.
    """
    idle = f"{when}, while it was idle"
    bundles = of_run.bundles[0][0].group  # a run's groups share them
    for group in [one for one in [*watched] if one.bundles[0][0].group is bundles]:
        dead = [
            (rank, actor.call.remote("ready"))
            for rank, actor in enumerate([*group.actors])
            if (group.role, rank) not in busy and actor._get_local_state() == _DEAD
        ]
        for rank, ref in dead + [(group.watches[ref], ref) for ref in group.broken()]:
            if (group.role, rank) not in busy:
                phase = group.cut_off(rank)  # a call that others are to wait for
                group.watches.pop(ref, None)
                group.result(ref, rank, f"in {phase}" if phase else idle)


def progress(call: Pending[Any], pending: Collection[Any], waited_s: float) -> str:
    """Who is still awaited, for how long, and what they are doing."""
    names = ", ".join(context.name for context in call.late(pending)[:4])
    doing = call.group.doing()
    return f"Waiting for {names} in {call.phase}, {waited_s:.0f} s{f': {doing}' if doing else ''}"


def _timeout_message(calls: Sequence[Pending[Any]], pending: Collection[Any]) -> str:
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


def _root_cause(error: RunError, pending: Mapping[Any, Pending[Any]]) -> RunError:
    """``error``, or the worker death that caused it."""
    if not pending or isinstance(error, WorkerDiedError):
        return error
    done, _ = ray.wait(list(pending), num_returns=len(pending), timeout=_ECHO_S)
    for ref in done:
        try:
            pending[ref].result(ref)
        except WorkerDiedError as death:
            return death
        except (RayError, UserError, RunError, WaitTimeoutError) as other:
            logger.debug("Also failed: %s", other)
    return error


def num_bytes(folder: Path) -> int:
    """Of all files in ``folder``; 0 if there is none."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # renamed meanwhile
            total += path.stat().st_size if path.is_file() else 0
    return total


def gb(count: float) -> str:
    """As people say it.

    >>> gb(3_100_000_000), gb(1_234_000)
    ('3.1 GB', '0.0012 GB')
    """
    return f"{count / 1e9:.2g} GB" if count < 1e10 else f"{count / 1e9:.0f} GB"


def written(folder: Path, expected: int) -> Callable[[], str]:
    """Progress of writing ``folder``, evaluated when the message is shown."""
    return lambda: f"{gb(num_bytes(folder))} of about {gb(expected)} are written to {folder}"


def writing_folder(target: Path) -> Path:
    """Where an export is written, aside, before it gets its name."""
    return target.with_name(f".{target.name}-writing")


class DriverMeter:
    """Counts pickled bytes to workers and back, and the seconds spent waiting for them."""

    def __init__(self) -> None:
        self._bytes = 0
        self._waited_s = 0.0

    def count(self, *values: Any) -> None:
        """Add the size of ``values``; an object reference counts as its 28-byte id."""
        buffer = io.BytesIO()
        _Pickler(buffer, protocol=5).dump(values)
        self._bytes += buffer.tell()

    def waited(self, seconds: float) -> None:
        self._waited_s += seconds

    def pop(self) -> Metrics:
        """``driver/bytes`` and ``time/waiting_s`` since the last pop."""
        found = {"driver/bytes": self._bytes, "time/waiting_s": self._waited_s}
        self._bytes, self._waited_s = 0, 0.0
        return {name: Metric(value, reduce=Reduce.sum) for name, value in found.items()}


class _Pickler(pickle.Pickler):
    """Names references instead of pickling them, which would pin their objects for ever."""

    def persistent_id(self, obj: Any) -> bytes | None:
        return obj.binary() if isinstance(obj, ObjectRef) else None


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
