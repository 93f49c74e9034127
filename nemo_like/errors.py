"""The failures that end a run with one sentence instead of a traceback.

Each message names the key or the worker, the value, the rule and the remedy. Everything else that
is raised is a bug of ours and keeps its traceback.
"""

EXIT_USER_ERROR = 2
EXIT_RUN_ERROR = 1
EXIT_INTERRUPTED = 130
EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: try again later


class UserError(ValueError):
    """The user's configuration, data or files break a rule; the message has rule and remedy."""


class RunError(RuntimeError):
    """The world broke a run that was set up well: a dead worker, a failed check, a lost file."""


class WaitTimeoutError(TimeoutError):
    """A wait passed its limit; the message says who waited, for what, for how long and where."""


class StoppedError(BaseException):
    """A signal ends the run early; the message says how to continue it.

    No Exception: like KeyboardInterrupt it may be raised anywhere, and nothing on the way may take
    it for a failure of its own.
    """


def exit_code(error: BaseException | None) -> int:
    """Exit code of a process after ``error`` ended its run."""
    match error:
        case KeyboardInterrupt():
            return EXIT_INTERRUPTED
        case StoppedError():
            return EXIT_STOPPED
        case UserError():
            return EXIT_USER_ERROR
    return EXIT_RUN_ERROR


class WorkerDiedError(RunError):
    """A worker, or a process of its own, ended by itself; the driver's message: role, rank, node,
    phase and log tail."""
