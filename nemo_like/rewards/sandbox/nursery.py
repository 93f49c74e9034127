"""The process that forks supervisors, so that none has to start Python and import anything.

Started once by each process that runs programs, and gone with it.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from nemo_like.rewards.sandbox.supervisor import supervise

_ROOT = str(Path(__file__).parents[3])
_MAIN = (
    f"import sys; sys.path.insert(0, {_ROOT!r}); "
    "from nemo_like.rewards.sandbox.nursery import serve; serve(int(sys.argv[1]))"
)
_NUM_FILES = 5
_lock = threading.Lock()
_started: tuple[int, subprocess.Popen[bytes], socket.socket] | None = None


def fork_supervisor(files: Sequence[int]) -> None:
    """Have one forked that gets these file descriptors, as ``supervise`` lists them."""
    global _started
    with _lock:
        try:
            socket.send_fds(_connection(), [b"x"], files)
        except BrokenPipeError:  # it was killed
            _started = None
            socket.send_fds(_connection(), [b"x"], files)


def _connection() -> socket.socket:
    """To a nursery of this process, which may itself be a fork."""
    global _started
    if _started is None or _started[0] != os.getpid() or _started[1].poll() is not None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _MAIN, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={},
                cwd="/",
                start_new_session=True,
            )
        _started = os.getpid(), process, ours
    return _started[2]


def serve(connection: int) -> None:
    """Fork a supervisor for each message, until the other end is closed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # its end comes over the socket
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system buries them
    pool = socket.socket(fileno=connection)
    while True:
        word, files, _, _ = socket.recv_fds(pool, 1, _NUM_FILES)
        if not word:
            return
        if os.fork() == 0:
            pool.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            supervise(*files)
            os._exit(0)
        for one in files:
            os.close(one)
