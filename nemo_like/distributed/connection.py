"""Joining and leaving a Ray cluster, with limits where Ray itself would wait for minutes."""

import atexit
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import ray
from ray import JobID
from ray._private import ray_constants, services
from ray._private import utils as ray_utils
from ray._private import worker as ray_worker
from ray._private.node import Node
from ray._private.state import GlobalState

from nemo_like.distributed.sweeper import Sweeper
from nemo_like.errors import RunError, StoppedError, UserError, exit_code

# Workers write logs of their own; Ray's greetings say nothing that ours do not.
_QUIET = {"log_to_driver": False, "logging_level": logging.ERROR}
_UNUSED = ("start_monitor", "start_log_monitor", "start_api_server")
"""What starts Ray's autoscaler, its reader of logs and its dashboard, which a start waits for."""
_WITHOUT_IDLE_WORKERS = {"RAY_prestart_worker_first_driver": "0"}
"""By default Ray starts a worker for each processor, and waits for all of them."""
_ANSWER_TIMEOUT_S = 10.0
_ABANDONED = "ray.init, abandoned"
_BUSY = 3.0
"""Processes that want to run, for each processor, from where on Ray may miss its own limits."""
_SLOW_S = 25.0
_LEAST_GIB = 2.0
_HTTP2_SETTINGS = 4
"""Type of the frame with which every gRPC server, such as Ray's head, greets, unasked."""
logger = logging.getLogger(__name__)


def connect(mps_logs: Path | None = None) -> Callable[[], None]:
    """Join the cluster that RAY_ADDRESS names, or start one on this machine; returns how to leave.

    ``mps_logs``: start NVIDIA's MPS with it, which writes its logs there. A process that is
    connected already stays so, and leaving does nothing. Raises UserError if no Ray of this version
    answers, RunError if its head does not go on answering, both within half a minute; RunError if
    Ray cannot be started here; either if MPS cannot be used.
    """
    for thread in threading.enumerate():
        if thread.name == _ABANDONED:
            thread.join(_SLOW_S)  # It ends a Ray whose start was interrupted, in a notebook.
            if thread.is_alive():
                raise RunError("An earlier start of Ray has not ended yet; start Python again.")
    address = os.environ.get("RAY_ADDRESS", "")
    starts = not ray.is_initialized() and address in ("", "local")
    if mps_logs and not starts:
        from nemo_like.distributed.mps import check_mps

        check_mps()
    if ray.is_initialized():
        return lambda: None
    # The next call to a worker tells of a failure that nobody waited for, and one rank's of all
    # others'; Ray would print their tracebacks next to that sentence.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    if starts:
        leave = partial(_leave, _start(mps_logs))
    else:
        from nemo_like.distributed.joining import join

        leave = partial(_leave, join(address))
    if threading.current_thread() is threading.main_thread():
        # Ray's own handler, below Python's, would print a traceback before ours is called.
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
    return leave


def check_head() -> None:
    """RunError if the cluster's head does not answer; Ray itself would wait forever."""
    address = ray.get_runtime_context().gcs_address
    try:
        expect_head(address)
    except OSError as error:
        raise RunError(
            f"The driver on {ray.util.get_node_ip_address()} lost Ray's head at {address} "
            f"({error}); mend the network or start Ray again, then go on with run.resume=true."
        ) from error


