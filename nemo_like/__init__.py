"""nemo-like: reinforcement learning and post-training of language models on Ray."""

import contextlib
import os
from pathlib import Path

__version__ = "0.1.0"


def _keep_compiler_cache() -> None:
    """Out of TMPDIR, where torch makes its folder as soon as it is imported, and leaves it."""
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        return
    with contextlib.suppress(OSError, RuntimeError):  # no home, or a read-only one: as torch has it
        caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        folder = caches / "nemo_like" / "inductor"
        folder.mkdir(parents=True, exist_ok=True)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


_keep_compiler_cache()
