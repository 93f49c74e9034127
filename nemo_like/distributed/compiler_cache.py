"""Where torch's compiler keeps what it has compiled."""

import contextlib
import os
from pathlib import Path

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def keep_compiler_cache() -> None:
    """Keep the cache of this process, and those that it starts, in the user's cache folder.

    Call it before torch is imported, which makes a folder in TMPDIR by then, and leaves it there.
    """
    if _VARIABLE in os.environ:
        return
    with contextlib.suppress(OSError, RuntimeError):  # no home, or a read-only one: as torch has it
        caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        folder = caches / "nemo_like" / "inductor"
        folder.mkdir(parents=True, exist_ok=True)
        os.environ[_VARIABLE] = str(folder)
