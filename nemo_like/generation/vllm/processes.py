"""vLLM's processes are forked from one that imported vLLM while the run's other parts started.

vLLM spawns them, and each would import vLLM again, after our own process has: seconds on top.
Importing this module replaces how they are started, both in our process and in the fork server,
which imports it beforehand (``vllm_environment.start_fork_server``) and whose forks start further
ranks in the same way.
"""

import multiprocessing
import multiprocessing.context
import os
import signal
from types import FrameType

import psutil

from nemo_like.imports import without_collector

with without_collector():
    import vllm.v1.engine.core
    import vllm.v1.engine.utils
    import vllm.v1.executor.multiproc_executor
    import vllm.v1.executor.uniproc_executor

_END = signal.SIGUSR2
"""What SIGTERM is to others: that may come from whoever ends all processes of a run."""


class EngineProcess(multiprocessing.context.ForkServerProcess):
    """A fork with the environment of whoever starts it, not that of the server.

    Like the server it blocks SIGTERM, so that only who started it ends it.
    """

    def start(self) -> None:
        self._variables = dict(os.environ)
        super().start()

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._variables)
        signal.signal(_END, _end)
        super().run()

    def terminate(self) -> None:
        """As vLLM does it; the process leaves by its own handler of SIGTERM."""
        if self.is_alive() and self.pid is not None:
            os.kill(self.pid, _END)


def _end(signum: int, frame: FrameType | None) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    signal.raise_signal(signal.SIGTERM)


class _Context(multiprocessing.context.ForkServerContext):
    Process = EngineProcess


def engine_processes() -> list[psutil.Process]:
    """Those of all engines that this process has started, with the ranks that these started.

    All are children of one fork server, whoever requested them.
    """
    first = [one for one in multiprocessing.active_children() if isinstance(one, EngineProcess)]
    if not first:
        return []
    server = psutil.Process(first[0].pid).parent()
    # Where the server is gone, an engine's parent is another process, whose children are not ours.
    if server is None or server.ppid() != os.getpid():
        return []
    return server.children(recursive=True)


def _context() -> multiprocessing.context.BaseContext:
    return _Context()


for _module in (vllm.v1.engine.utils, vllm.v1.executor.multiproc_executor):
    vars(_module)["get_mp_context"] = _context
