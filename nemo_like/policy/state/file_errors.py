"""What reading and writing weights fails with, as one sentence instead of a traceback."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager

from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from nemo_like.distributed.failures import is_disconnection
from nemo_like.errors import RunError, UserError


@contextmanager
def told_as(kind: type[UserError] | type[RunError], what: str) -> Iterator[None]:
    """Within, a file that cannot be read or written raises ``kind``: ``what``, and the reason."""
    try:
        yield
    except CheckpointException as error:  # no Exception; every rank gets the failures of all
        reason, _ = next(iter(error.failures.values()))
        if isinstance(reason, UserError):  # names the file already
            raise reason from None
        raise kind(f"{what}: {_first_line(reason)}") from None
    except pickle.UnpicklingError as error:  # whose text recommends to run it
        reason = "a file holds more than tensors, pickled, and was not loaded"
        raise kind(f"{what}: {reason}") from error
    except (OSError, RuntimeError, SafetensorError) as error:
        if is_disconnection(error):
            raise  # a collective in between
        raise kind(f"{what}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
