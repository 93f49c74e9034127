"""vLLM's processes are forked from one that imported vLLM while the run's other parts started.

vLLM spawns them, and each would import vLLM again, after our own process has: seconds on top.
Importing this module replaces how they are started, both in our process and in the fork server,
which imports it beforehand (``vllm_settings.start_fork_server``) and whose forks start further
ranks in the same way.
"""

import multiprocessing.context
import os

import vllm.v1.engine.core
import vllm.v1.engine.utils
import vllm.v1.executor.multiproc_executor
import vllm.v1.executor.uniproc_executor


class _Process(multiprocessing.context.ForkServerProcess):
    """A fork with the environment of whoever starts it, not that of the server."""

    def start(self) -> None:
        self._variables = dict(os.environ)
        super().start()

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._variables)
        super().run()


class _Context(multiprocessing.context.ForkServerContext):
    Process = _Process


def _context() -> multiprocessing.context.BaseContext:
    return _Context()


for _module in (vllm.v1.engine.utils, vllm.v1.executor.multiproc_executor):
    vars(_module)["get_mp_context"] = _context
