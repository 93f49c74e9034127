"""N actors of one class, one per bundle, with typed calls; every wait has a limit and an owner."""

import copy
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypeAlias, TypeVar

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError, WorkerCrashedError

from nemo_like.distributed.waiting import (
    DriverMeter,
    Pending,
    check_idle,
    wait_together,
    watched,
)
from nemo_like.distributed.worker import (
    AsyncHost,
    Host,
    RankLayout,
    Worker,
    WorkerContext,
    returns_tokens_apart,
)

if TYPE_CHECKING:
    from nemo_like.distributed.virtual_cluster import Bundle

_MOST_CALLS = 100_000
"""At once, to one rank with coroutines; by Ray's default of 1,000 a refit waits for rollouts."""
W = TypeVar("W", bound=Worker)
_DIED = (RayActorError, WorkerCrashedError, OutOfMemoryError)
P = ParamSpec("P")
R = TypeVar("R")
Method: TypeAlias = (
    Callable[Concatenate[W, P], R] | Callable[Concatenate[W, P], Coroutine[Any, Any, R]]
)
"""Of a worker class, with what it takes and what it returns or awaits."""


def worker_contexts(
    role: str, bundles: "Sequence[Sequence[Bundle]]", log_dir: str
) -> list[WorkerContext]:
    return [
        WorkerContext(
            role=role,
            rank=rank,
            world_size=len(bundles),
            address=of_rank[0].address,
            host=of_rank[0].host,
            node_id=of_rank[0].node_id,
            environment=of_rank[0].environment,
            listens_on=of_rank[0].listens_on,
            gpu_ids=tuple(bundle.gpu_id for bundle in of_rank if bundle.gpu_id is not None),
            log_dir=log_dir,
        )
        for rank, of_rank in enumerate(bundles)
    ]


