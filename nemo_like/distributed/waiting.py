"""Waiting for workers, with a limit and a watch on idle ones; progress, load and failures."""

import io
import logging
import pickle
import time
from collections.abc import Callable, Collection, Set
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakSet

import ray
from ray import ObjectRef
from ray.core.generated import gcs_pb2

from nemo_like.distributed.connection import check_head
from nemo_like.distributed.worker import WorkerContext
from nemo_like.errors import RunError, WaitTimeoutError
from nemo_like.observe.metrics import Metric, Metrics, Reduce

if TYPE_CHECKING:
    from nemo_like.distributed.worker_group import WorkerGroup

logger = logging.getLogger(__name__)

R = TypeVar("R")

_PROGRESS_EVERY_S = 30.0
"""Less than the minute after which Ray ends a driver whose head is gone, unheard."""
_LOOK_EVERY_S = 1.0
_DEAD = vars(gcs_pb2)["ActorTableData"].DEAD

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
    tokens: dict[Any, Any] = field(default_factory=dict)
    """References to what calls return apart; see ``worker.tokens_apart``."""

    def result(self, ref: Any) -> R:
        """What the call returned; its ``tokens`` are filled in if they came apart."""
        found = self.group.result(ref, self.refs[ref], f"in {self.phase}")
        return replace(found, tokens=self.tokens[ref]) if ref in self.tokens else found

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
                from nemo_like.distributed.failures import root_cause

                others = owner.keys() - results.keys() - {ref}
                raise root_cause(error, {one: owner[one] for one in others}) from error.__cause__
        if enough is not None and enough(results.keys()):
            break
        if pending and left <= 0:
            from nemo_like.distributed.failures import timeout_message

            raise WaitTimeoutError(timeout_message(calls, set(pending)))
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
