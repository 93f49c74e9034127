"""Ray workers as forks of one process that has imported what they need, which takes seconds each.

Each is a process of its own all the same: its id, environment, log and end. Some of the runs that
tests start as commands have workers that import for themselves, as users' workers do.
"""

import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from tests.typed_command import become
from tests.warm_process import end_with, warm_up

_CLIENT = Path(__file__).with_name("fork_client.py")
_NUM_STREAMS = 3


class ForkServer:
    """``command``, in place of ``python``, runs a script in a fork of it until it is closed."""

    def __init__(self, *modules: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        address = f"{self._folder.name}/socket"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(64)  # requests wait here while the server still imports
            number = listener.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.forked_workers", str(number), *modules],
                cwd=Path(__file__).parent.parent,
                stdin=subprocess.PIPE,
                pass_fds=[number],
                start_new_session=True,  # an interrupt of the tests is no signal to their workers
            )
        # Without site-packages the client takes 20 ms, and an idle one few megabytes.
        self.arguments = (sys.executable, "-I", "-S", str(_CLIENT), address)
        self.command = shlex.join(self.arguments)

    @property
    def for_workers(self) -> dict[str, str]:
        """The environment of a driver whose workers shall be forks."""
        job = {"runtime_env": {"py_executable": self.command}}
        return {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(job)}  # as Ray's job server does it

    def close(self) -> None:
        """End the server; its forks go on."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._folder.cleanup()


def _serve(listener: socket.socket, modules: list[str]) -> None:
    """Fork at each request, until the end of standard input, which comes with that of the tests."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the dead
    ready = False
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        client = listener.accept()[0]
        request, streams = _receive(client)
        if not ready:
            # Ray takes settings from it when imported. Workers watch a process: that of the tests.
            os.environ.update(request["env"] | {"RAY_RAYLET_PID": str(os.getppid())})
            warm_up(modules)
            ready = True
        if os.fork() == 0:
            listener.close()
            _end_with_client(client)  # which sees its connection end with this process, too
            end_with(_run, request, streams)
        client.close()
        for stream in streams:
            os.close(stream)


def _receive(client: socket.socket) -> tuple[dict[str, Any], list[int]]:
    request, streams, _, _ = socket.recv_fds(client, 1 << 16, _NUM_STREAMS)
    while not request.endswith(b"\n"):
        request += client.recv(1 << 16)
    return json.loads(request), streams


def _end_with_client(client: socket.socket) -> None:
    """Ray knows the client alone, and so does whoever kills what a run has left."""

    def watch() -> None:
        client.recv(1)
        os.killpg(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="client").start()


def _run(request: dict[str, Any], streams: list[int]) -> None:
    os.setsid()  # Ray may end a worker with its whole process group
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    become(**request)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
    os._exit(0)  # taking apart all that was imported would take a second
