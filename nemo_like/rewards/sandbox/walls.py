"""Puts a supervisor's child behind walls: namespaces with a root of its own, or what there is.

Runs in the supervisor only, on the standard library.
"""

import contextlib
import os
import resource
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_like.rewards.sandbox import kernel

AS_ROOT, AS_USER, AS_NOBODY, PLAIN = "root", "user", "nobody", "plain"
"""Namespaces that root makes, or any user; another user's number, for root without namespaces; or
neither. The first two have a root folder of their own."""
HOME = "/home/program"
"""Scratch folder in namespaces."""
_INSIDE = 65534
_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc", "/opt")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "shm": HOME,
}
_SAFE = kernel.MS_NOSUID | kernel.MS_NODEV


def has_namespaces(level: str) -> bool:
    """Whether the program has a root folder and process numbers of its own."""
    return level in (AS_ROOT, AS_USER)


def leave_processes(level: str) -> None:
    """In the supervisor: its next child is the first process of a namespace, if there is one."""
    if level == AS_USER:
        _new_user(os.geteuid())
    if has_namespaces(level):
        kernel.unshare(kernel.NEW_PID)


def enter(spec: Mapping[str, Any]) -> None:
    """In that child: what holds for it and all that it starts. Raises OSError."""
    level, user = spec["level"], spec["user"]
    if has_namespaces(level):
        kernel.unshare(kernel.NEW_MOUNT | kernel.NEW_NET | kernel.NEW_IPC | kernel.NEW_UTS)
        _make_root(spec)
    if level in (AS_ROOT, AS_NOBODY):
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        kernel.set_dumpable(value=True)  # /proc/self is root's otherwise
    if level == AS_ROOT:
        _new_user(user)  # which counts processes by itself
    if has_namespaces(level):
        with contextlib.suppress(OSError):  # the filter refuses new ones as well
            Path("/proc/sys/user/max_user_namespaces").write_text("0")
    kernel.forbid_new_privileges()


def start(spec: Mapping[str, Any]) -> None:
    """In the program's own process, before it begins: limits, and what it must not call or see."""
    for number in range(1, signal.NSIG):
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for name, most in spec["resources"].items():
        number = getattr(resource, name)
        hard = resource.getrlimit(number)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        extra = int(name == "RLIMIT_CPU")  # a signal first, which says why
        resource.setrlimit(number, (most, most if hard == most else most + extra))


def close_doors(spec: Mapping[str, Any]) -> list[str]:
    """In the program's own process, last: filters. Returns what this kernel has none of."""
    missing: list[str] = []
    with contextlib.suppress(OSError):  # not root
        kernel.drop_capabilities()
    is_outside = not has_namespaces(spec["level"])
    if is_outside:
        devices = [f"/dev/{name}" for name in _DEVICES]
        readable = [one for one in (*_readable(spec), "/proc") if Path(one).is_dir()]
        try:
            if kernel.restrict_files(readable, devices, spec["folder"]) < 6:
                missing.append("signals")
        except OSError:
            missing += ["files", "signals"]
    try:
        kernel.filter_calls(is_outside=is_outside)
    except OSError:
        missing.append("calls")
    return missing


def _readable(spec: Mapping[str, Any]) -> list[str]:
    """Folders without those that are below others, and without links."""
    found = [one for one in (*_FOLDERS, *spec["folders"]) if Path(one).is_dir()]
    return [
        one
        for one in dict.fromkeys(found)
        if not any(one != other and one.startswith(f"{other}/") for other in found)
    ]


def _make_root(spec: Mapping[str, Any]) -> None:
    """Folders of programs and libraries, read-only; devices; /proc; a scratch folder of memory."""
    root, home = Path(spec["folder"]), Path(spec["folder"] + HOME)
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", str(root), "tmpfs", _SAFE, "mode=755,size=1m")
    for folder in map(Path, _readable(spec)):
        place = root / folder.relative_to("/")
        if folder.is_symlink():  # /bin, where it is the one of /usr
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(folder.readlink())
            continue
        place.mkdir(parents=True)
        kernel.mount(str(folder), str(place), None, kernel.MS_BIND | kernel.MS_REC)
        kernel.make_read_only(str(place))
    _make_devices(root / "dev")
    (root / "proc").mkdir()
    kernel.mount("proc", str(root / "proc"), "proc", _SAFE)
    home.mkdir(parents=True)
    options = f"mode=700,size={spec['scratch_bytes']},nr_inodes={spec['scratch_files']}"
    kernel.mount("tmpfs", str(home), "tmpfs", _SAFE, options)
    if spec["level"] == AS_ROOT:
        os.chown(home, spec["user"], spec["user"])
    if not (root / "tmp").exists():
        (root / "tmp").symlink_to(HOME)
    kernel.change_root(str(root))
    # The root alone: /proc and the scratch folder are mounts of their own.
    kernel.mount("none", "/", None, kernel.MS_BIND | kernel.MS_REMOUNT | kernel.MS_RDONLY | _SAFE)


def _make_devices(folder: Path) -> None:
    folder.mkdir()
    for name in _DEVICES:
        (folder / name).touch()
        kernel.mount(f"/dev/{name}", str(folder / name), None, kernel.MS_BIND)
    for name, target in _LINKS.items():
        (folder / name).symlink_to(target)


def _new_user(user: int) -> None:
    """A user namespace, in which this process is nobody and has rights over its own only."""
    group = os.getegid()
    kernel.unshare(kernel.NEW_USER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{_INSIDE} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{_INSIDE} {group} 1")
