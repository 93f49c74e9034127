"""What runs around a program's functions: read as text, and run inside the sandbox.

It reads its job from standard input, runs the program with an empty one, and answers on the last
line of what was standard output. A program can look into all of this, and so answer itself: a
value still has to be right, but statements can be made to pass.
"""

import json
import os
import sys
import types


def _plain(value):
    """Other types as JSON has them: NumPy's, and other sequences."""
    for name in ("tolist", "item"):
        if hasattr(value, name):
            return getattr(value, name)()
    if isinstance(value, (set, frozenset)):
        return {"a set": sorted(value)}  # equal to no list
    return list(value)


def _main():
    job = json.loads(sys.stdin.buffer.read())
    answer = os.dup(1)
    os.dup2(os.open("/dev/null", os.O_RDWR), 0)
    os.dup2(2, 1)
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)
    # Imported, not run: what stands below ``if __name__ == "__main__"`` would read an empty input.
    sys.modules["program"] = module = types.ModuleType("program")
    names = vars(module)
    exec("from typing import *", names)  # which LeetCode's signatures take for granted
    sys.argv = ["main.py"]
    exec(compile(job["program"], "main.py", "exec"), names)
    value = None
    if "code" in job:
        exec(compile(job["code"], "test.py", "exec"), names)
    else:
        function = names.get(job["name"])
        if function is None:
            function = getattr(names["Solution"](), job["name"])
        value = function(*job["arguments"])
    text = json.dumps(value, default=_plain)
    with os.fdopen(answer, "w") as file:
        file.write(f"\n{job['word']}{text}")
    os._exit(0)


if __name__ == "__main__":
    _main()
