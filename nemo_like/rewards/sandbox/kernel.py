"""System calls that Python has no names for."""

import ctypes
import os
import struct
from collections.abc import Sequence

NEW_USER, NEW_PID, NEW_MOUNT = 0x10000000, 0x20000000, 0x00020000
NEW_NET, NEW_IPC, NEW_UTS = 0x40000000, 0x08000000, 0x04000000
_NEW_ANY = 0x7E020000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT = 0x1, 0x2, 0x4, 0x20
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
_MNT_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE, _READ_ONLY_NOSUID = -100, 0x8000, 0x3
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_DROP = 1, 4, 22, 24
_PR_SET_SECUREBITS, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 28, 36, 38
_SIGKILL = 9

_libc = ctypes.CDLL(None, use_errno=True)

_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
_PIVOT_ROOT, _MOUNT_SETATTR = (155, 41), 442
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_CLONE, _CLONE3 = (56, 220), 435
_DENIED = {
    "socket": (41, 198),
    "shmget": (29, 194),  # memory that no process's own size shows, as that of memfd_create
    "msgget": (68, 186),
    "memfd_create": (319, 279),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": _PIVOT_ROOT,
    "chroot": (161, 51),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "perf_event_open": (298, 241),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),  # opens sockets without the call
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "mount_setattr": (_MOUNT_SETATTR, _MOUNT_SETATTR),
    "memfd_secret": (447, 447),
}
_DENIED_OUTSIDE = {  # of files, which Landlock leaves to their owner; -1: this machine has none
    "chmod": (90, -1),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, -1),
    "fchown": (93, 55),
    "lchown": (94, -1),
    "fchownat": (260, 54),
    "utime": (132, -1),
    "utimes": (235, -1),
    "futimesat": (261, -1),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
}


def _machine() -> tuple[int, int]:
    """What a filter calls this machine, and its column of call numbers."""
    found = _MACHINES.get(os.uname().machine)
    if found is None:
        raise OSError(f"no system calls are known of {os.uname().machine}")
    return found


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def unshare(flags: int) -> None:
    """Leave namespaces that are shared with the parent."""
    _checked(_libc.unshare(flags), "unshare")


def mount(
    source: str, target: str, kind: str | None = None, flags: int = 0, options: str = ""
) -> None:
    """Mount in this process's namespace."""
    words = [None if one is None else one.encode() for one in (source, target, kind, options)]
    source_, target_, kind_, options_ = words
    _checked(_libc.mount(source_, target_, kind_, flags, options_), f"mount {target}")


def make_read_only(path: str) -> None:
    """What is mounted at ``path``, and below it."""
    attributes = struct.pack("=QQQQ", _READ_ONLY_NOSUID, 0, 0, 0)
    _checked(
        _libc.syscall(
            _MOUNT_SETATTR, _AT_FDCWD, path.encode(), _AT_RECURSIVE, attributes, len(attributes)
        ),
        f"mount_setattr {path}",
    )


def change_root(path: str) -> None:
    """Make a mounted folder the root, and let go of the old one."""
    os.chdir(path)
    _checked(_libc.syscall(_PIVOT_ROOT[_machine()[1]], b".", b"."), "pivot_root")
    _checked(_libc.umount2(b".", _MNT_DETACH), "umount2")
    os.chdir("/")


def set_dumpable(*, value: bool) -> None:
    """Whether processes of the same user may look into this one, and its files in /proc are its."""
    _checked(_libc.prctl(_PR_SET_DUMPABLE, int(value), 0, 0, 0), "prctl")


def forbid_new_privileges() -> None:
    """Programs with a set-user-ID bit give none."""
    _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")


def adopt_orphans() -> None:
    """Become the parent of descendants whose own one ends."""
    _checked(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")


def end_with_parent() -> None:
    """Be killed when the parent is gone; a change of user undoes it."""
    _checked(_libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0), "prctl")


def drop_capabilities() -> None:
    """Of root, from the next program on, which then is a user like others."""
    _checked(_libc.prctl(_PR_SET_SECUREBITS, 0b11, 0, 0, 0), "securebits")
    for capability in range(64):
        _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)  # fails beyond the last


def filter_calls(*, is_outside: bool) -> None:
    """Refuse system calls that open sockets, namespaces, hidden memory or other processes.

    ``is_outside``: also those that change who may use a file, for programs that see the user's.
    """
    name, column = _machine()
    calls = _DENIED | (_DENIED_OUTSIDE if is_outside else {})
    denied = [numbers[column] for numbers in calls.values() if numbers[column] >= 0]
    code = _filter(name, denied, _CLONE[column])
    buffer = ctypes.create_string_buffer(code)
    program = struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(buffer))
    _checked(_libc.prctl(_PR_SET_SECCOMP, 2, program, 0, 0), "seccomp")


def _filter(machine: int, denied: Sequence[int], clone: int) -> bytes:
    """A program of classic BPF over ``struct seccomp_data``: number, machine, ..., arguments."""
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, absent = 0x7FFF0000, 0x00050001, 0x00050026  # EPERM, ENOSYS
    lines = [
        (load, 0, 0, 4),
        (equal, 1, 0, machine),
        (give, 0, 0, refuse),
        (load, 0, 0, 0),
        (at_least, 0, 1, 0x40000000),  # x86's other ABI
        (give, 0, 0, refuse),
        (equal, 0, 1, _CLONE3),  # its flags are in memory, and libraries fall back to clone
        (give, 0, 0, absent),
    ]
    for number in denied:
        lines += [(equal, 0, 1, number), (give, 0, 0, refuse)]
    lines += [
        (equal, 0, 3, clone),
        (load, 0, 0, 16),
        (any_bit, 0, 1, _NEW_ANY),
        (give, 0, 0, refuse),
        (give, 0, 0, allow),
    ]
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def restrict_files(readable: Sequence[str], devices: Sequence[str], own: str) -> int:
    """Landlock: nothing but these can be opened; signals reach this domain only, from version 6.

    Returns the kernel's version of it; OSError if it has none.
    """
    version = _checked(_libc.syscall(_LANDLOCK_CREATE, None, 0, 1), "landlock")
    everything = (1 << (13 + (version >= 2) + (version >= 3))) - 1
    everything |= (1 << 15) * (version >= 5)
    attributes = struct.pack("=Q", everything)
    if version >= 4:
        attributes += struct.pack("=Q", 0b11)  # no TCP
    if version >= 6:
        attributes += struct.pack("=Q", 0b11)  # no abstract sockets, no signals to others
    rules = _checked(_libc.syscall(_LANDLOCK_CREATE, attributes, len(attributes), 0), "landlock")
    execute, write, read, read_folder = 1, 2, 4, 8
    for path in readable:
        _allow_below(rules, path, execute | read | read_folder)
    for path in devices:
        _allow_below(rules, path, write | read)
    _allow_below(rules, own, everything)
    _checked(_libc.syscall(_LANDLOCK_RESTRICT, rules, 0), "landlock")
    os.close(rules)
    return version


def _allow_below(rules: int, path: str, rights: int) -> None:
    folder = os.open(path, os.O_PATH)
    rule = struct.pack("=Qi", rights, folder)
    _checked(_libc.syscall(_LANDLOCK_ADD, rules, 1, rule, 0), f"landlock {path}")
    os.close(folder)
