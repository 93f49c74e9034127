"""N actors of one class, one a bundle, called by typed methods; waits have a limit and an owner."""

import copy
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

import ray
from ray.exceptions import (
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)

from nemo_like.distributed.connection import check_head
from nemo_like.distributed.driver_meter import DriverMeter
from nemo_like.distributed.failures import (
    death_message,
    disconnection_message,
    is_disconnection,
)
from nemo_like.distributed.rank_layout import RankLayout
from nemo_like.distributed.virtual_cluster import Bundle
from nemo_like.distributed.worker import AsyncHost, Host, Worker, WorkerContext
from nemo_like.errors import RunError, UserError, WaitTimeoutError, WorkerDiedError

logger = logging.getLogger(__name__)

W = TypeVar("W", bound=Worker)
P = ParamSpec("P")
R = TypeVar("R")

_PROGRESS_EVERY_S = 30.0
"""Less than the minute after which Ray ends a driver whose head is gone, unheard."""
_ECHO_S = 2.0
"""Ray reports a dead process later than its peers do a broken connection."""


def worker_contexts(
    role: str, bundles: Sequence[Sequence[Bundle]], log_dir: str
) -> list[WorkerContext]:
    """What the process of each rank is told."""
    return [
        WorkerContext(
            role=role,
            rank=rank,
            world_size=len(bundles),
            address=of_rank[0].address,
            node_id=of_rank[0].node_id,
            environment=of_rank[0].environment,
            listens_on=of_rank[0].listens_on,
            gpu_ids=tuple(bundle.gpu_id for bundle in of_rank if bundle.gpu_id is not None),
            log_dir=log_dir,
        )
        for rank, of_rank in enumerate(bundles)
    ]