class WorkerGroup(Generic[W]):
    """Ranks of one role; each runs in the first of its ``bundles[rank]``.

    Methods are passed as methods, ``group.call(PolicyWorker.save, path)``. A call blocks until
    every rank answered; the first failure ends the wait, and so does ``timeout_s``.
    """

    def __init__(
        self,
        worker_class: Callable[[], type[W]],
        role: str,
        bundles: "Sequence[Sequence[Bundle]]",
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
        self.limit_key = "call_timeout_s"
        """Key in the section cluster that ``timeout_s`` is the value of."""
        self.doing: Callable[[], str] = str
        """What the ranks are about, for who waits long."""
        self.watches: dict[Any, int] = {}
        """Calls that return only when something of a rank's own is broken, and their ranks."""
        self.calls: dict[Any, tuple[int, str]] = {}
        """Rank and phase of each call that nobody has waited for."""
        self.minds_idle = True
        """Whether the death of a worker that is not waited for ends a wait."""
        self.meter = meter or DriverMeter()
        self.bundles = bundles
        self.contexts = worker_contexts(role, bundles, log_dir)
        # Ray titles processes by the name of their actor's class.
        host = type(f"{role.capitalize()}Worker", (AsyncHost if asynchronous else Host,), {})
        at_once = {"max_concurrency": _MOST_CALLS} if asynchronous else {}
        actor_class = ray.remote(host)
        self.actors: list[Any] = [
            actor_class.options(
                num_cpus=0,
                num_gpus=0,
                max_restarts=0,
                **at_once,
                scheduling_strategy=bundles[context.rank][0].scheduling_strategy(),
            ).remote(context, worker_class)
            for context in self.contexts
        ]
        watched.add(self)

    @property
    def world_size(self) -> int:
        return len(self.actors)

    def call(self, method: Method[W, P, R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        return wait_together(self.submit(method, *args, **kwargs))[0]

    def submit(self, method: Method[W, P, R], *args: P.args, **kwargs: P.kwargs) -> "Pending[R]":
        """``call`` without waiting; see ``wait_together``."""
        return self._send(dict.fromkeys(range(self.world_size), (args, kwargs)), method)

    def submit_missing(self, paths: list[str]) -> "Pending[list[str]]":
        """Those of ``paths`` that each rank's node does not see; before anything is imported."""
        refs = {actor.missing.remote(paths): rank for rank, actor in enumerate(self.actors)}
        return Pending(group=self, refs=refs, phase="start-up")

    def submit_each(
        self, method: Method[W, ..., R], of_rank: Sequence[Any], *args: Any
    ) -> "Pending[R]":
        """``of_rank[i]`` and ``args`` to rank i, without waiting."""
        assert len(of_rank) == self.world_size, (len(of_rank), self.world_size)
        return self._send({rank: ((one, *args), {}) for rank, one in enumerate(of_rank)}, method)

    def scatter(
        self,
        method: Method[W, ..., R],
        shards: Sequence[Any],
        *args: Any,
        axis: str = "dp",
        last: str | None = None,
    ) -> list[R]:
        """Shard i to all ranks at position i of ``axis``; results of its output ranks, in order.

        See ``RankLayout.output_ranks`` for ``last``. ``args`` go to all.
        """
        assert len(shards) == self.layout.sizes[axis], (len(shards), self.layout)
        places = (self.layout.coordinate(rank, axis) for rank in range(self.world_size))
        calls = self.submit_each(method, [shards[place] for place in places], *args)
        results = wait_together(calls)[0]
        return [results[rank] for rank in self.layout.output_ranks(axis, last)]

    def call_rank(self, rank: int, method: Method[W, P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return wait_together(self._send({rank: (args, kwargs)}, method))[0][0]

    def submit_rank(
        self, rank: int, method: Method[W, P, R], *args: P.args, **kwargs: P.kwargs
    ) -> "Pending[R]":
        """``call_rank`` without waiting; ``wait_together`` looks at idle workers, too."""
        return self._send({rank: (args, kwargs)}, method, looks=False)

    def waiting(
        self,
        timeout_s: float,
        limit_key: str = "call_timeout_s",
        doing: str | Callable[[], str] = "",
    ) -> Self:
        """The same workers, called with another limit; ``doing``: what they are about then."""
        view = copy.copy(self)
        view.timeout_s = timeout_s
        view.limit_key = limit_key
        view.doing = doing if callable(doing) else lambda: doing
        return view

    def ending(self, timeout_s: float) -> Self:
        """The same workers, called to end in order, whatever others died of."""
        view = self.waiting(timeout_s)
        view.minds_idle = False
        return view

    def watch(self, method: Callable[Concatenate[W, ...], Coroutine[Any, Any, None]]) -> None:
        """Call ``method``, which returns only by failing; every wait of the run sees that."""
        refs = self.submit(method).refs
        for ref in refs:
            del self.calls[ref]
        self.watches |= refs

    def broken(self) -> list[Any]:
        refs = [*self.watches]
        return ray.wait(refs, num_returns=len(refs), timeout=0)[0] if refs else []

    def cut_off(self, rank: int) -> str | None:
        """The phase of a call that the rank has not finished, and, if it is dead, never will."""
        for ref, (of_rank, phase) in [*self.calls.items()]:
            if of_rank != rank:
                continue
            if not ray.wait([ref], timeout=0)[0]:
                return phase
            try:
                ray.get(ref)
            except _DIED:
                return phase
            except RayTaskError:  # it failed by itself before
                continue
        return None

    def shutdown(self) -> None:
        doomed = [*self.actors]
        self.actors.clear()  # first, so that nobody misses them
        self.watches.clear()
        self.calls.clear()
        for actor in doomed:
            ray.kill(actor)

    def _send(
        self, work: dict[int, tuple[Any, Any]], method: Callable[..., Any], *, looks: bool = True
    ) -> "Pending[Any]":
        name = method.__name__
        if looks and self.minds_idle:
            check_idle(self, f"before {name}")
        refs, tokens = {}, {}
        for rank, (args, kwargs) in work.items():
            self.meter.count(args, kwargs)
            call = self.actors[rank].call
            if returns_tokens_apart(method):
                ref, tokens_ref = call.options(num_returns=2).remote(name, *args, **kwargs)
                tokens[ref] = tokens_ref
            else:
                ref = call.remote(name, *args, **kwargs)
            refs[ref] = rank
        self.calls |= {ref: (rank, name) for ref, rank in refs.items()}
        return Pending(group=self, refs=refs, phase=name, tokens=tokens)

    def result(self, ref: Any, rank: int, when: str) -> Any:
        """What a finished call returned; a failure names the rank, and ``when`` it was noticed."""
        context = self.contexts[rank]
        try:
            return ray.get(ref)
        except (RayTaskError, *_DIED) as error:
            from nemo_like.distributed.failures import raise_in_words

            raise_in_words(error, context, when)
