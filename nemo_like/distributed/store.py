"""Where ranks meet: torch's key-value store, on one address.

It has no authentication: who can connect can read and write what ranks tell each other there. Left
alone, torch listens on every interface of the node.
"""

import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

_TIMEOUT = timedelta(seconds=300)
_ANYWHERE = "0.0.0.0"
_BACKLOG = 4096
"""Thousands of ranks connect at once."""


def listening_store(
    address: str, world_size: int | None, timeout: timedelta = _TIMEOUT
) -> TCPStore:
    """On a port that the system picks and we keep; an empty ``address``: on all interfaces."""
    host = address or _ANYWHERE
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.bind((host, 0))
        listener.listen(_BACKLOG)
        port = listener.getsockname()[1]
        store = TCPStore(
            host,
            port,
            world_size,
            True,
            timeout,
            wait_for_workers=False,
            master_listen_fd=listener.fileno(),
        )
        listener.detach()  # it is the store's now
    return store