class WorkerGroup(Generic[W]):
    """Ranks of one role. ``bundles[rank]`` are the bundles of a rank; it runs in the first of them.

    Methods are passed as methods, ``group.call(PolicyWorker.save, path)``, so that an editor can
    follow them and a type checker sees their arguments. A call blocks until every rank answered;
    the first failure ends the wait, and so does ``timeout_s``.
    """

    def __init__(
        self,
        worker_class: Callable[[], type[W]],
        role: str,
        bundles: Sequence[Sequence[Bundle]],
        *,
        layout: RankLayout | None = None,
        timeout_s: float,
        log_dir: str,
        meter: DriverMeter | None = None,
        asynchronous: bool = False,
    ) -> None:
        """``worker_class`` imports the class, in the worker's process; ``asynchronous`` if its
        methods are coroutines."""
        self.role = role
        self.layout = layout or RankLayout({"dp": len(bundles)})
        assert self.layout.world_size == len(bundles), (self.layout, len(bundles))
        self.timeout_s = timeout_s
        self.meter = meter or DriverMeter()
        self.bundles = bundles
        self.contexts = worker_contexts(role, bundles, log_dir)
        # Ray titles processes by the name of their actor's class.
        host = type(f"{role.capitalize()}Worker", (AsyncHost if asynchronous else Host,), {})
        actor_class = ray.remote(host)
        self.actors: list[Any] = [
            actor_class.options(
                num_cpus=0,
                num_gpus=0,
                max_restarts=0,
                scheduling_strategy=bundles[context.rank][0].scheduling_strategy(),
            ).remote(context, worker_class)
            for context in self.contexts
        ]

    @property
    def world_size(self) -> int:
        """Ranks in the group."""
        return len(self.actors)

    def call(
        self,
        method: Callable[Concatenate[W, P], R]
        | Callable[Concatenate[W, P], Coroutine[Any, Any, R]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[R]:
        """The same arguments to every rank; results in rank order."""
        return self._call_all(dict.fromkeys(range(self.world_size), (args, kwargs)), method)

    def submit(
        self,
        method: Callable[Concatenate[W, P], R]
        | Callable[Concatenate[W, P], Coroutine[Any, Any, R]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> "Pending[R]":
        """``call`` without waiting; see ``wait_together``."""
        return self._send(dict.fromkeys(range(self.world_size), (args, kwargs)), method)

    def submit_missing(self, paths: list[str]) -> "Pending[list[str]]":
        """Those of ``paths`` that each rank's node does not see; before anything is imported."""
        refs = {actor.missing.remote(paths): rank for rank, actor in enumerate(self.actors)}
        return Pending(group=self, refs=refs, phase="start-up")

    def submit_each(
        self,
        method: Callable[Concatenate[W, Any, ...], R]
        | Callable[Concatenate[W, Any, ...], Coroutine[Any, Any, R]],
        of_rank: Sequence[Any],
        *args: Any,
    ) -> "Pending[R]":
        """``of_rank[i]`` and ``args`` to rank i, without waiting."""
        assert len(of_rank) == self.world_size, (len(of_rank), self.world_size)
        return self._send({rank: ((one, *args), {}) for rank, one in enumerate(of_rank)}, method)

    def scatter(
        self,
        method: Callable[Concatenate[W, Any, ...], R]
        | Callable[Concatenate[W, Any, ...], Coroutine[Any, Any, R]],
        shards: Sequence[Any],
        *args: Any,
        axis: str = "dp",
        last: str | None = None,
    ) -> list[R]:
        """Shard i to all ranks at position i of ``axis``; results of its leaders, in order.

        Leaders are first along every other axis, and last along ``last``. ``args`` go to all.
        """
        assert len(shards) == self.layout.sizes[axis], (len(shards), self.layout)
        work = {
            rank: ((shards[self.layout.coordinate(rank, axis)], *args), {})
            for rank in range(self.world_size)
        }
        results = self._call_all(work, method)
        return [results[rank] for rank in self.layout.leaders(axis, last)]

    def call_rank(
        self,
        rank: int,
        method: Callable[Concatenate[W, P], R]
        | Callable[Concatenate[W, P], Coroutine[Any, Any, R]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """One rank only."""
        return self._call_all({rank: (args, kwargs)}, method)[0]

    def waiting(self, timeout_s: float) -> Self:
        """The same workers, called with another limit."""
        view = copy.copy(self)
        view.timeout_s = timeout_s
        return view

    def shutdown(self) -> None:
        """End the processes at once, whatever they do."""
        for actor in self.actors:
            ray.kill(actor)
        self.actors.clear()

    def _call_all(self, work: dict[int, tuple[Any, Any]], method: Callable[..., Any]) -> list[Any]:
        return wait_together(self._send(work, method))[0]

    def _send(self, work: dict[int, tuple[Any, Any]], method: Callable[..., Any]) -> "Pending[Any]":
        name = method.__name__
        refs = {}
        for rank, (args, kwargs) in work.items():
            self.meter.count(args, kwargs)
            refs[self.actors[rank].call.remote(name, *args, **kwargs)] = rank
        return Pending(group=self, refs=refs, phase=name)

    def result(self, ref: Any, rank: int, phase: str) -> Any:
        """What a finished call returned; its failure, told in terms of this group."""
        context = self.contexts[rank]
        try:
            return ray.get(ref)
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, WorkerDiedError):  # a process of the worker's own, such as vLLM's
                raise WorkerDiedError(death_message(context, phase, cause)) from None
            if isinstance(cause, (UserError, RunError, WaitTimeoutError)):
                raise type(cause)(f"{cause}") from None
            if is_disconnection(cause):
                raise RunError(disconnection_message(context, phase, cause)) from error
            raise
        except (RayActorError, WorkerCrashedError, OutOfMemoryError) as error:
            raise WorkerDiedError(death_message(context, phase, error)) from error


@dataclass(frozen=True, kw_only=True)
class Pending(Generic[R]):
    """Calls to ranks of one group that are under way."""

    group: WorkerGroup[Any]
    refs: dict[Any, int]
    """Reference of each call and the rank that it went to."""
    phase: str

    def result(self, ref: Any) -> R:
        """What one finished call returned; raises its failure."""
        return self.group.result(ref, self.refs[ref], self.phase)

    def late(self, pending: Collection[Any]) -> list[WorkerContext]:
        """Whose calls are among ``pending``."""
        return [self.group.contexts[rank] for ref, rank in self.refs.items() if ref in pending]


def wait_together(*calls: Pending[Any]) -> list[list[Any]]:
    """Results of each of ``calls``, in rank order.

    The first failure on any rank of any group is raised without waiting for the others, and so is
    WaitTimeoutError after the first group's limit.
    """
    check_head()  # Workers go on without it for a minute; steps may all be shorter than a wait.
    start = time.monotonic()
    results: dict[Any, Any] = {}
    owner = {ref: call for call in calls for ref in call.refs}
    timeout_s, meter = calls[0].group.timeout_s, calls[0].group.meter
    pending = list(owner)
    while pending:
        left = timeout_s - (time.monotonic() - start)
        done, pending = ray.wait(pending, timeout=max(0.0, min(left, _PROGRESS_EVERY_S)))
        if done and pending:  # All else that is there, or thousands of ranks take as many turns.
            more, pending = ray.wait(pending, num_returns=len(pending), timeout=0)
            done += more
        for ref in done:
            try:
                results[ref] = owner[ref].result(ref)
            except RunError as error:
                raise _root_cause(error, {ref: owner[ref] for ref in pending}) from error.__cause__
        if pending and (left <= 0 or not done):
            if left <= 0:
                raise WaitTimeoutError(_timeout_message(calls, set(pending)))
            call = owner[pending[0]]
            names = ", ".join(context.name for context in call.late(set(pending))[:4])
            logger.info("Waiting for %s in %s, %.0f s", names, call.phase, time.monotonic() - start)
            check_head()
    meter.waited(time.monotonic() - start)
    ordered = [[results[ref] for ref in sorted(c.refs, key=c.refs.__getitem__)] for c in calls]
    meter.count(ordered)
    return ordered


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
        f"in {group.contexts[0].log_dir}. Raise cluster.call_timeout_s (or start_timeout_s) if the "
        "work is only slow."
    )


def _root_cause(error: RunError, pending: Mapping[Any, Pending[Any]]) -> RunError:
    """``error``, or the death of a worker that ``error`` may be but the echo of."""
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