def _leave(end: Callable[[], None]) -> None:
    """``end`` is called once Ray has ended."""
    cause = sys.exc_info()[1]
    try:
        check_head()
    except RunError:  # A signal to the whole process group, as a terminal sends it, may end it.
        _give_up_ray(cause)
    else:
        with _uninterrupted():
            node = vars(ray_worker)["_global_node"]
            below: list[psutil.Process] = []
            for one in (one for started in node.all_processes.values() for one in started):
                one.process.terminate = one.process.kill  # They block SIGTERM, Ray's own choice.
                with suppress(psutil.Error):
                    below += psutil.Process(one.process.pid).children(recursive=True)
            ray.shutdown()
            for process in below:  # Agents that still start notice only later that Ray has ended.
                with suppress(psutil.Error):
                    process.kill()
            end()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ignore Ctrl-C and similar: a half-ended Ray would end this process with code 1."""
    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM) if is_main else ()
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _give_up_ray(cause: BaseException | None) -> None:
    """Let this process end without waiting for Ray, with the exit code of ``cause``.

    Ray's own end waits for the head for two minutes and then ends the process unheard; without it
    Ray's threads crash an interpreter that is being taken down.
    """
    atexit.unregister(ray.shutdown)
    atexit.register(_end_at_once, exit_code(cause))


def _end_at_once(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _start(mps_logs: Path | None) -> Callable[[], None]:
    began = time.monotonic()
    sweeper: Sweeper | None = None
    try:
        sweeper = Sweeper()
        folder = str(sweeper.folder)
        # Then Ray takes 127.0.0.1 for this node, and its processes listen there alone, as on macOS
        # and Windows; elsewhere its argument for the address refuses loopback.
        on_loopback = _replaced(ray_constants, "ENABLE_RAY_CLUSTER", False)
        variables = _WITHOUT_IDLE_WORKERS | sweeper.environment | {"TMPDIR": folder}
        if mps_logs:
            from nemo_like.distributed.mps import start_mps

            variables |= start_mps(sweeper, mps_logs)
        with on_loopback, _few_processes(), _environment(variables):
            end_thread = init_in_thread(None, sweeper.close, address="local", _temp_dir=folder)
    except Exception as error:  # Ray raises a plain one where a process of its own does not come up
        if sweeper is not None:
            sweeper.close()
        if isinstance(error, UserError | RunError):
            raise  # of MPS
        waited, load = time.monotonic() - began, os.getloadavg()[0] / (os.cpu_count() or 1)
        free = psutil.virtual_memory().available / 2**30
        told = why_not_started(error, waited_s=waited, load=load, free_gib=free)
        raise RunError(f"Ray could not be started on this machine: {told}") from error

    def end() -> None:
        end_thread()
        sweeper.close()

    return end


def why_not_started(error: Exception, *, waited_s: float, load: float, free_gib: float) -> str:
    """Known facts, then what to check. ``load``: processes that wanted to run, by processor."""
    causes = []
    if free_gib < _LEAST_GIB and not isinstance(error, OSError):
        short = f"memory is short, of which Ray's processes take about {_LEAST_GIB:g} GiB"
        causes.append(f"{short}: free some")
    if (load > _BUSY or waited_s > _SLOW_S) and not isinstance(error, OSError):
        busy = "the machine is busy, and Ray's processes did not come up in time"
        causes.append(f"{busy}: try again when less runs on it")
    causes.append(
        "see that its folders can be written (~/.ray for its token; TMPDIR, or a short path in "
        "RAY_TMPDIR, for its sessions and their logs), and what the variables RAY_... say"
    )
    return (
        f"{in_a_line(error)} (after {waited_s:.0f} s, with {load:.1f} processes that want to run "
        f"for each processor and {free_gib:.1f} GiB of memory free); {'; or '.join(causes)}."
    )


@contextmanager
def _few_processes() -> Iterator[None]:
    """Let Ray start what runs workers, and nothing else."""
    # For a reason not to, the node's agent serves no metrics, and is up in half the time.
    reason = ImportError("no run reads Ray's metrics")
    instead: list[tuple[Any, str, Any]] = [(Node, one, lambda *_, **__: None) for one in _UNUSED]
    instead.append((ray_utils, "get_dashboard_dependency_error", lambda: reason))
    get_node: Any = getattr(services, "get_node", None)
    instead.append((services, "get_node", partial(_node_at_once, get_node)))
    with ExitStack() as stack:
        for where, name, value in instead:
            if hasattr(where, name):  # Other versions of Ray only start more slowly.
                stack.enter_context(_replaced(where, name, value))
        yield


def _node_at_once(get_node: Callable[..., Any], address: str, node_id: str) -> Any:
    """What Ray's ``get_node`` returns, which looks for a node only once a second."""
    state, end = GlobalState(), time.monotonic() + _ANSWER_TIMEOUT_S
    state._initialize_global_state(services._get_gcs_client_options(address))
    while node_id not in (one["NodeID"] for one in state.node_table()) and time.monotonic() < end:
        time.sleep(0.02)
    return get_node(address, node_id)


@contextmanager
def _environment(of_processes: Mapping[str, str]) -> Iterator[None]:
    """Set what Ray's processes, and so our workers, inherit; this one goes on without."""
    before = {name: os.environ.get(name) for name in of_processes}
    os.environ.update(of_processes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """Within, Ray's ``module`` has another value: it has no public setting for it."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def in_a_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")


def init_in_thread(
    limit_s: float | None, if_abandoned: Callable[[], None], **options: Any
) -> Callable[[], None]:
    """ray.init; TimeoutError after ``limit_s``. Returns how to end the thread, and all it started.

    It waits in C++, where no signal reaches it. If the wait is interrupted, Ray ends as soon as it
    has started, and then ``if_abandoned`` is called. In a thread it also leaves our handler of
    SIGTERM alone, and what it starts never sees that signal: workers must live until the driver has
    saved.
    """
    done: Future[None] = Future()
    left = threading.Event()

    def init() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP})
        try:
            # Ray's listener prints a page of advice for each worker that dies, before our sentence.
            with _replaced(ray_worker, "listen_error_messages", _log_errors):
                ray.init(**options, **_QUIET)
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)
            left.wait()  # The kernel ends what this thread has started with it.
        if threading.current_thread().name == _ABANDONED:
            ray.shutdown()
            if_abandoned()
            atexit.unregister(_end_at_once)

    thread = threading.Thread(target=init, name="ray.init", daemon=True)
    thread.start()
    try:
        done.result(limit_s)
    except (TimeoutError, KeyboardInterrupt, StoppedError) as error:
        thread.name = _ABANDONED
        left.set()
        _give_up_ray(error)
        raise
    return left.set


def expect_head(address: str) -> None:
    """OSError unless Ray listens there and answers."""
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


def _log_errors(worker: Any, stopped: threading.Event) -> None:
    """Log errors of Ray's processes that concern this job or the whole cluster."""
    ours = (None, worker.current_job_id.binary(), JobID.nil().binary())
    with suppress(OSError):  # the head is gone, which others notice
        worker.gcs_error_subscriber.subscribe()
        while not stopped.is_set():
            _, error = worker.gcs_error_subscriber.poll()
            if error is not None and error["job_id"] in ours:
                logger.info("Ray: %s", error["error_message"], extra={"file_only": True})
