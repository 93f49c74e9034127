"""What a fork of a warm process does to be a command of its own."""

import os
import runpy
import sys
import tempfile


def run_script(
    script: str, arguments: list[str], folder: str, env: dict[str, str], output: str
) -> None:
    """``become`` with both streams in the file ``output``."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    become(script, arguments, folder, env)


def become(script: str, arguments: list[str], folder: str, env: dict[str, str]) -> None:
    """``python script arguments``, typed in ``folder``."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # found anew, in this environment
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(script)  # noqa: PTH120
    runpy.run_path(script, run_name="__main__")
