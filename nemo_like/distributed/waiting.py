"""Waiting for workers, with a limit, a watch on idle ones, and reports of long waits."""

import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakSet

import ray
from ray.core.generated import gcs_pb2
from ray.exceptions import RayError

from nemo_like.distributed.connection import check_head
from nemo_like.errors import RunError, UserError, WaitTimeoutError, WorkerDiedError

if TYPE_CHECKING:
    from nemo_like.distributed.worker import WorkerContext
    from nemo_like.distributed.worker_group import WorkerGroup

logger = logging.getLogger(__name__)

R = TypeVar("R")

_PROGRESS_EVERY_S = 30.0
"""Less than the minute after which Ray ends a driver whose head is gone, unheard."""
_LOOK_EVERY_S = 1.0
_DEAD = vars(gcs_pb2)["ActorTableData"].DEAD
_ECHO_S = 2.0
"""Ray reports a dead process later than its peers do a broken connection."""

watched: WeakSet["WorkerGroup[Any]"] = WeakSet()
"""All groups of this process: a worker that nobody calls is missed as well."""


@dataclass(frozen=True, kw_only=True)
class Pending(Generic[R]):
    """Calls to ranks of one group that are under way."""

    group: "WorkerGroup[Any]"
    refs: dict[Any, int]
    """Reference of each call and the rank that it went to."""
    phase: str

    def result(self, ref: Any) -> R:
        """What one finished call returned; raises its failure."""
        return self.group.result(ref, self.refs[ref], f"in {self.phase}")

    def late(self, pending: Collection[Any]) -> list["WorkerContext"]:
        """Whose calls are among ``pending``."""
        return [self.group.contexts[rank] for ref, rank in self.refs.items() if ref in pending]


def wait_together(*calls: Pending[Any]) -> list[list[Any]]:
    """Results of each of ``calls``, in rank order.

    The first failure on any rank of any group is raised without waiting for the others, and so are
    the death of an idle worker, and WaitTimeoutError after the first group's limit.
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
        if pending and left <= 0:
            raise WaitTimeoutError(_timeout_message(calls, set(pending)))
        if pending and not done:
            if calls[0].group.minds_idle:
                phase = owner[pending[0]].phase
                check_idle(calls[0].group, f"in {phase}", _busy(owner, pending))
            if time.monotonic() - said >= _PROGRESS_EVERY_S:
                said = time.monotonic()
                logger.info("%s", progress(owner[pending[0]], set(pending), said - start))
                check_head()
    meter.waited(time.monotonic() - start)
    ordered = [[results[ref] for ref in sorted(c.refs, key=c.refs.__getitem__)] for c in calls]
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

    Those that are ``busy`` (role and rank) say so themselves. What is read here the cluster has
    already reported to this process, so looking costs no call.
    """
    idle = f"{when}, while it was idle"
    for group in _groups_of(of_run):
        for rank, actor in enumerate([*group.actors]):
            if (group.role, rank) in busy:
                continue
            if actor._get_local_state() == _DEAD:
                phase = group.cut_off(rank)  # a call that others are to wait for
                when = f"in {phase}" if phase else idle
                group.result(actor.call.remote("ready"), rank, when)
        for ref in group.broken():
            rank = group.watches[ref]
            if (group.role, rank) not in busy:
                phase = group.cut_off(rank)
                del group.watches[ref]
                group.result(ref, rank, f"in {phase}" if phase else idle)


def _groups_of(one: "WorkerGroup[Any]") -> Iterator["WorkerGroup[Any]"]:
    """Those on the same bundles, and so of the same run."""
    bundles = one.bundles[0][0].group
    return (group for group in [*watched] if group.bundles[0][0].group is bundles)


def _busy(owner: Mapping[Any, Pending[Any]], pending: Collection[Any]) -> set[tuple[str, int]]:
    return {(owner[ref].group.role, owner[ref].refs[ref]) for ref in pending}


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
