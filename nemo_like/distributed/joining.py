"""Join a running Ray cluster."""

import re
from collections.abc import Callable

from ray.exceptions import AuthenticationError

from nemo_like.distributed.connection import expect_head, in_a_line, init_in_thread
from nemo_like.errors import RunError, UserError

_JOIN_TIMEOUT_S = 30.0
_HOST_AND_PORT = re.compile(r"[^\s/]+:[0-9]{1,5}")


def join(address: str) -> Callable[[], None]:
    """Join it; returns how to leave. UserError or RunError as ``connection.connect``."""
    if address.startswith("ray://"):
        raise UserError(
            f"RAY_ADDRESS={address} is a Ray Client address, which cannot pass object references "
            "between workers; use host:port of the cluster, or ray job submit."
        )
    if address != "auto" and not _HOST_AND_PORT.fullmatch(address):
        raise UserError(
            f"RAY_ADDRESS={address!r} is not an address of a cluster, which is host:port (port "
            "6379 by default), or auto for one on this machine; for a job server's "
            "address, use ray job submit --address."
        )
    try:
        expect_head(address)
    # The latter two for port 65536, and for a name with an empty or too long label.
    except (OSError, OverflowError, UnicodeError) as error:
        raise UserError(
            f"RAY_ADDRESS={address}: no Ray answers there ({error}); start that cluster, or unset "
            "RAY_ADDRESS to start one here."
        ) from error
    try:
        return init_in_thread(_JOIN_TIMEOUT_S, lambda: None, address=address)
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
            f"RAY_ADDRESS={address} could not be joined: {in_a_line(error)}; see that "
            "that cluster runs, with this Ray and this Python, and that this process has its token "
            "(RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH), or unset RAY_ADDRESS to start one here."
        ) from error
