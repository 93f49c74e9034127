"""Joining a Ray cluster and leaving it, with a limit where Ray itself would wait for minutes."""

import atexit
import logging
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import ray
from ray._private import ray_constants
from ray.exceptions import AuthenticationError

from nemo_like.errors import RunError, UserError, exit_code

# Workers write logs of their own; Ray's greetings say nothing that ours do not.
_QUIET = {"log_to_driver": False, "logging_level": logging.ERROR}
_ANSWER_TIMEOUT_S = 10.0
_JOIN_TIMEOUT_S = 30.0
_HOST_AND_PORT = re.compile(r"[^\s/]+:[0-9]{1,5}")
_HTTP2_SETTINGS = 4
"""Type of the frame with which every gRPC server, such as Ray's head, greets, unasked."""


def connect() -> Callable[[], None]:
    """Join the cluster that RAY_ADDRESS names, or start one on this machine; returns how to leave.

    A process that is connected already (a notebook, a test) stays so, and leaving does nothing.
    Raises UserError if no Ray of this version answers at RAY_ADDRESS, RunError if its head does not
    go on answering, both within half a minute; RunError if Ray cannot be started here.
    """
    if ray.is_initialized():
        return lambda: None
    # The next call to a worker tells of a failure that nobody waited for, and one rank's of all
    # others'; Ray would print their tracebacks beside that sentence.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    on_sigterm = signal.getsignal(signal.SIGTERM)
    address = os.environ.get("RAY_ADDRESS", "")
    if address in ("", "local"):
        _start()
    else:
        _join(address)
    signal.signal(signal.SIGTERM, on_sigterm)  # Ray puts one in its place that aborts the process
    return _leave


def check_head() -> None:
    """RunError if the cluster's head does not answer, for which Ray itself waits for ever."""
    address = ray.get_runtime_context().gcs_address
    try:
        _expect_head(address)
    except OSError as error:
        raise RunError(
            f"The driver on {ray.util.get_node_ip_address()} lost Ray's head at {address} "
            f"({error}); mend the network or start Ray again, then go on with run.resume=true."
        ) from error


def _leave() -> None:
    cause = sys.exc_info()[1]
    try:
        check_head()
    except RunError:  # A signal to the whole process group, as a terminal sends it, may end it.
        _give_up_ray(cause)
    else:
        with _uninterrupted():
            ray.shutdown()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Without Ctrl-C and its like: a Ray that ends half-way ends this process, with code 1."""
    previous = {}
    if threading.current_thread() is threading.main_thread():
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        previous = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _give_up_ray(cause: BaseException | None) -> None:
    """Let this process end without Ray's consent, and with the exit code that ``cause`` has.

    Ray's own end waits for the head for two minutes and then ends the process unheard; without it
    Ray's threads crash an interpreter that is being taken down.
    """
    atexit.unregister(ray.shutdown)
    atexit.register(_end_at_once, exit_code(cause))


def _end_at_once(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _start() -> None:
    try:
        with _on_loopback():
            ray.init(address="local", include_dashboard=False, **_QUIET)
    except Exception as error:  # Ray raises a plain one where a process of its own does not come up
        raise RunError(
            f"Ray could not be started on this machine: {_in_a_line(error)}; see that "
            "its folders can be written (~/.ray for its token; TMPDIR, or a short path in "
            "RAY_TMPDIR, for its sessions and their logs), and what the variables RAY_... say."
        ) from error


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Within, Ray starts with 127.0.0.1 for this node, which its processes then listen on alone.

    It does so by itself on macOS and Windows; elsewhere its argument for the node's address refuses
    loopback. (The variable that this constant is read from counts when ray is imported.)
    """
    was = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = was


def _in_a_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")


def _join(address: str) -> None:
    if address.startswith("ray://"):
        raise UserError(
            f"RAY_ADDRESS={address} is a Ray Client address, which cannot pass object references "
            "between workers; use host:port of the cluster, or ray job submit."
        )
    if address != "auto" and not _HOST_AND_PORT.fullmatch(address):
        raise UserError(
            f"RAY_ADDRESS={address!r} is not an address of a cluster, which is host:port (port "
            "6379 unless told otherwise), or auto for one on this machine; for a job server's "
            "address, use ray job submit --address."
        )
    _check_answer(address)
    try:
        _init_within(address, _JOIN_TIMEOUT_S)
    except AuthenticationError as error:
        raise UserError(
            f"RAY_ADDRESS={address} wants a token, and none was found; put the cluster's into "
            "~/.ray/auth_token, or name its file in RAY_AUTH_TOKEN_PATH."
        ) from error
    except TimeoutError as error:
        raise RunError(
            f"RAY_ADDRESS={address}: ray.init could not join that cluster within "
            f"{_JOIN_TIMEOUT_S:g} s; see that its head is well (ray status) and that this machine "
            "is one of its nodes (ray start), or unset RAY_ADDRESS to start one here."
        ) from error
    except Exception as error:  # as in _start
        raise UserError(
            f"RAY_ADDRESS={address} could not be joined: {_in_a_line(error)}; see that "
            "that cluster runs, with this Ray and this Python, and that this process has its token "
            "(RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH), or unset RAY_ADDRESS to start one here."
        ) from error


def _init_within(address: str, limit_s: float) -> None:
    """ray.init; TimeoutError after ``limit_s``.

    Its waits are in C++, where no signal reaches them, so it has a thread, which may be left.
    """
    done: Future[None] = Future()

    def init() -> None:
        try:
            ray.init(address=address, **_QUIET)
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=init, name="ray.init", daemon=True).start()
    try:
        done.result(limit_s)
    except (TimeoutError, KeyboardInterrupt) as error:
        _give_up_ray(error)
        raise


def _check_answer(address: str) -> None:
    try:
        _expect_head(address)
    # The latter two for port 65536, and for a name with an empty or too long label.
    except (OSError, OverflowError, UnicodeError) as error:
        raise UserError(
            f"RAY_ADDRESS={address}: no Ray answers there ({error}); start that cluster, or unset "
            "RAY_ADDRESS to start one here."
        ) from error


def _expect_head(address: str) -> None:
    """OSError if nothing, something that says nothing, or something else listens there."""
    host, _, port = address.rpartition(":")
    if not host:
        return  # "auto": Ray looks the address up itself
    with socket.create_connection((host.strip("[]"), int(port)), _ANSWER_TIMEOUT_S) as connection:
        if os.environ.get("RAY_USE_TLS", "0") == "1":
            return  # It waits for our first word then, which is Ray's to say.
        try:
            greeting = connection.recv(4)
        except TimeoutError as error:
            raise TimeoutError(f"connected, and silent for {_ANSWER_TIMEOUT_S:g} s") from error
    if len(greeting) < 4 or greeting[3] != _HTTP2_SETTINGS:
        raise ConnectionError(f"what listens greets with {greeting!r}, as Ray does not")
