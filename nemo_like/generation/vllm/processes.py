"""vLLM's processes are forked from one that imported vLLM while the run's other parts started.

vLLM spawns them, and each would import vLLM again, after our own process has: seconds on top.
Importing this module replaces how they are started. The fork server imports it too, beforehand
(``environment.start_fork_server``), so that its forks start further ranks in the same way. Two more
replacements make an engine's first start on a machine shorter.
"""

import multiprocessing
import multiprocessing.context
import os
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

import cloudpickle
import psutil

from nemo_like.imports import without_collector

with without_collector():
    import vllm.model_executor.models.registry
    import vllm.v1.engine.core
    import vllm.v1.engine.utils
    import vllm.v1.executor.multiproc_executor
    import vllm.v1.executor.uniproc_executor
    from vllm.plugins import load_general_plugins

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


def _in_fork(look: Callable[[], Any]) -> Any:
    """What ``look`` finds out about a model's class; RuntimeError with the traceback if it fails.

    Not here, since the import of a model may start to use the GPU; vLLM looks in a process that
    first imports all of vLLM.
    """
    found, sender = multiprocessing.Pipe(duplex=False)
    process = EngineProcess(target=_send, args=(sender, cloudpickle.dumps(look)))
    process.start()
    sender.close()
    try:
        result, error = found.recv()
    except EOFError:
        result, error = None, "The process that looked at the model's class has died."
    finally:
        process.join()
    if error is not None:
        raise RuntimeError(error)
    return result


def _send(sender: Connection, look: bytes) -> None:
    try:
        load_general_plugins()
        sender.send((cloudpickle.loads(look)(), None))
    except Exception:  # whatever a model's file may raise
        sender.send((None, traceback.format_exc()))


def _sampled_to_warm_up() -> vllm.SamplingParams:
    """What training samples with.

    vLLM's own parameters use every feature of its sampler. Of the kernels that are compiled for
    them, the one for top-k and top-p takes four fifths of the time; now the first request with
    either compiles it.
    """
    return vllm.SamplingParams(temperature=0.9, seed=0, logprobs=0)


for _module in (vllm.v1.engine.utils, vllm.v1.executor.multiproc_executor):
    vars(_module)["get_mp_context"] = _context

vllm.model_executor.models.registry._run_in_subprocess = _in_fork
vllm.SamplingParams.for_sampler_warmup = staticmethod(_sampled_to_warm_up)
