"""Programs that try to harm what runs them. ``VICTIM`` stands for a folder outside, ``WORD`` for an
argument by which what they leave behind is found."""

FORK = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""
DAEMON = """
import os, subprocess, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.close(1); os.close(2)
        os.execvp("sleep", ["sleep", "WORD"])
    os._exit(0)
os.wait()
print("42")
"""
HARNESSES = """
import os, signal
for pid in (os.getppid(), 1, -1, 0):
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass
"""
DEAF = """
import os, signal, time
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
while True:
    time.sleep(1)
"""
SPY = """
import glob, os
found = dict(os.environ)
for path in glob.glob("/proc/*/environ") + ["VICTIM/secret", "/root/.netrc", "/etc/shadow"]:
    try:
        found[path] = open(path).read()
    except OSError:
        pass
assert any("s3cr3t" in value for value in found.values())
print(42)
"""
OUTSIDE = """
import os
for folder in ("VICTIM", "/", "/etc", "/tmp", "/var/tmp", "/dev/shm", "/usr", "/root", "/home"):
    try:
        open(folder + "/OWNED.WORD", "w").close()
    except OSError:
        pass
"""
LINKS = """
import os, shutil
for target in ("VICTIM", "/etc", "/"):
    os.symlink(target, "to" + target.replace("/", "_"))
    try:
        open("to" + target.replace("/", "_") + "/OWNED.WORD", "w").close()
        os.remove("to" + target.replace("/", "_") + "/secret")
    except OSError:
        pass
for target in ("VICTIM", "../..", "/etc"):
    shutil.rmtree(target, ignore_errors=True)
"""
FILL = """
i = 0
while True:
    with open(f"file{i}", "wb") as file:
        file.write(bytes(1 << 20))
    i += 1
"""
DEEP = """
import os
for _ in range(1200):
    os.mkdir("d"); os.chdir("d")
"""
LOCKED = """
import os
os.makedirs("a/b/c"); open("a/b/c/file", "w").close()
for path in ("a/b/c", "a/b", "a", "."):
    os.chmod(path, 0)
"""
SOCKET = """
import socket
for kind in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX):
    try:
        one = socket.socket(kind)
        one.connect("/var/run/docker.sock" if kind == socket.AF_UNIX else ("127.0.0.1", 6379))
        print(42)
    except OSError:
        pass
"""
SPAWN = """
import subprocess, sys
while True:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)", "WORD"])
"""
THREADS = """
import threading, time
while True:
    threading.Thread(target=time.sleep, args=(99,)).start()
"""
TRACE = """
import ctypes, os
libc = ctypes.CDLL(None)
for pid in (1, os.getppid()):
    if libc.ptrace(16, pid, 0, 0) == 0:
        print(42)
if libc.unshare(0x10000000) == 0:
    print(42)
"""
SHARED = """
import ctypes
libc = ctypes.CDLL(None)
held = [libc.shmget(0, 1 << 30, 0o1600) for _ in range(16)]
import os
files = [os.memfd_create("x") for _ in range(16)]
print(42)
"""
HOSTILE = {
    "fork bomb": FORK,
    "spawn": SPAWN,
    "threads": THREADS,
    "daemon": DAEMON.replace('print("42")', 'print("41")'),
    "kill": HARNESSES,
    "kill the group": "import os\nos.killpg(0, 9)",
    "deaf": DEAF,
    "spy": SPY,
    "outside": OUTSIDE,
    "links": LINKS,
    "fill": FILL,
    "deep": DEEP,
    "locked": LOCKED,
    "socket": SOCKET,
    "trace": TRACE,
    "shared": SHARED,
    "loop": "while True: pass",
    "memory": "held = []\nwhile True: held.append(bytearray(1 << 24))",
    "8 GB": "held = [0] * (1 << 30)",
    "output": "while True: print('42' * 1000)",
    "error output": "import os\nwhile True: os.write(2, b'x' * 65536)",
    "one line": "import sys\nsys.stdout.write('x' * 100_000_000)",
    "recursion": "def f(): return f()\nf()",
    "no recursion limit": "import sys\nsys.setrecursionlimit(10**9)\ndef f(): return f() + 1\nf()",
    "exit": "import os\nos._exit(0)",
    "sys.exit": "import sys\nsys.exit(0)",
    "segfault": "import ctypes\nctypes.string_at(0)",
    "close": "import os\nos.closerange(0, 1000)\nwhile True: pass",
    "huge integer": "x = 9 ** 9 ** 9",
    "huge power": "print(str(7 ** 3_000_000))",
    "own folder": "import os, shutil\nshutil.rmtree(os.getcwd())\nprint(41)",
    "syntax": "def f(:\n    pass",
    "null": "print('\\0' * 10)",
    "not UTF-8": "import os\nos.write(1, bytes(range(128, 256)))",
    "sleep": "import time\ntime.sleep(99)",
    "read": "import sys\nwhile True: sys.stdin.read(1)",
    "stop": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "abort": "import os\nos.abort()",
    "priority": "import os\nos.nice(-20)",
    "clock": "import time\ntime.clock_settime(time.CLOCK_REALTIME, 0)",
    "mount": "import subprocess\nsubprocess.run(['mount', '-t', 'tmpfs', 'x', '/etc'], check=True)",
    "sudo": "import os\nos.setuid(0)\nopen('/etc/OWNED.WORD', 'w')",
    "pipe": "import os\nos.mkfifo('p')\nopen('p')",
    "alarm": "import signal, time\nsignal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)\ntime.sleep(9)",
    "limits": "import resource as r\nr.setrlimit(r.RLIMIT_AS, (-1, -1))\nheld = bytearray(2 << 30)",
    "terminal": "import fcntl\nfcntl.ioctl(0, 0x5412, b'x')",
    "spray": "import os\nwhile True:\n    for pid in range(2, 300):\n        try: os.kill(pid, 9)\n"
    "        except OSError: pass",
    "zip": "import zlib\nzlib.decompress(zlib.compress(bytes(1 << 28)) * 1)",
}
AGAIN = """
kill spy outside links fill memory output daemon socket
trace threads spawn locked deep segfault exit
"""
"""Names of those that are worth a second time, and do not wait for their time limit."""
