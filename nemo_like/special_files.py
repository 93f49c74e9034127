"""Pipes, devices and sockets: who reads one may wait for ever."""

import stat
from pathlib import Path

from nemo_like.errors import UserError

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def refuse_special(what: str, path: Path, depth: int = 0) -> None:
    """Raise UserError if ``path``, or what is up to ``depth`` folders below it, is one of these.

    ``what`` names ``path`` in the message. What does not exist is left to whoever reads it.
    """
    below = (one for level in range(1, depth + 1) for one in path.glob("/".join("*" * level)))
    for one in (path, *sorted(below)):
        try:
            kind = _KINDS.get(stat.S_IFMT(one.stat().st_mode))
        except OSError:
            continue
        if kind and one == path:
            raise UserError(f"{what} is {kind}, not a file; write its content to a file.")
        if kind:
            name = one.relative_to(path)
            raise UserError(f"{what}: {name} is {kind}, not a file; put a file in its place.")
